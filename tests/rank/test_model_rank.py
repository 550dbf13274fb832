"""A rank of a named model, heard as its parent hears it."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autotune.rank import workload
from autotune.rank.ds_config import trial_config
from autotune.rank.measure import MeasureRequest
from autotune.rank.model_rank import ModelRank
from autotune.rank.script_rank import MOST_SKIPPED, Overflows
from tests.conftest import make_candidate, make_job
from tests.rank.conftest import Parent, Rank, make_spec

MODEL = "autotune.rank.model_rank"
REQUEST = {"micro_batch": 2, "accumulation": 1, "min_steps": 2, "max_steps": 2, "min_seconds": 0.0, "max_seconds": 60.0}


def start(parent: Parent, folder: Path, world: int = 1, **more: Any) -> list[Rank]:
    job, candidate = make_job(world), make_candidate(1, 2)
    spec = make_spec(folder, job, config=trial_config(candidate, job), checkpointing=False, **more)
    return parent.start(MODEL, spec, world)


def imported_by_an_engine() -> list[str]:
    import deepspeed
    import torch

    before, net = set(sys.modules), torch.nn.Linear(4, 4)
    config = {"train_batch_size": 1, "zero_optimization": {"stage": 2}}
    deepspeed.initialize(model=net, optimizer=torch.optim.AdamW(net.parameters()), config=config)
    return sorted(set(sys.modules) - before)


@pytest.mark.slow
def test_what_zero_imports_is_there_before_the_fork(in_rank: Callable[..., Any]) -> None:
    """It was torch's compiler, five hundred modules and more than a second of each rank."""
    found = importlib.util.find_spec("deepspeed")
    if not (Path(str(found.origin)).parent / "runtime/zero/muon").exists():
        pytest.skip("this DeepSpeed is older than its Muon")
    imported = in_rank(imported_by_an_engine)
    assert len(imported) < 250, imported


def test_a_life_from_hello_to_bye(parent: Parent, tmp_path: Path) -> None:
    (rank,) = start(parent, tmp_path)
    assert rank.hello == {"type": "hello", "rank": 0, "pid": rank.hello["pid"]}
    rank.wait_for("phase", phase="ready")
    assert [message["phase"] for message in rank.heard] == ["start", "init", "ready"]
    rank.channel.send("measure", **REQUEST)
    measured = rank.wait_for("measured")
    assert len(measured["step_seconds"]) == 2
    assert all(seconds > 0 for seconds in measured["step_seconds"])
    assert measured["data_bytes"] > 0
    assert not measured["extrapolated"]
    progress = [message["steps"] for message in rank.heard if message["type"] == "progress"]
    assert progress == list(range(1, measured["warmup_steps"] + 3)), "every step is told"
    before = set(tmp_path.iterdir())
    rank.channel.send("certify", micro_batch=2)
    assert rank.wait_for("measured", certified=True)["saved"]
    assert set(tmp_path.iterdir()) == before, "nothing is written"
    rank.channel.send("stop")
    rank.wait_for("bye")
    assert rank.exit_status() == 0


def test_a_fresh_rank_goes_on_from_anothers_checkpoint(parent: Parent, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (rank,) = start(parent, tmp_path)
    rank.channel.send("measure", **REQUEST)
    steps = rank.wait_for("measured")["warmup_steps"] + 2
    rank.channel.send("checkpoint", folder=str(folder))
    assert rank.wait_for("measured", checkpointed=True)
    assert (folder / "latest").read_text() == f"global_step{steps}"
    rank.channel.send("stop")
    assert rank.exit_status() == 0
    again = tmp_path / "again"
    again.mkdir()
    (fresh,) = start(parent, again, resume=str(folder))
    assert fresh.wait_for("loaded")["data_bytes"] > 0
    fresh.wait_for("phase", phase="ready")
    assert [m["phase"] for m in fresh.heard if m["type"] == "phase"] == ["start", "init", "load", "ready"]
    fresh.channel.send("measure", **REQUEST)
    assert len(fresh.wait_for("measured")["step_seconds"]) == 2
    fresh.channel.send("stop")
    assert fresh.exit_status() == 0


def test_a_long_accumulation_is_extrapolated(parent: Parent, tmp_path: Path) -> None:
    (rank,) = start(parent, tmp_path)
    rank.channel.send("measure", **{**REQUEST, "accumulation": 16})
    measured = rank.wait_for("measured")
    assert measured["extrapolated"]
    assert len(measured["step_seconds"]) == 2
    assert sum(measured["step_seconds"]) > measured["measured_seconds"], "three of 16 micro-batches are run"
    rank.channel.send("stop")
    assert rank.exit_status() == 0


@pytest.mark.slow
def test_ranks_agree_on_their_clocks(parent: Parent, tmp_path: Path) -> None:
    ranks = start(parent, tmp_path, world=2)
    for rank in ranks:
        rank.channel.send("measure", **{**REQUEST, "min_steps": 3, "max_steps": 9, "min_seconds": 0.1})
    one, other = (rank.wait_for("measured") for rank in ranks)
    assert one["step_seconds"] == other["step_seconds"], "each the mean of both ranks'"
    assert one["warmup_steps"] == other["warmup_steps"]
    for rank in ranks:
        rank.channel.send("stop")
    assert [rank.exit_status() for rank in ranks] == [0, 0]


def test_candidate_that_cannot_win_is_measured_for_two_steps(parent: Parent, tmp_path: Path) -> None:
    (rank,) = start(parent, tmp_path)
    request = {**REQUEST, "min_steps": 5, "max_steps": 9}
    rank.channel.send("measure", **request, beaten_step_seconds=1e-9)
    assert len(rank.wait_for("measured")["step_seconds"]) == 2
    rank.channel.send("measure", **request, beaten_step_seconds=1e9)
    assert len(rank.wait_for("measured")["step_seconds"]) == 5
    rank.channel.send("stop")
    assert rank.exit_status() == 0


@pytest.mark.few(2)
@pytest.mark.parametrize(("where", "what"), [("start", "raise"), ("backward", "raise"), ("init", "oom")])
def test_a_failure_is_reported_with_its_phase(parent: Parent, tmp_path: Path, where: str, what: str) -> None:
    (rank,) = start(parent, tmp_path, fault={"rank": 0, "where": where, "what": what, "text": "on purpose"})
    rank.channel.send("measure", **REQUEST)
    assert rank.exit_status() == 13
    error = rank.heard[-1]
    assert (error["type"], error["phase"], error["rank"], error["cause"]) == ("error", where, 0, None)
    assert error["kinds"][0] == {"raise": "builtins.RuntimeError", "oom": "torch.OutOfMemoryError"}[what]
    assert {"raise": "on purpose", "oom": "out of memory"}[what] in error["text"]
    assert error["file"] == error["files"][-1]
    assert error["file"].endswith("rank/base.py")
    assert error["traceback"] in (tmp_path / "rank.log").read_text(), "its log has it too"
    assert error["numbers"]["reserved_bytes"] > 0, "what memory looks like then"


def test_a_parent_that_leaves_before_the_spec_ends_the_rank(parent: Parent) -> None:
    (rank,) = parent.greet(MODEL)
    rank.channel.close()
    assert rank.exit_status() == 1


def test_the_device_is_measured_again_once_the_engine_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed's communicator takes its buffers while the engine is made, after the group's first collective."""
    done: list[str] = []
    rank = ModelRank.__new__(ModelRank)
    rank.torch = torch
    rank.spec = {"config": {}, "checkpointing": False}
    rank.job = SimpleNamespace(liger=False, loss="full", compiled=False, torch_alone=False)  # type: ignore[assignment]
    rank.device = SimpleNamespace(  # type: ignore[assignment]
        torch_device=lambda: "cpu", engine_built=lambda: done.append("device"), note=lambda: None
    )
    monkeypatch.setattr(
        workload, "build", lambda job, place, config: (SimpleNamespace(parameters=list, modules=list), None)
    )

    def initialize(**given: Any) -> tuple[Any, ...]:
        done.append("engine")
        return SimpleNamespace(skipped_steps=0), None

    monkeypatch.setattr("deepspeed.initialize", initialize)
    rank._build()
    assert done == ["engine", "device"]


def rank_that_skips(steps: int) -> ModelRank:
    """A rank whose engine skips so many steps; each step takes a second more than the one before."""
    rank, seconds = ModelRank.__new__(ModelRank), iter(range(1, 1000))
    rank.engine = SimpleNamespace(skipped_steps=0, fp16_enabled=lambda: False)
    rank.overflows = Overflows(rank.engine)

    def step(batches: Any, request: MeasureRequest) -> list[float]:
        second = next(seconds)
        rank.engine.skipped_steps += second <= steps
        return [float(second)]

    rank._step = step  # type: ignore[method-assign]
    return rank


def test_a_step_that_deepspeed_skips_is_none() -> None:
    request, rank = MeasureRequest(1, 1, 1, 1, 0.0, 1.0), rank_that_skips(3)
    assert rank._whole_step(iter(()), request) == [4.0]
    with pytest.raises(RuntimeError, match="skipped 40 steps in a row"):
        rank_that_skips(MOST_SKIPPED)._whole_step(iter(()), request)
