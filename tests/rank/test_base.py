"""What a rank says of an error, and of which errors it leaves at once; without a process."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from autotune.problem.outcome import OutcomeKind, Phase
from autotune.rank import base
from autotune.rank.base import EXIT_REPORTED, BaseRank
from autotune.util.units import GIB
from autotune.workers.failure_classifier import FailureEvidence, classify_failure
from autotune.workers.protocol import Message

FULL = {"free_bytes": GIB // 4, "total_bytes": 80 * GIB, "reserved_bytes": 78 * GIB}
ROOMY = {"free_bytes": 40 * GIB, "total_bytes": 80 * GIB, "reserved_bytes": 20 * GIB}
_CUBLAS = "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"


class Heard:
    """The parent's end of a channel, as a list."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def send(self, kind: str, **fields: Any) -> None:
        self.messages.append({"type": kind, **fields})


class Idle(BaseRank):
    def run(self) -> None:
        pass


def rank(device: str = "cuda") -> tuple[Any, Heard]:
    heard = Heard()
    made = Idle(cast("Any", heard), {"rank": 1, "world": 2, "device": device, "cap_bytes": 3 * GIB})
    made.phase = Phase.BACKWARD
    return made, heard


def caught(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as raised:
        return raised


def count(monkeypatch: pytest.MonkeyPatch, counted: dict[str, int]) -> None:
    monkeypatch.setattr(base, "collect", lambda *_: counted)


def test_every_error_carries_the_numbers(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    made, heard = rank()
    count(monkeypatch, FULL)
    made.report(caught(KeyError("x")))
    (message,) = heard.messages
    assert (message["type"], message["rank"], message["phase"]) == ("error", 1, "backward")
    assert message["numbers"] == FULL
    assert message["kinds"][0] == "builtins.KeyError"
    assert message["files"][-1] == __file__
    assert message["traceback"] in capfd.readouterr().err


class Left(Exception):
    """Instead of the process's end."""


@pytest.mark.parametrize(
    ("error", "counted", "leaves"),
    [
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"), {}, True),
        (RuntimeError("CUDA driver error: out of memory"), FULL, True),
        (RuntimeError(_CUBLAS), FULL, True),
        (RuntimeError(_CUBLAS), ROOMY, False),
        (RuntimeError("CUDA error: device-side assert triggered"), FULL, False),
        (RuntimeError("No CUDA GPUs are available"), {}, False),
        (MemoryError(), {}, True),
        (KeyError("CUDA out of memory"), FULL, False),
    ],
)
def test_a_rank_leaves_by_the_verdicts_rules(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, counted: dict[str, int], leaves: bool
) -> None:
    def leave(code: int) -> None:
        assert code == EXIT_REPORTED
        raise Left

    made, heard = rank()
    monkeypatch.setattr(base, "exit_process", leave)
    count(monkeypatch, counted)
    if not leaves:
        made.leave_if_out_of_memory(caught(error))
        assert heard.messages == []
        return
    with pytest.raises(Left):
        made.leave_if_out_of_memory(caught(error))
    assert heard.messages[-1]["numbers"] is counted, "as they were when it was decided"
    verdict = classify_failure(FailureEvidence("cuda", [heard.messages[-1]]))
    assert verdict.kind.is_oom
    assert verdict.kind is (
        OutcomeKind.OOM_HOST if isinstance(error, OSError | MemoryError) else OutcomeKind.OOM_DEVICE
    )


def test_no_memory_to_describe_it_is_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise MemoryError

    def leave(_: int) -> None:
        raise Left

    made, _ = rank("cpu")
    monkeypatch.setattr(base, "exit_process", leave)
    monkeypatch.setattr(made, "report", lambda *_: None)
    monkeypatch.setattr(base, "collect", refuse)
    with pytest.raises(Left):
        made.leave_if_out_of_memory(caught(KeyError("x")))


def test_a_default_dtype_of_the_script_does_not_round_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    made, _ = rank()
    made.torch, made.device = torch, SimpleNamespace(name="cuda", torch_device=lambda: torch.device("cpu"))
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda value, op, group: None)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert made.agree(1.23456789) == 1.23456789
    finally:
        torch.set_default_dtype(before)


def test_ranks_agree_in_the_group_in_which_deepspeed_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another group's communicator would count in the peak of a trial, and no training has it."""
    import torch

    made, _ = rank()
    made.torch, made.device = torch, SimpleNamespace(name="cuda", torch_device=lambda: torch.device("cpu"))
    groups = list[object]()
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda value, op, group: groups.append(group))
    for module in (SimpleNamespace(_WORLD_GROUP="trains"), None):
        monkeypatch.setitem(sys.modules, "deepspeed.utils.groups", module)
        made.agree(1.0)
    assert groups == ["trains", None], "without DeepSpeed torch's own group"


@pytest.mark.parametrize(
    ("asked", "of_device", "joined"),
    [
        ("cpu:gloo,cuda:nccl", "nccl", "cpu:gloo,cuda:nccl"),
        ("cpu:gloo,cuda:nccl", "gloo", "gloo"),
        ("nccl", "gloo", "gloo"),
        ("", "nccl", "nccl"),
    ],
)
def test_a_group_has_the_backends_that_the_script_names(
    monkeypatch: pytest.MonkeyPatch, asked: str, of_device: str, joined: str
) -> None:
    """With one of the CPU's, libraries gather objects there; ranks without a GPU have gloo alone."""
    made, _ = rank()
    seen: list[str] = []
    made.torch = SimpleNamespace(
        distributed=SimpleNamespace(init_process_group=lambda backend, **_: seen.append(backend))
    )
    made.rendezvous = cast(Any, SimpleNamespace(store=lambda torch, timeout: None))
    monkeypatch.setitem(sys.modules, "deepspeed", SimpleNamespace(init_distributed=lambda **_: None))
    made.device = cast(Any, SimpleNamespace(backend=of_device))
    made._join_group(asked)
    assert seen == [joined]


def test_every_group_of_a_step_waits_as_long_as_the_parent(tmp_path: Path) -> None:
    """DeepSpeed's own group has torch's default timeout, which is ten minutes with NCCL."""
    made, _ = rank()
    made.spec["silence_seconds"], made.torch = 90.0, torch
    made.device = SimpleNamespace(engine_built=lambda: None)
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    deepspeeds = torch.distributed.new_group()
    made.engine_built()
    found = deepspeeds._get_backend(torch.device("cpu")).options._timeout
    torch.distributed.destroy_process_group()
    assert found == timedelta(seconds=90)
