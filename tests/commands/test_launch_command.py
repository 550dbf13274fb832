"""Differences between a launched command and the tuned one: refused, printed, or trained as typed."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.commands import launch
from autotune.problem.hardware import detect
from autotune.problem.job import Job, Script
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
    script = Script(tuple(words.split()), str(folder), profile={**PROFILE, "config": config, **profile})
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
    step = TracedStep(2, 2, rows, 0.5, 1.0, 1.0, 0.1, (1e-4,))
    return TrainingTrace((step,), stage=1, precision="fp32", accumulation=2)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("said", "words", "micro", "accumulation"),
    [
        ([], "--bs 2 --gradient-accumulation-steps 2", "--bs", "--gradient-accumulation-steps"),
        ([], "--bs 2 trainer.gradient_accumulation_steps=2", "--bs", "trainer.gradient_accumulation_steps"),
        ([], "--bs 2 --micro_batch_size 7", "--bs", "--gradient-accumulation-steps"),
        (["--map", "train_micro_batch_size_per_gpu=--rows"], "--rows 2", "--rows", "--gradient-accumulation-steps"),
        ([], "x.yaml --bs 2", "--bs", "--gradient-accumulation-steps"),
    ],
    ids=["as tuned", "another name", "a name beside the mapped", "typed now", "a file"],
)
def test_what_the_study_was_told_to_map_holds(
    said: list[str],
    words: str,
    micro: str,
    accumulation: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It was forgotten as soon as the command had one flag whose name is known, and a file that it alone tells was not read."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "Supervisor", NoTraining)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "x.yaml").write_text("checks: {memory: true}\n")
    command = "train.py --deepspeed_config ds.json"
    job = tuned(tmp_path, f"{command} --bs 2 --gradient-accumulation-steps 2", through_arguments=False)
    assert job.script is not None
    known = (
        ("train_micro_batch_size_per_gpu", "--bs"),
        ("activation_checkpointing", "checks.memory"),
        ("gradient_accumulation_steps", "--gradient-accumulation-steps"),  # by its name
    )
    study(tmp_path, replace(job, script=replace(job.script, flags=known)))
    code, _, err = call(monkeypatch, capsys, "launch", "s", "--trust", *said, "--", *command.split(), *words.split())
    assert code == 0, err
    script = NoTraining.given["job"].script
    assert dict(script.flags) == {
        "train_micro_batch_size_per_gpu": micro,
        "activation_checkpointing": "checks.memory",
        "gradient_accumulation_steps": accumulation,
    }
    assert [Path(file.path).name for file in script.files] == ["x.yaml"] * ("x.yaml" in words)


@pytest.mark.parametrize(("given", "taken"), [(None, "new.json"), ("own.json", "own.json")])
def test_the_launcher_names_its_config_now(
    given: str | None, taken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But one of --ds-config went over the launcher's when the study was made, and does so still."""
    for name in ("old.json", "new.json", "own.json"):
        (tmp_path / name).write_text(json.dumps(CONFIG))
    old = str(tmp_path / "old.json")
    beside = old if given is None else str(tmp_path / given)
    words = ("accelerate", "launch", "--deepspeed_config_file", old)
    known = Script(("train.py",), str(tmp_path), launcher=words, ds_config=beside)
    now = replace(known, launcher=(*words[:-1], "new.json"), ds_config=str(tmp_path / "new.json"))
    assert launch._config_beside(known, now) == str(tmp_path / taken)
