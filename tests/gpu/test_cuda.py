"""The CUDA path. Skipped, visibly, where there is no GPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.executors.base import MeasureSpec
from autotune.executors.local import LocalExecutor
from autotune.problem.hardware import detect
from autotune.problem.outcome import OutcomeKind
from autotune.search.certificate import Verdict, compare
from autotune.util.units import GIB, MIB
from tests.conftest import make_candidate, make_job

pytestmark = pytest.mark.gpu
QUICK = MeasureSpec(min_steps=3, min_seconds=0.2)


def measure(folder: Path, cap_bytes: int | None, candidate, **job):  # type: ignore[no-untyped-def]
    hardware = detect("cuda", 1, memory_cap_bytes=cap_bytes)
    executor = LocalExecutor(make_job(1, precision="bf16", **job), hardware, folder, [candidate])
    executor.open(print)
    session = executor.session(candidate, "0001")
    try:
        return session.measure(candidate, QUICK, 300.0), executor
    finally:
        session.close()
        executor.close()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_stage_and_the_gauge_agrees_with_torch(tmp_path: Path, stage: int) -> None:
    outcome, executor = measure(tmp_path, None, make_candidate(stage, 4), seq_len=512)
    assert outcome.ok, outcome
    measured = outcome.measurement
    assert measured is not None
    assert measured.torch_allocated_bytes <= measured.torch_reserved_bytes <= measured.nvml_peak_bytes
    assert measured.nvml_peak_bytes - measured.torch_reserved_bytes < 3 * GIB
    assert measured.overhead_bytes is not None
    assert 0 < measured.overhead_bytes < 3 * GIB
    assert measured.peak_bytes >= measured.torch_reserved_bytes + measured.overhead_bytes
    assert measured.mfu is None or 0 < measured.mfu < 1
    assert executor.meter.unreleased_memory_warnings() == [], "the device's memory is back before the next trial"


def test_traces_of_one_model_agree_at_every_stage(tmp_path: Path) -> None:
    """Recording copies no offloaded weights to the GPU, so its steps have an update there, too."""
    own, *others = (make_candidate(2, 4), make_candidate(1, 4), make_candidate(3, 4, offload_optimizer="cpu"))
    outcome, _ = measure(tmp_path / "own", None, own, seq_len=512)
    assert outcome.trace is not None, outcome
    for one in others:
        found, _ = measure(tmp_path / f"stage{one.stage}", None, one, seq_len=512)
        assert found.trace is not None, found
        assert found.trace.missing == ""
        assert all(step.update and step.gradient_norm for step in found.trace.counted)
        assert compare(outcome.trace, own, found.trace, one, is_users=False).verdict is Verdict.SAME, found.trace


def test_a_true_cuda_oom_under_the_cap(tmp_path: Path) -> None:
    outcome, executor = measure(tmp_path, 3 * GIB, make_candidate(2, 512), seq_len=2048)
    assert outcome.kind is OutcomeKind.OOM_DEVICE, outcome
    assert "OutOfMemoryError" in outcome.evidence
    assert outcome.missing_bytes
    assert outcome.peak_bytes <= 3 * GIB + 256 * MIB
    assert executor.meter.unreleased_memory_warnings() == []


@pytest.mark.parametrize("optimizer", ["adamw", "fused_adam"])
def test_the_fork_server_wakes_no_cuda(tmp_path: Path, optimizer: str) -> None:
    """Nor does building DeepSpeed's FusedAdam in it, whose builder asks for the card's architecture."""
    executor = LocalExecutor(
        make_job(1, precision="bf16", optimizer=optimizer), detect("cuda", 1), tmp_path, [make_candidate()]
    )
    said: list[str] = []
    executor.open(said.append)
    executor.close()
    assert executor.isolation == "fork", said
    assert not any("cannot be built" in line for line in said), said


def test_ranks_that_were_forked_train_with_fused_adam(tmp_path: Path) -> None:
    outcome, executor = measure(tmp_path, None, make_candidate(0, 1), seq_len=128, optimizer="fused_adam")
    assert outcome.ok, outcome
    assert executor.isolation == "fork"


def test_a_study_under_a_cap_ends_with_a_verified_winner(tmp_path: Path) -> None:
    """Small enough for a minute."""
    words = ["--model", "smollm2-135m", "--gpus", "1", "--memory-cap", "8GiB", "--seq-len", "512", "--budget", "75s"]
    command = [sys.executable, "-m", "autotune", "run", *words, "--study", "g", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["verified"] is True
    assert report["winner"]["outcome"]["measurement"]["peak_bytes"] <= 8 * GIB


_GROWS = """
import os, torch
os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"  # after the import, as a forked rank has it
kept = torch.zeros(1 << 22, device="cuda")
print([segment["is_expandable"] for segment in torch.cuda.memory._snapshot()["segments"]])
"""


def test_expandable_segments_can_be_chosen_after_torch_is_imported() -> None:
    done = subprocess.run([sys.executable, "-c", _GROWS], capture_output=True, text=True)
    assert done.stdout.strip() == "[True]", done.stderr[-2000:]


@pytest.mark.parametrize("on", [True, False])
def test_a_candidate_with_and_without_expandable_segments_is_measured(tmp_path: Path, on: bool) -> None:
    outcome, _ = measure(tmp_path, None, make_candidate(2, 4, expandable_segments=on), seq_len=512)
    assert outcome.ok, outcome
