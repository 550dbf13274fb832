"""Real training, recorded into its study."""

import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autotune.errors import UserError
from autotune.problem.candidate import Candidate
from autotune.problem.hardware import detect
from autotune.problem.space import load_space
from autotune.recovery import trainer_callback as recording
from autotune.recovery.trainer_callback import WARMUP_STEPS, StudyCallback
from autotune.search.storage import default_storage
from autotune.search.study import StudyStore
from autotune.search.trials import TRAINING, Record
from tests.conftest import make_job

CONFIG = {"zero_optimization": {"stage": 2, "reduce_bucket_size": 5e5}, "train_micro_batch_size_per_gpu": "auto"}
WARMUP_SECONDS = (900.0,) * WARMUP_STEPS


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a study that has no trial yet, of a job of two ranks."""
    found = tmp_path / "s"
    found.mkdir()
    StudyStore.create_or_resume(
        "s", default_storage(found), found, make_job(2), detect("cpu", 2), load_space("cpu_demo")
    )
    return found


def arguments(config: dict[str, Any] | None = CONFIG) -> SimpleNamespace:
    return SimpleNamespace(
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        gradient_checkpointing=False,
        hf_deepspeed_config=None if config is None else SimpleNamespace(config=config),
    )


def recorded(
    folder: Path, monkeypatch: pytest.MonkeyPatch, args: SimpleNamespace, seconds: Sequence[float], first: bool = True
) -> list[Record]:
    """The study's trials after a training whose steps took so long by its clock; `first`: in the process of rank 0."""

    def clock() -> Iterator[float]:
        now = 1000.0
        yield now  # the first step begins
        for took in seconds:
            now += took
            yield now

    times = clock()
    monkeypatch.setattr(recording, "time", types.SimpleNamespace(perf_counter=lambda: next(times)))
    state = SimpleNamespace(is_world_process_zero=first)
    callback = StudyCallback(str(folder))
    for _ in seconds:
        callback.on_step_begin(args, state, None)
        callback.on_step_end(args, state, None)
    callback.on_train_end(args, state, None)
    return StudyStore.load(str(folder)).records()


def test_a_training_is_a_trial_of_its_study(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (record,) = recorded(folder, monkeypatch, arguments(), (*WARMUP_SECONDS, 2.0, 1.0, 70.0, 3.0, 2.5))
    assert record.role == TRAINING
    assert (record.candidate.stage, record.candidate.micro_batch, record.candidate.accumulation) == (2, 4, 2)
    assert record.outcome.seconds == sum(WARMUP_SECONDS) + 78.5
    measured = record.outcome.measurement
    assert (measured.steps, measured.step_seconds) == (5, 2.5), "the median of those after the warm-up"
    assert measured.samples_per_second == pytest.approx(16 / 2.5)
    assert measured.peak_bytes > 2**20


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("args", "timed", "first"),
    [
        pytest.param(arguments(None), 2, True, id="without DeepSpeed"),
        pytest.param(SimpleNamespace(), 2, True, id="arguments that know no DeepSpeed"),
        pytest.param(arguments(), 1, True, id="too short to tell"),
        pytest.param(arguments(), 2, False, id="another rank"),
    ],
)
def test_what_is_no_training_with_deepspeed_is_not_recorded(
    folder: Path, monkeypatch: pytest.MonkeyPatch, args: SimpleNamespace, timed: int, first: bool
) -> None:
    assert recorded(folder, monkeypatch, args, (*WARMUP_SECONDS, *[1.0] * timed), first) == []


def test_two_steps_after_the_warm_up_are_enough(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(recorded(folder, monkeypatch, arguments(), (*WARMUP_SECONDS, 1.0, 1.0))) == 1


def test_a_study_that_is_not_there_is_said_before_anything_is_trained(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    first, other = (SimpleNamespace(is_world_process_zero=zero) for zero in (True, False))
    StudyCallback(str(folder)).on_train_begin(arguments(), first, None)
    mistyped = StudyCallback("stduy")
    mistyped.on_train_begin(arguments(), other, None)
    with pytest.raises(UserError, match="no study 'stduy'"):
        mistyped.on_train_begin(arguments(), first, None)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("study", "config"),
    [
        pytest.param("stduy", CONFIG, id="no such study"),
        pytest.param("s", {"zero_optimization": {"stage": 9}}, id="a value that no space has"),
        pytest.param("s", {"zero_optimization": "auto"}, id="a config that says nothing"),
        pytest.param("s", {"zero_optimization": {"stage": "auto"}}, id="a word in place of a number"),
    ],
)
def test_what_cannot_be_recorded_costs_a_line_and_no_model(
    folder: Path, capsys: pytest.CaptureFixture[str], study: str, config: dict[str, Any]
) -> None:
    callback = StudyCallback(str(folder.parent / study))
    callback._seconds = [1.0] * (WARMUP_STEPS + 2)
    callback.on_train_end(arguments(config), SimpleNamespace(is_world_process_zero=True), None)
    told = capsys.readouterr().err
    assert told.count("\n") <= 1
    assert told.startswith("autotune: this training is not recorded in") or StudyStore.load(str(folder)).records()


def test_a_training_outside_the_studys_space_is_recorded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the space has of it: the database has been told of other values, and the space's text may be unreadable."""
    store = StudyStore.load(str(folder))
    store.start(Candidate.of({"zero_stage": 0, "train_micro_batch_size_per_gpu": 1}), load_space("cpu_demo"))
    store._set("space", "of a newer version")
    for stage in (1, 3):
        config = {"zero_optimization": {"stage": stage, "overlap_comm": True}}
        args = arguments(config)
        args.per_device_train_batch_size = 1000 * stage
        records = recorded(folder, monkeypatch, args, (*WARMUP_SECONDS, 1.0, 1.0))
        assert records[-1].role == TRAINING
        assert records[-1].candidate.stage == stage
