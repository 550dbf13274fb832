"""Differences between a launched command and the tuned one: refused, printed, or trained as typed."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.commands import launch
from autotune.problem.hardware import detect
from autotune.problem.job import Job, Script, ScriptProfile
from autotune.problem.outcome import Measurement, Outcome, OutcomeKind
from autotune.problem.space import load_space
from autotune.problem.training_trace import TracedStep, TrainingTrace
from autotune.script.profile import job_of
from autotune.search.storage import default_storage
from autotune.search.study import StudyStore
from autotune.search.trials import VERIFY
from tests.cli_call import call
from tests.commands.test_launch import NoTraining
from tests.conftest import make_candidate

CONFIG = {"zero_optimization": {"stage": 1}, "scheduler": {"type": "WarmupLR"}, "gradient_clipping": 0.5}
PROFILE = {
    "config": CONFIG,
    "client_optimizer": False,
    "through_arguments": True,
    "untested_optimizer": False,
    "micro_batch": 2,
    "accumulation": 2,
    "trained": [100],
    "frozen": 0,
    "model_config": {},
    "seq_len": 32,
    "tokens_per_sample": 32.0,
    "saved_bytes_per_sample": None,
    "precision": "bf16",
    "checkpointing": False,
    "checkpointed": False,
    "batch_note": "",
}
MICRO, ACCUMULATION = "--per_device_train_batch_size", "--gradient_accumulation_steps"
TUNED = f"train.py --deepspeed ds.json {MICRO} 2 {ACCUMULATION} 2"


def tuned(folder: Path, words: str = TUNED, config: dict[str, Any] = CONFIG, **profile: Any) -> Job:
    """The job of a study of two ranks: 8 samples an optimizer step, as its command says."""
    (folder / "ds.json").write_text(json.dumps(config))
    script = Script(
        tuple(words.split()), str(folder), profile=ScriptProfile.from_json({**PROFILE, "config": config, **profile})
    )
    return job_of(script, detect("cpu", 2), None)


def study(folder: Path, job: Job, trace: TrainingTrace | None = None) -> None:
    """The study `s` of a job, with a winner."""
    runs = folder / "runs" / "s"
    runs.mkdir(parents=True)
    space = load_space("cpu_demo")
    store, _ = StudyStore.create_or_resume("s", default_storage(runs), runs, job, detect("cpu", 2), space)
    store.begin_call(60)
    best = store.start(make_candidate(1, 4, 1), space, VERIFY)
    measured = Measurement(1.0, 0.01, 5, 8.0, 160.0, 300 << 20)
    store.finish(best, Outcome(OutcomeKind.OK, measurement=measured, trace=trace))
    store.set_winner(best, "verified")


def test_launch_names_the_studys_batch_and_refuses_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "Supervisor", NoTraining)
    monkeypatch.setattr(NoTraining, "given", {}, raising=False)
    (tmp_path / "train.py").write_text("")
    study(tmp_path, tuned(tmp_path), trace_of(rows=8))
    code, _, err = call(monkeypatch, capsys, "launch", "s", "--global-batch-size", "32", "--", *TUNED.split())
    assert (code, NoTraining.given) == (2, {})
    assert "--global-batch-size 32: study s was tuned for 8 samples per optimizer step" in err
    assert len(err.strip().splitlines()) == 1
    code, _, err = call(monkeypatch, capsys, "launch", "s", "--", *TUNED.split())
    assert code == 0, err
    assert "8 samples per optimizer step, as in study s" in err
    first = NoTraining.given["first_step"]
    assert first.complaint(trace_of(rows=8)) == ""
    assert "its first step has 32 samples, and study s was tuned for 8." in first.complaint(trace_of(rows=32))
    code, _, err = call(monkeypatch, capsys, "launch", "s", "--global-batch-size", "free", "--", *TUNED.split())
    assert (code, NoTraining.given["first_step"]) == (0, None)


def trace_of(rows: int) -> TrainingTrace:
    step = TracedStep(2, rows, 0.5, 1.0, 1.0, 0.1, (1e-4,))
    return TrainingTrace((step,), stage=1, precision="fp32", accumulation=2)


def test_maps_of_the_study_are_typed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "Supervisor", NoTraining)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "x.yaml").write_text("checks: {memory: true}\n")
    command = "train.py --deepspeed_config ds.json"
    job = tuned(tmp_path, f"{command} --bs 2 --gradient-accumulation-steps 2", through_arguments=False)
    assert job.script is not None
    micro, switch = ("train_micro_batch_size_per_gpu", "--bs"), ("activation_checkpointing", "checks.memory")
    by_name = ("gradient_accumulation_steps", "--gradient-accumulation-steps")
    study(tmp_path, replace(job, script=replace(job.script, flags=(micro, switch, by_name))))
    words = ["--", *command.split(), "x.yaml", "--bs", "2", "--gradient-accumulation-steps", "2"]
    code, _, err = call(monkeypatch, capsys, "launch", "s", *words)
    maps = ["--map", "train_micro_batch_size_per_gpu=--bs", "--map", "activation_checkpointing=checks.memory"]
    assert (code, len(err.strip().splitlines())) == (2, 1)
    assert " ".join(maps) in err
    code, _, err = call(monkeypatch, capsys, "launch", "s", *maps, *words)
    assert code == 0, err
    script = NoTraining.given["job"].script
    assert dict(script.flags) == dict([micro, switch, by_name])
    assert [Path(file.path).name for file in script.files] == ["x.yaml"]
