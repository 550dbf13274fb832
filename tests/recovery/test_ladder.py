"""The recovery ladder keeps what training is, and each rung frees memory."""

import itertools
import math
from dataclasses import replace
from pathlib import Path

from autotune.predict.trace import traced_predictor
from autotune.problem.candidate import Candidate
from autotune.problem.hardware import named_hardware
from autotune.problem.outcome import Measurement, OutcomeKind
from autotune.problem.space import load_space
from autotune.recovery.ladder import CROSSED, LESS, Rung, recovery_ladder, write_ladder
from autotune.util.units import GIB
from tests.conftest import make_job

HARDWARE = named_hardware("rtx4090", 4)
JOB = make_job(4, model="qwen2.5-0.5b", seq_len=1024, precision="bf16", global_batch_size=64)
TOP = Candidate.of(
    {
        "zero_stage": 2,
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 2,
        "overlap_comm": False,
        "activation_checkpointing": False,
        "offload_optimizer": "none",
        "reduce_bucket_size": 500_000_000,
        "allgather_bucket_size": 500_000_000,
        "contiguous_gradients": True,
    }
)


def make(
    measured: dict[Candidate, Measurement] | None = None, failed: dict[Candidate, OutcomeKind] | None = None
) -> list[Rung]:
    predictor = traced_predictor(JOB, HARDWARE)
    return recovery_ladder(TOP, load_space("default"), JOB, predictor, measured or {}, failed or {})


def test_every_rung_trains_the_same_with_less_memory() -> None:
    ladder = make()
    assert ladder[0].candidate == TOP
    assert len(ladder) >= 3
    fixed = {name: value for name, value in TOP.knobs if name not in CROSSED}
    for above, below in itertools.pairwise(ladder):
        assert below.peak_bytes <= LESS * above.peak_bytes
        assert below.candidate.micro_batch * below.candidate.accumulation == 16
        assert {n: v for n, v in below.candidate.knobs if n not in CROSSED} == fixed


def test_stages_are_crossed_as_far_as_checkpoints_allow() -> None:
    assert {rung.candidate.stage for rung in make()} <= {1, 2}
    far = recovery_ladder(TOP, load_space("default"), JOB, traced_predictor(JOB, HARDWARE), {}, convert=True)
    assert far[-1].candidate.stage == 3
    assert far[-1].peak_bytes < make()[-1].peak_bytes


def test_what_failed_in_the_study_is_no_rung() -> None:
    failed = dict.fromkeys((rung.candidate for rung in make()[1:]), OutcomeKind.CRASH)
    again = make(failed=failed)
    assert len(again) > 1
    assert not failed.keys() & {rung.candidate for rung in again}


def test_each_rung_is_the_fastest_of_what_is_left() -> None:
    ladder = make()
    assert ladder[1].samples_per_second >= ladder[2].samples_per_second


def test_what_was_measured_counts_before_what_is_predicted() -> None:
    slow = TOP.but(train_micro_batch_size_per_gpu=4, gradient_accumulation_steps=4, activation_checkpointing=True)
    speed = 0.99 * make()[0].samples_per_second
    (rung,) = (one for one in make({slow: Measurement(0.1, 0.0, 5, speed, 1e9, 2 * GIB)}) if one.candidate == slow)
    assert rung.measured
    assert (rung.samples_per_second, rung.peak_bytes) == (speed, 2 * GIB)


def test_predictions_are_scaled_as_the_winner_was_measured() -> None:
    predicted = make()
    slow = Measurement(1.0, 0.01, 9, 0.3 * predicted[0].samples_per_second, 1.0, round(2.0 * predicted[0].peak_bytes))
    ladder = make({TOP: slow})
    assert [rung.candidate for rung in ladder] == [rung.candidate for rung in predicted]
    for rung, before in zip(ladder, predicted, strict=True):
        assert math.isclose(rung.samples_per_second, 0.3 * before.samples_per_second, rel_tol=1e-6)
        assert math.isclose(rung.peak_bytes, 2.0 * before.peak_bytes, rel_tol=1e-6)


def test_a_config_faster_than_the_measured_winner_is_no_rung() -> None:
    winner = make()[0]
    won = Measurement(1.0, 0.01, 9, winner.samples_per_second, 1.0, int(winner.peak_bytes))
    other = TOP.but(train_micro_batch_size_per_gpu=4, gradient_accumulation_steps=4, activation_checkpointing=True)
    ladder = make({TOP: won, other: replace(won, samples_per_second=2 * won.samples_per_second, peak_bytes=2 * GIB)})
    assert other not in [rung.candidate for rung in ladder]
    assert max(rung.samples_per_second for rung in ladder) == won.samples_per_second


def test_no_rung_is_the_engine_of_one_above_with_a_larger_micro_batch() -> None:
    """The figures say otherwise: the larger micro-batch was measured with a third of the memory."""
    winner = make()[0]
    won = Measurement(1.0, 0.01, 9, winner.samples_per_second, 1.0, int(winner.peak_bytes))
    larger = TOP.but(train_micro_batch_size_per_gpu=16, gradient_accumulation_steps=1)
    less = replace(won, samples_per_second=0.99 * won.samples_per_second, peak_bytes=won.peak_bytes // 3)
    ladder = [rung.candidate for rung in make({TOP: won, larger: less})]
    assert len(ladder) > 3
    for above, below in itertools.combinations(ladder, 2):
        assert above.family != below.family or below.micro_batch < above.micro_batch


def test_no_rung_needs_at_least_as_much_as_an_oom_of_the_study() -> None:
    first = make()[1].candidate
    smaller = first.but(train_micro_batch_size_per_gpu=1, gradient_accumulation_steps=16)
    assert first in [rung.candidate for rung in make(failed={smaller: OutcomeKind.CRASH})]
    ladder = make(failed={smaller: OutcomeKind.OOM_DEVICE})
    assert len(ladder) > 2
    assert first not in [rung.candidate for rung in ladder]


def test_a_ladder_survives_its_file(tmp_path: Path) -> None:
    import json

    ladder = make()
    write_ladder(tmp_path / "l.json", ladder, JOB)
    data = json.loads((tmp_path / "l.json").read_text())
    assert [Rung.from_json(one).candidate for one in data] == [rung.candidate for rung in ladder]
    assert data[1]["config"]["train_batch_size"] == 64


def test_what_trains_otherwise_is_no_rung() -> None:
    predictor, space = traced_predictor(JOB, HARDWARE), load_space("default")
    of_another_cut = recovery_ladder(
        TOP, space, JOB, predictor, {}, trains_otherwise=lambda one: one.micro_batch != TOP.micro_batch
    )
    assert {rung.candidate.micro_batch for rung in make()} != {8}
    assert {rung.candidate.micro_batch for rung in of_another_cut} == {8}
