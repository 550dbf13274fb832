"""`--parallel`: real trials beside each other on CPU ranks, and what cannot be had."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autotune.commands.request import Request
from autotune.commands.run import make_executor, parallel_executors
from autotune.executors.local import LocalExecutor
from autotune.problem.hardware import detect, usable_cpus
from autotune.rank.sandbox import Sandbox
from autotune.script.script import Script
from autotune.search.study import StudyStore
from autotune.search.trials import SEARCH
from tests.cli_call import call
from tests.conftest import make_candidate, make_job, processes_in, wait_until

SPACE = """\
name: few
about: six candidates, two of them bound by the host
knobs:
  zero_stage: [0, 2]
  offload_optimizer: [none, cpu]
  train_micro_batch_size_per_gpu: [1, 2]
"""
JOB = ("--model", "tiny-gemma-2", "--device", "cpu", "--seq-len", "16", "--space", "few.yaml", "--study", "s")


@pytest.mark.main_path
@pytest.mark.slow
def test_two_at_once(tmp_path: Path) -> None:
    if usable_cpus() < 2:
        pytest.skip("one CPU")
    (tmp_path / "few.yaml").write_text(SPACE)
    words = [
        "run",
        *JOB,
        "--gpus",
        "1",
        "--parallel",
        "2",
        "--budget",
        "10m",
        "--exhaustive",
        "--json",
        "--no-references",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "autotune", *words], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["verified"]
    store = StudyStore.load("s", runs=tmp_path / "runs")
    searched = [record for record in store.records() if record.role == SEARCH]
    assert len({record.candidate for record in searched}) == len(searched) == 6
    assert all(record.outcome and record.outcome.ok for record in searched)
    logs = [Path(record.outcome.log).parts for record in searched if record.outcome and record.outcome.log]
    assert {"beside-2" in parts for parts in logs} == {True, False}, "both places have measured"
    wait_until(lambda: not processes_in(tmp_path), "nothing is left")


def test_slots_have_sandboxes_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    study, hardware = tmp_path / "runs" / "s", detect("cpu", 1)
    job = replace(make_job(1), script=Script(("train.py",), str(tmp_path)))
    place: Any = SimpleNamespace(hardware=hardware, variables={})
    about = {"candidates": (), "request": Request(), "nodes": None}
    setup: Any = SimpleNamespace(job=job, hardware=hardware, folder=study, slots=(place, place), **about)
    first = make_executor(setup, study / "tuner-2", lambda: False)
    assert isinstance(first, LocalExecutor)
    (second,) = parallel_executors(setup, study / "tuner-2", lambda: False)
    sandboxes = [
        Sandbox.from_json(executor.session(make_candidate(), "1")._spec()["sandbox"]) for executor in (first, second)
    ]
    assert len({sandbox.folder for sandbox in sandboxes}) == 2
    assert all(sandbox.cwd == tmp_path and sandbox.files.is_dir() for sandbox in sandboxes)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--gpus", "1", "--parallel", "4000"), "--parallel 4000: "),
        (("--gpus", "1", "--parallel", "0"), "--parallel: expected at least 1, found 0"),
        (("--parallel", "2"), "--parallel 2: say with --gpus"),
        (("--gpus", "1", "--parallel", "2", "--hostfile", "none"), "none"),
        (("--gpus", "1", "--parallel", "2", "--nodes", "2"), "--nodes needs several machines"),
    ],
)
def test_what_cannot_be_had_is_one_line(
    words: tuple[str, ...],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "few.yaml").write_text(SPACE)
    code, _, err = call(monkeypatch, capsys, "run", *JOB, *words)
    assert code == 2
    assert said in err.splitlines()[-1]
    assert not (tmp_path / "runs").exists()
