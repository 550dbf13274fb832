"""The test of the machine before the first trial: whose fault it is when ranks are late."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autotune.errors import MachineError
from autotune.executors import local
from autotune.executors.local import P2P_OFF, LocalExecutor, check_group
from autotune.problem.hardware import named_hardware
from autotune.problem.outcome import Phase
from autotune.workers.group import WatchEnd
from tests.conftest import make_candidate, make_job

RANKS = 2


def check(monkeypatch: pytest.MonkeyPatch, folder: Path, imported: float, measured: float, most: float = 240.0) -> Any:
    """Checks a machine whose ranks have imported all, and have added up, at these seconds of a clock."""
    clock = [0.0]
    ahead = [(at, kind, rank) for at, kind in ((imported, "imported"), (measured, "measured")) for rank in range(RANKS)]

    def make_group(*_: Any, on_message: Callable[[int, dict[str, Any]], None], **__: Any) -> SimpleNamespace:
        def watch(until: Callable[[], bool], deadline: float) -> WatchEnd:
            while not until():
                clock[0], kind, rank = ahead.pop(0)
                if clock[0] > deadline:
                    return WatchEnd.DEADLINE
                on_message(rank, {"type": kind, "gb_per_s": 2.0 + rank})
            return WatchEnd.ARRIVED

        return SimpleNamespace(
            start=lambda *_, **__: WatchEnd.ARRIVED, watch=watch, end=lambda: None, greeted=True, phase=Phase.START
        )

    monkeypatch.setattr(local, "WorkerGroup", make_group)
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    hardware: Any = SimpleNamespace(count=RANKS)
    return check_group(None, hardware, {}, folder, lambda: False, most)  # type: ignore[arg-type]


def test_slow_imports_are_no_fault_of_the_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert check(monkeypatch, tmp_path, imported=1000.0, measured=1239.0) == 3.0, "of the rank that waits least"
    assert check(monkeypatch, tmp_path, imported=1000.0, measured=1021.0, most=20.0) is None


@pytest.mark.parametrize(
    ("imported", "measured", "said", "remedy"),
    [
        (10.0, 251.0, "no end within 240 s, in start: the ranks hang", "peer access may be broken"),
        (
            1801.0,
            1802.0,
            "no torch and deepspeed imported by the deadline of 1800 s",
            "the disk that Python's packages lie on",
        ),
    ],
)
def test_late_ranks_are_blamed_on_what_they_were_at(
    imported: float, measured: float, said: str, remedy: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(MachineError) as caught:
        check(monkeypatch, tmp_path, imported, measured)
    assert said in str(caught.value)
    assert remedy in str(caught.value)


@pytest.mark.parametrize(("hangs", "left"), [(0, {}), (1, P2P_OFF), (2, {})])
def test_ranks_that_hang_are_tried_without_p2p(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, hangs: int, left: dict[str, str]
) -> None:
    answers, said = [*[None] * hangs, 5.0], list[str]()
    monkeypatch.setattr(local, "check_group", lambda *_: answers.pop(0))
    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
    target: Any = SimpleNamespace(launcher=None)
    executor = LocalExecutor(make_job(), named_hardware("rtx4090", 2), tmp_path, [], target=target)
    executor.check(said.append)
    assert executor.session(make_candidate(), "0")._spec()["env"] == executor.hardware.environment == left
    assert (len(said), executor.hardware.gpu_facts.ring_gb_per_s) == (len(left), 5.0)
