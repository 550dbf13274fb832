"""Comparison of training traces."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.problem.candidate import ACCUMULATION, MICRO_BATCH, Candidate
from autotune.problem.outcome import Measurement, Outcome, OutcomeKind, Source
from autotune.problem.training_trace import AHEAD, MOST_STEPS, TracedStep, TrainingTrace
from autotune.search.certificate import (
    LOSS,
    NORM,
    RATES,
    ROWS,
    UPDATE,
    Certifier,
    Verdict,
    certificate_lines,
    compare,
    length_lines,
    structure_differs,
    with_floor,
    with_noise,
)
from autotune.search.trials import RESUME, SEARCH, Record
from tests.conftest import make_job

OWN = Candidate.of({"zero_stage": 0, MICRO_BATCH: 2, ACCUMULATION: 4})


def step(at: int, **changes: Any) -> TracedStep:
    made = TracedStep(4, 16, 0.5 + at, 2.0 - 0.1 * at, 1.0 + 0.05 * at, 1e-3, (1e-3,))
    return dataclasses.replace(made, **changes)


def trace(precision: str = "bf16", stage: int = 0, **changes: Any) -> TrainingTrace:
    return TrainingTrace(tuple(step(at, **changes) for at in range(MOST_STEPS)), stage, precision, 4)


def scaled(found: TrainingTrace, quantity: str, factor: float) -> TrainingTrace:
    def of(one: TracedStep) -> TracedStep:
        if quantity == RATES:
            return dataclasses.replace(one, rates=tuple(rate * factor for rate in one.rates))
        if quantity == ROWS:
            return dataclasses.replace(one, rows=round(one.rows * factor))
        name = {LOSS: "loss", NORM: "gradient_norm", UPDATE: "update"}[quantity]
        more = {"gradient_norm": one.gradient_norm * factor} if quantity == LOSS else {}  # type: ignore[operator]
        return dataclasses.replace(one, **{name: getattr(one, name) * factor, **more})

    return dataclasses.replace(found, steps=tuple(map(of, found.steps)))


factors = st.one_of(st.floats(0.05, 0.67), st.floats(1.5, 20.0))


@given(st.sampled_from([LOSS, NORM, UPDATE, RATES, ROWS]), factors, st.floats(0.0, 2.0), st.booleans())
def test_a_factor_of_1_5_is_never_the_same_and_differs_unless_noise_of_other_rows_is_larger(
    quantity: str, factor: float, floor: float, other_rows: bool
) -> None:
    reference = dataclasses.replace(trace(), floor=dict.fromkeys((LOSS, NORM, UPDATE), floor))
    found = scaled(trace(digest=9.0) if other_rows else trace(), quantity, factor)
    verdict = compare(reference, OWN, found, OWN)
    assert verdict.verdict is not Verdict.SAME
    assert verdict.verdict is Verdict.DIFFERS or (other_rows and floor > 0.2)
    assert "of yours" in verdict.text or "learning rate is" in verdict.text


@given(st.lists(st.floats(-9e-4, 9e-4), min_size=15, max_size=15))
def test_deviations_that_were_measured_between_stages_in_bf16_are_the_same(noise: list[float]) -> None:
    reference = trace()
    steps = tuple(
        dataclasses.replace(
            one,
            loss=one.loss * (1 + noise[3 * at]),  # type: ignore[operator]
            gradient_norm=one.gradient_norm * (1 + noise[3 * at + 1]),  # type: ignore[operator]
            update=one.update * (1 + noise[3 * at + 2]),  # type: ignore[operator]
        )
        for at, one in enumerate(reference.steps)
    )
    found = compare(reference, OWN, dataclasses.replace(reference, steps=steps, stage=2), OWN.but(zero_stage=2))
    assert found.verdict is Verdict.SAME
    assert "learning rate equal, 5 steps" in found.text


@given(factors)
def test_swapping_the_runs_inverts_the_factor(factor: float) -> None:
    one, other = trace(), scaled(trace(), NORM, factor)
    there, back = compare(one, OWN, other, OWN), compare(other, OWN, one, OWN)
    assert there.factor == pytest.approx(factor, rel=1e-6)
    assert there.factor * back.factor == pytest.approx(1.0)


def test_a_noise_floor_admits_dropout_and_its_absence_does_not() -> None:
    other = scaled(scaled(trace(), LOSS, 1.02), UPDATE, 1.02)
    assert compare(trace(), OWN, other, OWN).verdict is Verdict.DIFFERS
    noisy = with_floor(trace(), scaled(other, NORM, 1.01))
    assert noisy.floor[LOSS] == pytest.approx(math.log(1.02))
    assert compare(noisy, OWN, other, OWN).verdict is Verdict.SAME


def with_norms(*factors: float) -> TrainingTrace:
    own = trace("fp32")
    steps = zip(own.steps, factors, strict=True)
    changed = tuple(dataclasses.replace(one, gradient_norm=(one.gradient_norm or 0) * f) for one, f in steps)
    return dataclasses.replace(own, steps=changed)


OTHER_CUT = OWN.but(**{MICRO_BATCH: 8, ACCUMULATION: 1})
EFFECTS = [(1.006,) * MOST_STEPS, (1.03, 0.98, 0.99, 1.01, 0.99), (1.0, 1.002, 1.004, 1.006, 1.008)]


@pytest.mark.parametrize("norms", EFFECTS)
def test_a_script_whose_two_runs_agree_is_compared_exactly(norms: tuple[float, ...]) -> None:
    """A generator may have been drawn from, such as one that is seeded by each row."""
    drew = dataclasses.replace(trace("fp32"), draws=True)
    again = with_noise(drew, trace("fp32"))
    assert not again.draws
    found = compare(again, OWN, with_norms(*norms), OTHER_CUT)
    assert (found.verdict, found.cause) == (Verdict.DIFFERS, MICRO_BATCH)


@pytest.mark.parametrize("norms", EFFECTS)
def test_an_effect_of_the_cut_is_no_noise(norms: tuple[float, ...]) -> None:
    """Only two runs of the user's own config show the noise. Without them, the verdict is open."""
    drew = dataclasses.replace(trace("fp32"), draws=True)
    found = compare(drew, OWN, with_norms(*norms), OTHER_CUT)
    assert found.verdict is Verdict.NOT_COMPARED
    assert found.text.endswith(", and the noise of its random numbers was not measured")
    twice = compare(drew, OWN, scaled(trace("fp32"), NORM, 2.0), OTHER_CUT)
    assert twice.verdict is Verdict.DIFFERS, "no noise is as large"
    repeated = with_floor(drew, with_norms(*(1.0001,) * MOST_STEPS))  # with the same random numbers
    assert compare(repeated, OWN, with_norms(*norms), OTHER_CUT).verdict is Verdict.NOT_COMPARED


def test_the_noise_of_two_own_runs_is_tolerated_several_times() -> None:
    own = with_noise(dataclasses.replace(trace("fp32"), draws=True), with_norms(1.02, 0.97, 1.01, 0.99, 1.03))
    assert own.draws
    assert compare(own, OWN, with_norms(*(1.05,) * MOST_STEPS), OTHER_CUT).verdict is Verdict.SAME
    assert compare(own, OWN, with_norms(*(1.12,) * MOST_STEPS), OTHER_CUT).verdict is Verdict.DIFFERS


def test_an_effect_of_the_cut_around_zero_is_found() -> None:
    found = compare(trace("fp32"), OWN, with_norms(1.03, 0.98, 0.99, 1.01, 0.99), OTHER_CUT)
    assert (found.verdict, found.cause) == (Verdict.DIFFERS, MICRO_BATCH), "a mean over a micro-batch's own tokens"
    assert found.text.startswith("gradient norm is 1.8% off yours in a step, up or down: micro-batch 8 instead of 2")


def noisy(factors: tuple[float, ...], **changes: Any) -> TrainingTrace:
    own = trace("fp32", **changes)
    steps = zip(own.steps, factors, strict=True)
    return dataclasses.replace(own, steps=tuple(dataclasses.replace(one, gradient_norm=f) for one, f in steps))


@pytest.mark.parametrize(
    ("factors", "verdict", "words"),
    [
        ((1.0, 1.01, 1.0, 0.99, 1.0), Verdict.SAME, "5 steps"),
        ((1.2, 0.9, 1.1, 0.8, 1.05), Verdict.SAME, "compared only to within a factor of 1.2"),
        (
            (0.5, 1.1, 0.6, 0.9, 0.7),
            Verdict.NOT_COMPARED,
            "a factor of 2.1 in its gradient norm would stay unseen: the noise of its random numbers",
        ),
        ((0.7, 0.71, 0.7, 0.71, 0.7), Verdict.DIFFERS, "gradient norm is 0.704x of yours"),
    ],
)
def test_noise_that_hides_a_factor_of_1_5_is_no_comparison(
    factors: tuple[float, ...], verdict: Verdict, words: str
) -> None:
    own = dataclasses.replace(noisy((1.0,) * MOST_STEPS), draws=True)
    own = with_noise(own, noisy((1.1, 0.9, 1.1, 0.9, 1.1)))
    found = compare(own, OWN, noisy(factors), OWN.but(**{MICRO_BATCH: 4, ACCUMULATION: 2}))
    assert found.verdict is verdict, found
    assert words in found.text


@pytest.mark.few(1)
@pytest.mark.parametrize("steps", [3, 4, 5])
def test_dropout_of_a_named_model_excludes_nothing(steps: int) -> None:
    """Its reference is not run again, so its noise is not known."""
    own = dataclasses.replace(noisy((1.0,) * MOST_STEPS), draws=True)
    own = dataclasses.replace(own, steps=own.steps[:steps])
    other, noise = OWN.but(**{MICRO_BATCH: 4, ACCUMULATION: 2}), random.Random(0)
    for _ in range(1000):
        mine = noisy(tuple(math.exp(noise.gauss(0, 0.05)) for _ in range(MOST_STEPS)))
        assert compare(own, OWN, mine, other, is_users=False).verdict is not Verdict.DIFFERS


def test_noise_counts_where_one_step_alone_is_compared() -> None:
    """Stage 0 in 16 bits steps from other weights than the others from the second step on."""
    own = dataclasses.replace(trace(), draws=True, floor={NORM: 0.3, LOSS: 0.3})
    assert compare(own, OWN, trace(stage=2), OWN).verdict is Verdict.NOT_COMPARED
    assert compare(own, OWN, trace(stage=0), OWN).verdict is Verdict.SAME
    close = dataclasses.replace(own, floor={NORM: 0.05, LOSS: 0.05})
    found = compare(close, OWN, trace(stage=2), OWN)
    assert (found.verdict, "compared only to within a factor of 1.16" in found.text) == (Verdict.SAME, True)


@pytest.mark.parametrize(
    ("rates", "counts_iterations"),
    [
        (lambda step: 1e-3 * 0.9999 ** (4 * step), lambda step: 1e-3 * 0.9999**step),
        (lambda step: 1e-3 * (1 - 4 * step / 100_000), lambda step: 1e-3 * (1 - step / 100_000)),
        (lambda step: 1e-3 * math.cos(step / 500), lambda step: 1e-3 * math.cos(step / 2000)),
    ],
)
def test_a_rate_that_counts_iterations_differs_although_it_hardly_moves(
    rates: Callable[[float], float], counts_iterations: Callable[[float], float]
) -> None:
    def run(rate: Callable[[float], float], **changes: Any) -> TrainingTrace:
        steps = tuple(step(at, rates=(rate(at),), **changes) for at in range(MOST_STEPS))
        return dataclasses.replace(trace("fp32"), steps=steps)

    own, cut = run(rates), OWN.but(**{MICRO_BATCH: 8, ACCUMULATION: 1})
    found = compare(own, OWN, run(counts_iterations, micro_batches=1), cut)
    assert (found.verdict, found.cause) == (Verdict.DIFFERS, ACCUMULATION)
    assert "learning rate has moved by" in found.text
    assert "1 instead of 4 of them make an optimizer step" in found.text
    for ahead in (-0.75, 0.0, 0.75):  # a schedule by parts of a step, set before another micro-batch of it
        same = run(lambda at, ahead=ahead: rates(at + ahead), micro_batches=1)  # type: ignore[misc]
        assert compare(own, OWN, same, cut).verdict is Verdict.SAME, ahead


def test_buffers_that_forwards_change_keep_the_micro_batch() -> None:
    """BatchNorm under dropout, whose noise hides what normalisation within a micro-batch changes."""
    noise = dataclasses.replace(trace(buffers=0.34), draws=True, floor={LOSS: 0.3, NORM: 0.3, UPDATE: 0.3})
    found = compare(noise, OWN, trace(buffers=0.1), OTHER_CUT)
    assert (found.verdict, found.cause, found.factor) == (Verdict.DIFFERS, MICRO_BATCH, pytest.approx(0.1 / 0.34))
    assert found.text.startswith("buffers that its forwards change, like BatchNorm's running statistics, move 0.294x")
    for harmless in (0.0, 0.3):
        own = dataclasses.replace(noise, steps=trace(buffers=harmless).steps)
        assert compare(own, OWN, trace(buffers=harmless), OTHER_CUT).verdict is Verdict.SAME


def test_an_optimizer_outside_of_the_engine_that_steps_with_each_micro_batch_keeps_the_batch() -> None:
    found = compare(trace(outside_steps=4), OWN, trace(outside_steps=1, micro_batches=1), OTHER_CUT)
    assert (found.verdict, found.cause) == (Verdict.DIFFERS, ACCUMULATION)
    assert "make 1 steps in each optimizer step of the engine, and 4 with yours" in found.text
    once = trace(outside_steps=1)
    assert compare(once, OWN, trace(outside_steps=1, micro_batches=1), OTHER_CUT).verdict is Verdict.SAME


@pytest.mark.parametrize("limit", [0.0, 0.5])
def test_gradients_that_a_script_changes_by_hand_are_those_of_stage_0_alone(limit: float) -> None:
    """Also if no outlier has been clipped in the traced steps."""
    clips = dataclasses.replace(trace(changed_by_hand=1), clips_at=limit)
    for one, other in itertools.product(range(4), repeat=2):
        runs = [dataclasses.replace(clips if stage == 0 else trace(), stage=stage) for stage in (one, other)]
        found = compare(runs[0], OWN, runs[1], OWN.but(zero_stage=other))
        assert (found.verdict is Verdict.DIFFERS) is ((one == 0) is not (other == 0)), found
    found = compare(clips, OWN, trace(stage=1), OWN.but(zero_stage=1))
    assert found.cause == "zero_stage"
    assert ('"gradient_clipping": 0.5 in the DeepSpeed config' in found.text) is bool(limit)
    assert compare(trace(), OWN, trace(stage=1), OWN.but(zero_stage=1)).verdict is Verdict.SAME


def test_gradients_that_a_script_changes_after_each_micro_batch_keep_the_batch() -> None:
    found = compare(trace(changed_by_hand=4), OWN, trace(changed_by_hand=1, micro_batches=1), OTHER_CUT)
    assert (found.verdict, found.cause) == (Verdict.DIFFERS, ACCUMULATION)
    assert "after 1 of the backwards of an optimizer step, and after 4 with yours" in found.text


@pytest.mark.parametrize(
    ("own", "now", "verdict", "said"),
    [
        (3.25, 4.0, Verdict.DIFFERS, True),
        (3.25, 3.25, Verdict.SAME, False),
        (31.25, 32.0, Verdict.SAME, True),
        (3125.25, 3126.0, Verdict.SAME, False),
        (0.0, 4.0, Verdict.SAME, False),
    ],
)
def test_a_last_batch_that_differs_is_compared_over_an_epoch(
    own: float, now: float, verdict: Verdict, said: bool
) -> None:
    reference, mine = (dataclasses.replace(trace(), epoch_steps=steps) for steps in (own, now))
    found = compare(reference, OWN, mine, OTHER_CUT)
    assert found.verdict is verdict
    assert (f"gives {now:.4g} optimizer steps an epoch instead of {own:.4g}" in found.text) is said
    assert verdict is Verdict.SAME or found.cause == MICRO_BATCH


def test_a_last_batch_that_is_seen_is_said_if_no_loader_tells_its_length() -> None:
    short = dataclasses.replace(trace(), steps=(*trace().steps[:3], step(3, rows=4, digest=9.0), step(4)))
    found = compare(trace(), OWN, short, OTHER_CUT)
    assert found.verdict is Verdict.SAME
    assert found.text.endswith("optimizer step 4 has 0.25x the usual rows, and 1x with yours")
    assert "usual rows" not in compare(short, OWN, short, OTHER_CUT).text


def test_a_loop_whose_end_counts_iterations_is_said_and_one_that_follows_the_cut_is_not() -> None:
    counted = {"`it < args.iters` (train.py:9)": 30.0, "`for i in range(len(loader))` (train.py:7)": 64.0}
    own = dataclasses.replace(trace(), loop_ends=counted)
    now = dataclasses.replace(trace(), loop_ends={**counted, "`it < args.iters` (train.py:9)": 120.0})
    (line,) = length_lines(own, now)
    assert line == (
        "`it < args.iters` (train.py:9) counts iterations of your loop: it ends after 120 optimizer steps instead of 30. "
        "Multiply the limit by 0.25"
    )
    assert length_lines(own, own) == length_lines(own, trace()) == []


def test_weights_frozen_after_initialization_tell_stage_0_from_zero() -> None:
    frozen = [dataclasses.replace(trace("fp32", stage), holds_frozen=stage > 0) for stage in range(4)]
    for one, other in itertools.product(range(4), repeat=2):
        found = compare(frozen[one], OWN, frozen[other], OWN.but(zero_stage=other))
        assert (found.verdict is Verdict.DIFFERS) is ((one == 0) is not (other == 0)), found
    assert "weight decay" in compare(frozen[0], OWN, frozen[2], OWN.but(zero_stage=2)).text


def test_a_schedule_of_another_length_differs_in_later_steps() -> None:
    def cosine(length: int) -> tuple[tuple[float, float], ...]:
        rates = [1e-3 * (1 + math.cos(math.pi * min(1.0, step / length))) for step in AHEAD]
        return tuple((low, high) for high, low in itertools.pairwise(rates))

    own = dataclasses.replace(trace(), ahead=cosine(1000))
    other = OWN.but(**{MICRO_BATCH: 8, ACCUMULATION: 1})
    for length, differs in (
        (250, True),
        (667, True),
        (950, False),
        (1000, False),
        (1050, False),
        (1500, True),
        (4000, True),
    ):
        found = compare(own, OWN, dataclasses.replace(trace(micro_batches=1), ahead=cosine(length)), other)
        assert (found.verdict is Verdict.DIFFERS) is differs, (length, found)
        assert not differs or (found.quantity, found.cause) == (RATES, ACCUMULATION)
        assert not differs or "this counts iterations of your loop, and 1 instead of 4" in found.text
    assert compare(own, OWN, trace(micro_batches=1), other).verdict is Verdict.SAME, (
        "an earlier version's trace has none"
    )


def test_an_optimizer_that_uses_the_shapes_of_weights_is_named() -> None:
    moved = scaled(trace(stage=1), UPDATE, 0.07)
    drifted = tuple(dataclasses.replace(one, gradient_norm=1.3) for one in moved.steps[1:])
    found = compare(trace(), OWN, dataclasses.replace(moved, steps=(moved.steps[0], *drifted)), OWN.but(zero_stage=1))
    assert found.verdict is Verdict.DIFFERS
    assert "update is 0.07x of yours: stage 1 gives its own flat copies" in found.text


def test_a_gradient_that_comes_a_step_late_differs() -> None:
    late = list(trace().steps)
    late[0] = dataclasses.replace(late[0], update=0.0)
    found = compare(trace(), OWN, dataclasses.replace(trace(), steps=tuple(late)), OWN)
    assert (found.verdict, found.quantity) == (Verdict.DIFFERS, UPDATE)


@pytest.mark.parametrize(("precision", "verdict"), [("fp32", Verdict.DIFFERS), ("mixed", Verdict.SAME)])
def test_products_of_fewer_bits_are_tolerated_in_fp32_weights(precision: str, verdict: Verdict) -> None:
    own = trace(precision, stage=0)
    assert compare(own, OWN, scaled(trace(precision, stage=2), NORM, 1.003), OWN).verdict is verdict


def test_steps_after_one_that_only_one_run_skipped_are_not_compared() -> None:
    both = dataclasses.replace(step(0), skipped=True)
    behind = TrainingTrace((both, both, *(step(at, digest=2.5 + at) for at in range(MOST_STEPS))), 2, "fp16", 4)
    reference = TrainingTrace((both, *(step(at, digest=1.5 + at) for at in range(MOST_STEPS + 1))), 0, "fp16", 4)
    assert compare(reference, OWN, behind, OWN).verdict is Verdict.NOT_COMPARED
    assert compare(behind, OWN, behind, OWN).verdict is Verdict.SAME


def test_an_offset_of_the_loss_without_effect_on_the_gradient_is_the_same() -> None:
    other = trace(loss=7.0)
    assert compare(trace(), OWN, other, OWN).verdict is Verdict.SAME
    assert compare(trace(), OWN, dataclasses.replace(other, steps=scaled(other, NORM, 2.0).steps), OWN).cause == ""


def test_a_loss_that_builds_up_differs_before_its_gradient_does() -> None:
    own = trace("fp32")
    grown = tuple(
        dataclasses.replace(
            one, loss=(one.loss or 0) * (1 + 0.001 * at), gradient_norm=(one.gradient_norm or 0) * 1.0009
        )
        for at, one in enumerate(own.steps, 1)
    )
    found = compare(own, OWN, dataclasses.replace(own, steps=grown), OWN.but(**{MICRO_BATCH: 8, ACCUMULATION: 1}))
    assert (found.verdict, found.quantity, found.cause) == (Verdict.DIFFERS, LOSS, MICRO_BATCH)
    assert found.text.startswith("loss is 1.003x of yours, more so in each step, as if a part of it or an average")


def test_an_auxiliary_engine_that_trains_something_else_differs() -> None:
    other = OWN.but(**{MICRO_BATCH: 8, ACCUMULATION: 1})
    own = dataclasses.replace(trace(), auxiliary=(trace("fp32"), trace("fp32")))
    changed = dataclasses.replace(own, auxiliary=(own.auxiliary[0], scaled(own.auxiliary[1], LOSS, 1.1)))
    found = compare(own, OWN, changed, other)
    assert (found.verdict, found.cause) == (Verdict.DIFFERS, MICRO_BATCH)
    assert found.text.startswith("in engine 3, loss is 1.1x of yours, gradient norm 1.1x: the loss depends on how")
    assert compare(own, OWN, own, other).verdict is Verdict.SAME
    noisy = with_floor(
        own, dataclasses.replace(own, auxiliary=(own.auxiliary[0], scaled(own.auxiliary[1], LOSS, 1.04)))
    )
    assert noisy.auxiliary[0].floor[LOSS] == 0 < noisy.auxiliary[1].floor[LOSS]
    assert compare(noisy, OWN, changed, other).verdict is Verdict.SAME


def test_losses_around_zero_are_compared_by_their_size() -> None:
    noise = trace(loss=1e-7, gradient_norm=None)
    assert compare(trace(loss=0.0, gradient_norm=None), OWN, noise, OWN).verdict is Verdict.SAME
    found = compare(trace(loss=-0.5, gradient_norm=None), OWN, trace(loss=0.5, gradient_norm=None), OWN)
    assert found.verdict is Verdict.DIFFERS


@pytest.mark.parametrize(("theirs", "mine"), [(-2.0, -3.0), (2.0, 3.0)])
def test_losses_of_either_sign_are_compared_by_their_size(theirs: float, mine: float) -> None:
    one, other = (trace(loss=loss, gradient_norm=None) for loss in (theirs, mine))
    there, back = compare(one, OWN, other, OWN), compare(other, OWN, one, OWN)
    assert (there.quantity, there.factor) == (LOSS, pytest.approx(1.5 if mine > theirs else 1 / 1.5))
    assert back.factor == pytest.approx(1 / there.factor)


def test_a_loss_that_passes_zero_in_one_step_is_compared_with_the_others() -> None:
    one, other = (
        dataclasses.replace(trace(), steps=(*trace(loss=1.0).steps[1:], step(4, loss=loss))) for loss in (5e-4, -5e-4)
    )
    assert compare(one, OWN, other, OWN).verdict is Verdict.SAME


def test_noise_of_other_rows_explains_as_much_as_the_mean_of_its_steps_can_be() -> None:
    known = dataclasses.replace(trace(), floor={NORM: 0.4})
    found = compare(known, OWN, scaled(trace(digest=9.0), NORM, 1.5), OWN)
    assert found.text == (
        "gradient norm is 1.5x of yours, and runs differ by 50% in one step, because their rows differ"
    )
    assert found.verdict is Verdict.NOT_COMPARED
    assert compare(known, OWN, scaled(trace(digest=9.0), NORM, 2.0), OWN).verdict is Verdict.DIFFERS
    assert compare(known, OWN, scaled(trace(), NORM, 1.5), OWN).verdict is Verdict.DIFFERS


def test_packed_rows_are_not_counted_when_the_cut_differs() -> None:
    packed = scaled(trace(micro_batches=1), ROWS, 0.25)
    assert compare(trace(), OWN, packed, OWN.but(**{MICRO_BATCH: 8, ACCUMULATION: 1})).verdict is Verdict.SAME
    found = compare(trace(), OWN, packed, OWN)
    assert (found.quantity, found.factor) == (ROWS, 0.25)


def test_the_coarser_precision_of_two_runs_sets_the_tolerance() -> None:
    fine, coarse = trace("fp32", 2), scaled(trace("bf16", 2), NORM, 1.003)
    for one, other, verdict in (
        (fine, coarse, Verdict.SAME),
        (coarse, fine, Verdict.SAME),
        (fine, dataclasses.replace(coarse, precision="fp32"), Verdict.DIFFERS),
    ):
        assert compare(one, OWN, other, OWN).verdict is verdict


def test_a_loss_that_depends_on_the_cut_keeps_the_micro_batch() -> None:
    found = compare(trace(), OWN, scaled(trace(), LOSS, 1.7), OWN.but(**{MICRO_BATCH: 8, ACCUMULATION: 1}))
    assert found.cause == MICRO_BATCH
    assert "micro-batch 8 instead of 2" in found.text
    assert "grows with the micro-batch" not in found.text
    summed = compare(trace(), OWN, scaled(trace(), LOSS, 4.0), OWN.but(**{MICRO_BATCH: 8, ACCUMULATION: 1}))
    assert "grows with the micro-batch" in summed.text
    full = compare(trace(), OWN, scaled(trace(), LOSS, 0.25), OWN.but(**{MICRO_BATCH: 8, ACCUMULATION: 1}))
    assert "grows with the accumulation" in full.text
    twice = compare(trace(), OWN, scaled(trace(), NORM, 0.5), OWN.but(**{MICRO_BATCH: 1, ACCUMULATION: 8}))
    assert "engine.backward divides once" in twice.text
    other = compare(trace(), OWN, scaled(trace(), NORM, 0.5), OWN.but(**{MICRO_BATCH: 8, ACCUMULATION: 1}))
    assert other.text.endswith("micro-batch 8 instead of 2")


def test_a_rate_that_begins_at_zero_is_compared_by_its_value() -> None:
    found = compare(trace(rates=(0.0,)), OWN, trace(rates=(1e-4,)), OWN)
    assert found.text == "learning rate is 0.0001 instead of 0 in optimizer step 1"


def test_a_rate_that_falls_below_zero_is_compared_by_its_size() -> None:
    own = dataclasses.replace(trace(), steps=tuple(step(at, rates=(1e-3 * (1 - at / 2),)) for at in range(MOST_STEPS)))
    assert compare(own, OWN, own, OWN).verdict is Verdict.SAME
    assert compare(own, OWN, trace(), OWN).quantity == RATES


def test_a_schedule_that_counts_iterations_names_the_accumulation() -> None:
    other = scaled(trace(micro_batches=1), RATES, 0.25)
    found = compare(trace(), OWN, other, OWN.but(**{MICRO_BATCH: 8, ACCUMULATION: 1}))
    assert (found.cause, found.quantity) == (ACCUMULATION, RATES)
    assert "learning rate is 0.00025 instead of 0.001" in found.text


@pytest.mark.parametrize(
    ("stage", "accumulation", "words"),
    [(2, 1, "stage 2 does not sum the 4 gradients of a step"), (1, 4, "changes by hand")],
)
def test_another_gradient_at_another_stage_names_the_stage(stage: int, accumulation: int, words: str) -> None:
    other = dataclasses.replace(scaled(trace(stage=stage), NORM, 0.26), accumulation=accumulation)
    found = compare(trace(), OWN, other, OWN.but(zero_stage=stage))
    assert found.cause == "zero_stage"
    assert words in found.text


def test_adams_counter_of_stage_0_in_16_bits_is_no_difference() -> None:
    first = (0.744, 0.83, 0.9, 0.93, 0.95)
    steps = tuple(dataclasses.replace(one, update=1e-3 * f) for one, f in zip(trace().steps, first, strict=True))
    early = dataclasses.replace(trace(), steps=steps)
    found = compare(early, OWN, trace(stage=1), OWN.but(zero_stage=1))
    assert found.verdict is Verdict.SAME
    assert "x (stage 0 counts Adam's steps one ahead)," in found.text
    in_fp32 = dataclasses.replace(early, precision="fp32")
    assert compare(in_fp32, OWN, trace("fp32", 1), OWN.but(zero_stage=1)).verdict is Verdict.DIFFERS


def test_weights_that_differ_after_adams_early_first_step_are_no_difference() -> None:
    drifted = (step(0), *scaled(trace(), NORM, 1.2).steps[1:])
    first, second = (dataclasses.replace(trace(stage=stage), steps=drifted) for stage in (1, 0))
    assert compare(trace(), OWN, first, OWN.but(zero_stage=1)).verdict is Verdict.SAME
    assert compare(trace(), OWN, second, OWN).verdict is Verdict.DIFFERS


def test_nothing_is_compared_without_steps_quantities_or_with_another_global_batch() -> None:
    short = dataclasses.replace(trace(), steps=trace().steps[:2])
    assert compare(trace(), OWN, short, OWN).verdict is Verdict.NOT_COMPARED
    blind = trace(loss=None, gradient_norm=None, update=None)
    assert compare(blind, OWN, blind, OWN).verdict is Verdict.NOT_COMPARED
    larger = OWN.but(**{MICRO_BATCH: 4})
    assert "samples" in compare(trace(), OWN, trace(), larger).text
    skipped = trace(skipped=True)
    assert compare(trace(), OWN, skipped, OWN).verdict is Verdict.NOT_COMPARED


def test_a_trace_survives_its_storage() -> None:
    outcome = Outcome(
        OutcomeKind.OK, trace=dataclasses.replace(trace(), floor={LOSS: 0.1}, ahead=((0.1, 0.2),), auxiliary=(trace(),))
    )
    assert Outcome.from_json(json.loads(json.dumps(outcome.to_json()))).trace == outcome.trace


def rank(**changes: Any) -> dict[str, Any]:
    one: dict[str, Any] = {"micro_batches": 2, "rows": 4, "digest": 1.5, "loss": 2.0, "gradient_norm": 3.0}
    one |= {"update": [8.0, 2], "rates": [0.1], "skipped": False, **changes}
    return {"stage": 1, "precision": "fp32", "accumulation": 2, "draws": False, "missing": "", "steps": [one]}


def test_ranks_add_rows_and_squares_and_average_losses() -> None:
    merged = TrainingTrace.merged([rank(), rank(loss=4.0, update=[0.0, 0])])
    (found,) = merged.steps
    assert (found.rows, found.digest, found.loss, found.update, found.gradient_norm) == (8, 3.0, 3.0, 2.0, 3.0)
    assert TrainingTrace.merged([rank(), None]) is None


def test_an_engine_without_steps_keeps_the_place_of_the_next() -> None:
    unstepped = {**rank(), "steps": []}
    merged = TrainingTrace.merged([{**rank(), "auxiliary": [unstepped, rank()]}] * 2)
    assert [len(one.steps) for one in merged.auxiliary] == [0, 1]
    own = dataclasses.replace(trace(), auxiliary=(merged.auxiliary[0], trace("fp32")))
    again = dataclasses.replace(trace(), auxiliary=(trace(loss=9.0), trace("fp32")))
    found = compare(own, OWN, again, OWN)
    assert found.verdict is Verdict.SAME
    assert found.text.endswith("5 steps; engine 2 not compared: fewer than 3 optimizer steps were traced")
    missing = compare(own, OWN, dataclasses.replace(trace(), auxiliary=()), OWN)
    assert missing.line.startswith("trains the same")
    assert "engine 3 not compared" in missing.text
    doubled = dataclasses.replace(
        again, steps=again.steps[:2], auxiliary=(again.auxiliary[0], trace("fp32", loss=9.0, gradient_norm=9.0))
    )
    assert compare(own, OWN, doubled, OWN).text.startswith("in engine 3, gradient norm is")
    assert len(with_floor(own, dataclasses.replace(trace(), auxiliary=own.auxiliary[:1])).auxiliary) == 2


def test_a_restarted_training_is_compared_in_what_weights_do_not_change() -> None:
    later = trace(loss=0.3, gradient_norm=0.1, update=5e-4, digest=77.0, micro_batches=8)
    assert structure_differs(trace(), later) == ""
    assert "0.5x the rows" in structure_differs(trace(), scaled(later, ROWS, 0.5))
    assert "learning rate is 0.0001 instead of 0.001" in structure_differs(trace(), scaled(later, RATES, 0.1))
    moving = dataclasses.replace(trace(), steps=tuple(step(at, rates=(1e-3 * (at + 1),)) for at in range(5)))
    assert structure_differs(moving, scaled(later, RATES, 0.1)) == "", "a schedule has moved on"


def measured(found: TrainingTrace) -> Outcome:
    return Outcome(OutcomeKind.OK, measurement=Measurement(1.0, 0.01, 5, 8.0, 64.0, 10**6), trace=found)


def test_a_study_of_a_named_model_takes_its_first_whole_step_as_reference() -> None:
    certifier = Certifier(make_job())
    shortened = OWN.but(**{MICRO_BATCH: 1, ACCUMULATION: 8})  # of which a rank ran four micro-batches
    assert certifier.checked(shortened, measured(scaled(trace(), NORM, 2.0)), SEARCH).ok
    assert certifier.checked(OWN, measured(trace()), SEARCH).ok
    other = OWN.but(zero_stage=2)
    assert certifier.checked(other, measured(dataclasses.replace(trace(), stage=2)), SEARCH).ok
    wrong = certifier.checked(other, measured(dataclasses.replace(scaled(trace(), NORM, 2.0), stage=2)), SEARCH)
    assert (wrong.kind, wrong.source, wrong.measurement) == (OutcomeKind.INVALID, Source.TRACE, None)
    assert wrong.trace is not None
    assert certifier.checked(other, measured(wrong.trace), RESUME).ok, "a resumed run has other weights"
    assert certifier.shares_cause(other, wrong)(other.but(reduce_bucket_size=1))


@pytest.mark.parametrize(
    ("cause", "changes", "is_shared"),
    [
        (MICRO_BATCH, {MICRO_BATCH: 8, ACCUMULATION: 1, "zero_stage": 3}, True),
        (MICRO_BATCH, {"zero_stage": 2}, False),
        (ACCUMULATION, {MICRO_BATCH: 2, ACCUMULATION: 2}, True),
        (ACCUMULATION, {MICRO_BATCH: 8}, False),
        ("zero_stage", {"zero_stage": 2, MICRO_BATCH: 4, ACCUMULATION: 2, "reduce_bucket_size": 1}, True),
        ("zero_stage", {"zero_stage": 2, MICRO_BATCH: 8, ACCUMULATION: 1}, False),
        ("zero_stage", {"zero_stage": 1}, False),
        ("", {"zero_stage": 2, MICRO_BATCH: 8}, True),
        ("", {"zero_stage": 2, "reduce_bucket_size": 1}, False),
    ],
)
def test_candidates_with_the_setting_that_changes_the_training_share_the_cause(
    cause: str, changes: dict[str, Any], is_shared: bool
) -> None:
    certifier = Certifier(make_job())
    certifier.learn(OWN, measured(trace()), SEARCH)
    wrong = Outcome(OutcomeKind.INVALID, trains_otherwise=cause)
    assert certifier.shares_cause(OWN.but(zero_stage=2), wrong)(OWN.but(**changes)) is is_shared


def test_without_a_whole_step_of_both_nothing_is_compared() -> None:
    certifier = Certifier(make_job())
    assert certifier.certificate(OWN, None).line == "training not compared: no whole optimizer step of it was traced"
    assert certifier.certificate(OWN, trace()).line == "training not compared: the reference was not measured"
    certifier.learn(OWN, measured(trace()), SEARCH)
    eight = OWN.but(**{MICRO_BATCH: 1, ACCUMULATION: 8})  # a rank ran four of its micro-batches
    assert (
        certifier.certificate(eight, trace()).line == "training not compared: no whole optimizer step of it was traced"
    )


def test_stage_3_of_a_named_model_is_compared_with_the_other_stages() -> None:
    reference = dataclasses.replace(trace(), initial=(0.5, -0.5))
    certifier = Certifier(make_job())
    assert certifier.checked(OWN, measured(reference), SEARCH).ok
    third = OWN.but(zero_stage=3)
    assert certifier.certificate(third, dataclasses.replace(reference, stage=3)).verdict is Verdict.SAME
    slightly = dataclasses.replace(scaled(reference, NORM, 1.2), stage=3)
    assert certifier.certificate(third, slightly).verdict is Verdict.DIFFERS
    stored = dataclasses.replace(slightly, initial=())  # by a version that drew other weights at stage 3
    assert certifier.certificate(third, stored).verdict is Verdict.NOT_COMPARED


def test_a_script_that_draws_other_initial_weights_is_compared_by_large_factors_only() -> None:
    """`zero.Init` makes transformers draw a model's weights on the GPU."""
    reference = dataclasses.replace(trace(), initial=(0.5, -0.5))
    drawn = dataclasses.replace(scaled(reference, NORM, 1.2), stage=3, initial=(-0.1, 0.6))
    third = OWN.but(zero_stage=3)
    assert compare(reference, OWN, drawn, third).verdict is Verdict.SAME
    assert compare(reference, OWN, dataclasses.replace(drawn, initial=(0.5, -0.5)), third).verdict is Verdict.DIFFERS
    assert compare(reference, OWN, scaled(drawn, NORM, 1.5), third).verdict is Verdict.DIFFERS


def test_a_repeated_run_of_the_reference_raises_the_noise_floor() -> None:
    certifier = Certifier(make_job())
    certifier.learn(OWN, measured(trace()), SEARCH)
    noisy = scaled(scaled(trace(), LOSS, 1.03), UPDATE, 1.03)
    assert certifier.certificate(OWN, noisy).verdict is Verdict.DIFFERS
    for again in (noisy, scaled(trace(), LOSS, 1.001)):
        certifier.learn(OWN, measured(again), SEARCH)
        assert certifier.certificate(OWN, noisy).verdict is Verdict.SAME
        assert certifier.certificate(OWN, scaled(noisy, NORM, 1.2)).quantity == NORM


def test_a_study_without_traces_has_no_line_about_its_training() -> None:
    old = Record(1, OWN, Outcome(OutcomeKind.OK), SEARCH)
    assert certificate_lines(make_job(), [old], old) == []
    new = Record(2, OWN, measured(trace()), SEARCH)
    (line,) = certificate_lines(make_job(), [old, new], new)
    assert line.startswith(
        "trains the same: loss 1.8 / 1.8, gradient norm 1.1 / 1.1, update 1.00x, learning rate equal"
    )


def test_a_reference_that_is_no_config_of_the_user_is_not_called_theirs() -> None:
    other = dataclasses.replace(scaled(trace(), NORM, 2.0), stage=2)
    theirs = compare(trace(), OWN, other, OWN.but(zero_stage=2))
    named = compare(trace(), OWN, other, OWN.but(zero_stage=2), is_users=False)
    assert "of yours" in theirs.text
    assert "changes by hand" in theirs.text
    assert named.text == "gradient norm is 2x of the reference's: stage 2 instead of 0"


def test_figures_are_means_of_the_steps_that_both_runs_have_seen() -> None:
    """Stage 0 reads some steps' norms only. Norms that change from step to step must not look different for it."""
    steps = [TracedStep(4, 8, 1.0, 2.0, float(norm), 1e-5, (1e-4,)) for norm in (4, 3, 2, 1)]
    some = [
        dataclasses.replace(step, gradient_norm=None if at in (2, 3) else step.gradient_norm)
        for at, step in enumerate(steps)
    ]
    whole, partial = (TrainingTrace(tuple(one), 2, "fp32", 1) for one in (steps, some))
    own = Candidate.of({"zero_stage": 2, MICRO_BATCH: 4, ACCUMULATION: 1})
    found = compare(whole, own, partial, own, is_users=True)
    assert found.verdict is Verdict.SAME
    assert "gradient norm 3.5 / 3.5" in found.text
