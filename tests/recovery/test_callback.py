"""Real training, recorded into its study."""

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from autotune.problem.hardware import detect
from autotune.problem.space_file import load_space
from autotune.recovery.callback import WARMUP_STEPS, StudyCallback
from autotune.search.records import TRAINING
from autotune.search.storage import default_storage
from autotune.search.study import StudyStore
from tests.conftest import make_job


def test_a_training_is_a_trial_of_its_study(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    folder.mkdir()
    job = make_job(2)
    StudyStore.create_or_resume("s", default_storage(folder), folder, job, detect("cpu", 2), load_space("cpu_demo"))
    config = {"zero_optimization": {"stage": 2, "reduce_bucket_size": 5e5}, "train_micro_batch_size_per_gpu": "auto"}
    args = SimpleNamespace(
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        gradient_checkpointing=False,
        hf_deepspeed_config=SimpleNamespace(config=config),
    )
    state = SimpleNamespace(is_world_process_zero=True)
    callback = StudyCallback(str(folder))
    for _ in range(WARMUP_STEPS + 4):
        callback.on_step_begin(args, state, None)
        time.sleep(0.01)
        callback.on_step_end(args, state, None)
    callback.on_train_end(args, state, None)
    (record,) = StudyStore.load(str(folder)).records()
    assert record.role == TRAINING
    assert (record.candidate.stage, record.candidate.micro_batch, record.candidate.accumulation) == (2, 4, 2)
    measured = record.outcome.measurement if record.outcome else None
    assert measured is not None
    assert measured.steps == 4
    assert measured.step_seconds > 0.009
    assert measured.samples_per_second * measured.step_seconds == pytest.approx(16)
    assert measured.peak_bytes > 2**20


def test_a_training_without_deepspeed_is_not_recorded(tmp_path: Path) -> None:
    callback = StudyCallback(str(tmp_path))
    state = SimpleNamespace(is_world_process_zero=True)
    callback.on_train_end(SimpleNamespace(), state, None)
