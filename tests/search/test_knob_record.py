"""Turns of single knobs that a search has or has not tested."""

from __future__ import annotations

import numpy as np
import pytest

from autotune.problem.candidate import Candidate
from autotune.problem.outcome import Measurement
from autotune.search.knob_record import PRIOR_PAIRS, KnobRecord, KnobTurn

BATCH, BUCKET, STAGE, OVERLAP = ("train_micro_batch_size_per_gpu", "reduce_bucket_size", "zero_stage", "overlap_comm")
CANDIDATES = [
    Candidate.of(
        {STAGE: stage, BATCH: batch, BUCKET: bucket, OVERLAP: overlap, "gradient_accumulation_steps": 8 // batch}
    )
    for stage in (1, 2)
    for batch in (1, 2, 4, 8)
    for bucket in (10, 100)
    for overlap in (True, False)
]


def place(stage: int = 1, batch: int = 2, bucket: int = 10, overlap: bool = True) -> int:
    wanted = {STAGE: stage, BATCH: batch, BUCKET: bucket, OVERLAP: overlap}
    return next(at for at, one in enumerate(CANDIDATES) if wanted.items() <= one.as_dict.items())


def measured(speed: float, noise: float = 0.01) -> Measurement:
    return Measurement(1 / speed, 1.96 * noise / speed, 4, speed, speed, 2**30)


class Study:
    def __init__(self, sigma: float = 0.05) -> None:
        self.logs = np.zeros(len(CANDIDATES))
        self.record = KnobRecord(CANDIDATES, dict.fromkeys((STAGE, BATCH, BUCKET, OVERLAP), sigma))

    def measure(self, at: int, speed: float) -> None:
        self.record.observe(at, measured(speed), self.logs)

    def turns(self, best: int) -> list[KnobTurn]:
        return self.record.turns(best, np.ones(len(CANDIDATES), dtype=bool), self.logs)

    def open_turns(self, best: int) -> set[tuple[str, int]]:
        return {(turn.knob, turn.at) for turn in self.turns(best) if not turn.settled}


def test_every_knob_is_turned_and_sizes_by_one_value_each_way() -> None:
    study = Study()
    study.measure(place(), 10.0)
    assert study.open_turns(place()) == {
        (STAGE, place(stage=2)),
        (BATCH, place(batch=1)),
        (BATCH, place(batch=4)),
        (BUCKET, place(bucket=100)),
        (OVERLAP, place(overlap=False)),
    }, "accumulation follows from the micro-batch and is no turn"


def test_failed_trial_has_turned_its_knob() -> None:
    study = Study()
    study.measure(place(), 10.0)
    study.record.observe(place(overlap=False), None, None)
    assert (OVERLAP, place(overlap=False)) not in study.open_turns(place())


def test_turn_at_equal_first_order_settings_counts_and_one_at_another_stage_does_not() -> None:
    for stage, tested in ((1, True), (2, False)):
        study = Study()
        study.measure(place(stage=stage, bucket=100), 10.0)
        study.measure(place(stage=stage, bucket=100, overlap=False), 9.0)
        study.measure(place(), 11.0)
        assert ((OVERLAP, place(overlap=False)) not in study.open_turns(place())) == tested


@pytest.mark.parametrize(("effects", "settled"), [((0.0, -0.3), True), ((0.0,), False), ((0.0, 0.1), False)])
def test_knob_is_settled_after_two_effects_below_noise(effects: tuple[float, ...], settled: bool) -> None:
    study = Study()
    for effect, batch in zip(effects, (4, 8), strict=False):
        study.measure(place(stage=2, batch=batch), 10.0)
        study.measure(place(stage=2, batch=batch, overlap=False), 10.0 * np.exp(effect))
    study.measure(place(), 20.0)
    (turn,) = (turn for turn in study.turns(place()) if turn.knob == OVERLAP)
    assert turn.settled == settled


def test_size_is_not_settled_before_its_value_was_measured() -> None:
    study = Study()
    for batch in (4, 8):  # two steps up without gain, none of them to 8 at stage 1
        study.measure(place(batch=batch), 10.0)
        study.measure(place(batch=batch, bucket=100), 10.0)
    study.measure(place(stage=2, batch=1), 30.0)
    (turn,) = (turn for turn in study.turns(place(stage=2, batch=1)) if turn.knob == BATCH)
    assert turn.at == place(stage=2, batch=2)
    assert not turn.settled


def test_errors_of_predicted_effects_widen_the_doubt_and_correct_the_same_turn() -> None:
    study = Study(sigma=0.05)
    study.measure(place(), 10.0)
    before = study.record.sigma(OVERLAP)
    study.logs[place(stage=2, overlap=False)] = 0.2  # predicted to gain 20 % at stage 2
    study.measure(place(stage=2), 10.0)
    study.measure(place(stage=2, overlap=False), 10.0)
    assert study.record.errors[OVERLAP] == pytest.approx([-0.2])
    assert study.record.sigma(OVERLAP) == pytest.approx(((PRIOR_PAIRS * 0.05**2 + 0.2**2) / (PRIOR_PAIRS + 1)) ** 0.5)
    assert study.record.sigma(OVERLAP) > before
    mean, sigma = study.record.effect(place(), KnobTurn(OVERLAP, place(overlap=False), False), study.logs)
    assert mean == pytest.approx(-0.1)
    assert sigma < study.record.sigma(OVERLAP)


def test_pair_without_a_prediction_is_no_error() -> None:
    study = Study()
    study.record.observe(place(), measured(10.0), None)
    study.record.observe(place(overlap=False), measured(12.0), None)
    assert not study.record.errors[OVERLAP]


def test_choices_that_no_trial_measured_are_uncertain_at_every_setting() -> None:
    study = Study(sigma=0.05)
    study.measure(place(), 10.0)
    unsure = study.record.unmeasured_sigma()
    assert [unsure[place(stage=2, batch=8, overlap=overlap)] for overlap in (True, False)] == [0.0, pytest.approx(0.05)]
    assert unsure[place(bucket=100)] == 0.0, "sizes, and first-order knobs, are left to the surrogate"
    study.record.observe(place(overlap=False), None, None)
    assert study.record.unmeasured_sigma()[place(overlap=False)] == pytest.approx(0.05), (
        "a failed trial measured nothing"
    )
    study.measure(place(stage=2, overlap=False), 9.0)
    assert not study.record.unmeasured_sigma().any()
