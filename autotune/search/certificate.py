"""Certificate: compare the training trace of a candidate with that of the user's own config."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from autotune.problem.candidate import ACCUMULATION, MICRO_BATCH, Candidate
from autotune.problem.job import Job
from autotune.problem.outcome import Outcome, OutcomeKind, Source
from autotune.problem.training_trace import AHEAD, LEAST_STEPS, TracedStep, TrainingTrace
from autotune.script.profile import own_candidate
from autotune.search.trials import RESUME, Record
from autotune.util.units import counted

# -- comparison --------------------------------------------------------------------------------------------------------
#
# Compare two traces, each quantity against its noise floor.
#
# Every quantity is the mean over the steps of the logarithm of a ratio, so that a constant factor stands out and single
# steps do not.

# Smallest tolerance, relative. Runs of one global batch agree to 1e-5 in fp32 and to 1e-3 in bf16 across all stages,
# splits and offloads (DeepSpeed 0.19.8, AdamW, three steps). Kernels of other devices
# and two more steps get five times (bf16) and a hundred times (fp32) as much.
LEAST_TOLERANCE = {"fp32": 1e-3, "mixed": 5e-3, "bf16": 5e-3, "fp16": 5e-3}
_FLOORS = 4.0  # tolerated multiples of the floor
_CLEARS = 0.02  # relative difference of the gradient norm up to which another loss has no effect
_ERRORS = 3.0  # standard errors of the mean that noise of other rows explains
_CLOSE = 0.05  # tolerance up to which a comparison is close
_MOST = math.log(1.4)  # no noise floor tolerates more: factors of 1.5 and 0.67 are always found
_UNSEEN = math.log(1.5)  # a comparison that leaves this factor open says nothing
_RATE_TOLERANCE = 0.01  # relative; a schedule's length in steps is rounded
_RATE_ROUNDING = 2e-7  # relative; of rates in 32 bits
_LATER_TOLERANCE = 0.1  # share of the highest learning rate in later steps, and of an epoch's optimizer steps
_COARSE_TOLERANCE = math.log1p(0.25)  # the last batch of a data set may be smaller, and buffers may have 16 bits
_CLAMP = 1e-3  # smallest ratio, for a quantity that is zero in one run
_TINY = 1e-10  # a quantity below is zero, and differences are compared with this size at least
_SMALL_LOSS = 1e-4  # losses around zero, such as those of policy gradients, are compared with this size
_SMALL_SHARE = 0.1  # or with this share of the reference's largest loss
_SAME_ROWS = 1e-6  # relative; digests of equal rows, summed in another order
# Root mean square difference of the projections of the same initial weights. Rounding to bf16 changes them by less than 0.001;
# another draw by 0.7, or 0.03 if norms' weights of 1 make up a third of the sample and the others have a deviation of 0.02.
_SAME_INITIAL = 5e-3
# Adam's betas by default. DeepSpeed makes a dummy optimizer step when it initializes stage 0 in 16 bits, so that Adam's
# step counter is one ahead: 0.744x in the first step, 0.83x in the second, harmless (`DEEPSPEED_FAULTS.md`, 0.19.8).
_BETAS = (0.9, 0.999)
_COUNTER_TOLERANCE = 0.1
_PROPORTIONAL = 0.05  # relative difference up to which the loss is said to grow with the micro-batch

LOSS, NORM, UPDATE, RATES, ROWS, BUFFERS = "loss", "gradient norm", "update", "learning rate", "rows", "buffers"
_FIELDS = {LOSS: "loss", NORM: "gradient_norm", UPDATE: "update", BUFFERS: "buffers"}  # numbers of a `TracedStep`


class Verdict(StrEnum):
    """Result of a comparison."""

    SAME = "same"
    DIFFERS = "differs"
    NOT_COMPARED = "not compared"


@dataclass(frozen=True)
class Certificate:
    """Verdict on a candidate, in words."""

    verdict: Verdict
    text: str  # figures of an equal training, or the reason
    quantity: str = ""  # quantity that differs
    factor: float = 1.0  # the candidate's value divided by the reference's
    cause: str = ""  # knob because of which it differs; empty if unknown

    @property
    def line(self) -> str:
        """Return the verdict as one line."""
        if self.verdict is Verdict.SAME:
            return f"trains the same: {self.text}"
        said = "trains something else" if self.verdict is Verdict.DIFFERS else "training not compared"
        return f"{said}: {self.text}"


def with_floor(reference: TrainingTrace, other: TrainingTrace) -> TrainingTrace:
    """Return the reference and its auxiliary engines with their noise floors; a known floor is never lowered.

    Args:
        reference: trace of the user's own config.
        other: trace of another run of the same config.
    """
    floor = dict(reference.floor)
    for name, found in Runs(reference, other).differences.items():
        floor[name] = max(floor.get(name, 0.0), _root_mean_square(found))
    pairs = zip(reference.auxiliary, other.auxiliary, strict=False)
    known = tuple(itertools.starmap(with_floor, pairs))
    return dataclasses.replace(reference, floor=floor, auxiliary=(*known, *reference.auxiliary[len(known) :]))


def with_noise(reference: TrainingTrace, other: TrainingTrace) -> TrainingTrace:
    """Return the reference with the noise of its script, which a run of the same config with other random numbers shows.

    A script whose runs do not differ draws nothing that matters. Its comparisons are exact.
    """
    known = with_floor(reference, other)
    auxiliary = tuple(dataclasses.replace(one, draws=_is_noisy(one)) for one in known.auxiliary)
    return dataclasses.replace(known, draws=_is_noisy(known), auxiliary=auxiliary)


def _is_noisy(reference: TrainingTrace) -> bool:
    """Return True if the noise floor of a reference is above the smallest tolerance."""
    return any(floor > _least(name, reference) for name, floor in reference.floor.items())


def _root_mean_square(each: Sequence[float]) -> float:
    return math.hypot(*each) / math.sqrt(len(each))


def compare(
    reference: TrainingTrace, own: Candidate, trace: TrainingTrace, candidate: Candidate, *, is_users: bool = True
) -> Certificate:
    """Compare a candidate's trace with the reference's.

    Args:
        reference: trace of the user's own config, with its noise floor.
        own: the config of the reference.
        is_users: the reference is the user's own config. A named model's is another candidate.
    """
    found = _verdict(Pair(reference, trace, own, candidate, is_users))
    unknown = ""
    untraced = TrainingTrace((), 0, "fp32", 1)
    pairs = itertools.zip_longest(reference.auxiliary, trace.auxiliary, fillvalue=untraced)
    for number, (theirs, mine) in enumerate(pairs, 2):
        if found.verdict is Verdict.DIFFERS:
            return found
        one = _verdict(Pair(theirs, mine, own, candidate, is_users))
        if one.verdict is Verdict.DIFFERS:
            return dataclasses.replace(one, text=f"in engine {number}, {one.text}")
        if one.verdict is Verdict.NOT_COMPARED:
            unknown += f"; engine {number} not compared: {one.text}"
    return dataclasses.replace(found, text=found.text + unknown)


def _verdict(pair: Pair) -> Certificate:
    """Return the verdict of the first check that fails, or the figures of an equal training with what they leave open."""
    for check in CHECKS:
        if (seen := check.failure(pair)) is not None:
            cause, because = next(filter(None, (of(pair) for of in check.causes)), ("", ""))
            text = ": ".join(filter(None, (check.text(pair, seen), because)))
            return Certificate(check.verdict, text, seen.name or check.name, seen.factor, cause)
    left_open = [(one, one.failure(pair)) for one in REMARKS]
    remarks = [one.text(pair, seen) for one, seen in left_open if seen is not None]
    return Certificate(Verdict.SAME, "; ".join([_figures(pair), *remarks]))


class Seen(NamedTuple):
    """Values of one thing in both runs."""

    theirs: float  # the reference's
    mine: float
    step: int = 0  # optimizer step, from 1
    name: str = ""  # name of the number, if a check compares several

    @property
    def factor(self) -> float:
        """Candidate's value divided by the reference's."""
        return self.mine / self.theirs if self.theirs else math.inf

    @property
    def difference(self) -> float:
        """Size of the logarithm of the factor."""
        return abs(_log_ratio(self.theirs, self.mine))


def _log_ratio(theirs: float, mine: float, smallest: float = _TINY) -> float:
    """Return the logarithm of the ratio of two values of any sign, or of their difference from a size at least."""
    share = (mine - theirs) / max(abs(theirs), abs(mine), smallest)
    return math.copysign(math.log(max(_CLAMP, 1.0 - min(1.0, abs(share)))), share)


Cause = tuple[str, str]  # knob, and why it changes a training


@dataclass(frozen=True)
class Check:
    """Comparison of one thing. The first values that differ by more than the tolerance fail it."""

    name: str  # key of `_TEXTS`
    values: Callable[[Pair], Iterable[Seen]]  # none where the check does not apply
    tolerance: float = 0.0  # limit of `Seen.difference`
    causes: tuple[Callable[[Pair], Cause | None], ...] = ()  # the first that applies is the cause
    verdict: Verdict = Verdict.DIFFERS

    def failure(self, pair: Pair) -> Seen | None:
        """Return the first values that fail; None if the check does not apply, or holds."""
        return next((seen for seen in self.values(pair) if seen.difference > self.tolerance), None)

    def text(self, pair: Pair, seen: Seen) -> str:
        """Return a failure in words."""
        return _TEXTS[self.name].format(pair=pair, seen=seen)


@dataclass(frozen=True)
class Runs:
    """Traces of one engine in two runs."""

    reference: TrainingTrace
    trace: TrainingTrace

    @property
    def traces(self) -> tuple[TrainingTrace, TrainingTrace]:
        """Both traces, the reference's first."""
        return self.reference, self.trace

    @functools.cached_property
    def steps(self) -> list[tuple[TracedStep, TracedStep]]:
        """Steps until the first one that only one run skipped, because its weights are one update behind since.

        Loss scales of one config differ by stage: after an overflow, stage 0 halves its own at once, and ZeRO at the second
        overflow (`hysteresis`).
        """
        both = zip(self.reference.steps, self.trace.steps, strict=False)
        return list(itertools.takewhile(lambda pair: pair[0].skipped == pair[1].skipped, both))

    @functools.cached_property
    def compared(self) -> list[tuple[TracedStep, TracedStep]]:
        """Steps until the first one on other rows, because weights have differed since; none if the first is."""
        return list(itertools.takewhile(_has_same_rows, self.steps))

    @property
    def has_same_rows(self) -> bool:
        """True unless the runs are known to train on other rows from their first step on."""
        return bool(self.compared) or not self.steps

    @property
    def has_same_weights(self) -> bool:
        """True unless the runs are known to begin with other weights."""
        one, other = (trace.initial for trace in self.traces)
        return not one or not other or math.dist(one, other) / math.sqrt(len(one)) <= _SAME_INITIAL

    @property
    def counts_ahead(self) -> int:
        """1 if Adam's step counter is one ahead only in the second run, -1 if only in the reference."""
        return _is_early(self.trace) - _is_early(self.reference)

    def values(self, name: str) -> list[tuple[float, float]]:
        """Return both values of a number in each step that both have seen."""
        pairs, field = self.compared or self.steps, _FIELDS[name]
        if name != UPDATE and self.counts_ahead:
            pairs = pairs[:1]  # Adam's step counter has led to other weights since
        values = [(getattr(theirs, field), getattr(mine, field)) for theirs, mine in pairs if not theirs.skipped]
        return [(theirs, mine) for theirs, mine in values if theirs is not None and mine is not None]

    @functools.cached_property
    def differences(self) -> dict[str, list[float]]:
        """Logarithms of the ratios of each step, of values of any sign, by number that was seen."""
        found = dict[str, list[float]]()
        for name in _FIELDS:
            values = self.values(name)
            if name == LOSS:
                smallest = max([_SMALL_LOSS, *(_SMALL_SHARE * abs(theirs) for theirs, _ in values)])
                found[name] = [_log_ratio(theirs, mine, smallest) for theirs, mine in values]
            else:
                found[name] = [_log_ratio(theirs, mine) for theirs, mine in values if max(theirs, mine) > _TINY]
        return {name: each for name, each in found.items() if each}


@dataclass(frozen=True)
class Pair(Runs):
    """Traces of one engine under two configs."""

    own: Candidate
    candidate: Candidate
    is_users: bool

    @property
    def yours(self) -> str:
        """Possessive of the reference."""
        return "yours" if self.is_users else "the reference's"

    @property
    def stage(self) -> int:
        """Higher stage."""
        return max(self.reference.stage, self.trace.stage)

    @property
    def leaves_zero(self) -> bool:
        """True if only one of the runs has stage 0, which alone steps with the module's gradients."""
        return (self.reference.stage == 0) is not (self.trace.stage == 0)

    @property
    def is_cut(self) -> bool:
        """True if the batch is cut into other micro-batches."""
        return self.own.micro_batch != self.candidate.micro_batch

    @property
    def other_micro_batch(self) -> str:
        """Both micro-batches in words."""
        return f"micro-batch {self.candidate.micro_batch} instead of {self.own.micro_batch}"

    @property
    def runs(self) -> Iterator[tuple[TracedStep, ...]]:
        """Those steps of each run, the reference's first."""
        return zip(*self.steps, strict=True)

    @property
    def numbers(self) -> list[str]:
        """Numbers of the optimizer steps that were seen."""
        return [name for name in self.differences if name != BUFFERS]

    @property
    def is_exact(self) -> bool:
        """True if the runs trained on the same rows from the same weights, and no noise between runs is known."""
        is_noise_known = self.reference.draws and not self.noise_is_unknown
        return self.has_same_rows and self.has_same_weights and not is_noise_known

    def mean(self, name: str) -> float:
        """Return the mean difference, without the effect of Adam's step counter in updates of stage 0 in 16 bits."""
        each = self.differences[name]
        mean = statistics.fmean(each)
        if name == UPDATE and self.counts_ahead:
            ahead = statistics.fmean(math.log(_counter_factor(step)) for step in range(1, len(each) + 1))
            if abs(mean - self.counts_ahead * ahead) <= _COUNTER_TOLERANCE:
                return 0.0
        return mean

    def scatter(self, name: str) -> float:
        """Return the scatter of an effect of the cut, which may lie around zero; 0 if noise scatters too.

        Named models average over a micro-batch's tokens.
        """
        if name == UPDATE or not (self.is_users and self.is_cut and self.is_exact):
            return 0.0
        return _root_mean_square(self.differences[name])

    def seen(self, name: str) -> Seen:
        """Return a number's mean ratio."""
        return Seen(1.0, math.exp(statistics.fmean(self.differences[name])), name=name)

    def tolerance(self, name: str) -> float:
        """Return the tolerated mean difference.

        If the two runs trained on other rows, the variation between the reference's steps is tolerated too. If they began
        with other weights (`zero.Init` draws them on the device), all noise is, and so is a named model's.
        """
        reference = self.reference
        floor = _FLOORS * reference.floor.get(name, 0.0)
        if not self.has_same_weights or (self.noise_is_unknown and not self.is_users):
            floor = _MOST
        elif not self.has_same_rows:
            values = [abs(value) for step in reference.counted if (value := getattr(step, _FIELDS[name]))]
            logs = [math.log(value) for value in values if value > _TINY]
            variation = _FLOORS * statistics.stdev(logs) if len(logs) > 1 else _MOST
            floor = max(floor, variation)
        return max(_least(name, *self.traces), min(floor, _MOST))

    @property
    def noise_is_unknown(self) -> bool:
        """True if the script draws random numbers, and no second run has shown what they change."""
        return self.reference.draws and not _is_noisy(self.reference)

    @functools.cached_property
    def beyond(self) -> list[Seen]:
        """Numbers beyond their tolerance, the largest deviation first, because the update of Adam hides a factor of the gradient.

        The loss has no effect except through its gradient, which clears it only if its own noise is small. A part of the
        loss that grows shows in it first.
        """
        means = {name: self.mean(name) for name in self.numbers}
        found = [name for name in means if max(abs(means[name]), self.scatter(name)) > self.tolerance(name)]
        is_cleared = UPDATE in means and abs(means.get(NORM, math.inf)) <= _CLEARS
        if found == [LOSS] and is_cleared and not self.loss_builds_up:
            return []
        return sorted(map(self.seen, found), key=lambda seen: -seen.difference)

    @property
    def besides(self) -> str:
        """Other numbers beyond their tolerance, in words."""
        others = "".join(f", {seen.name} {seen.factor:.3g}x" for seen in self.beyond[1:])
        is_loss = self.beyond[0].name == LOSS
        return others + _BUILDS_UP * (is_loss and self.loss_builds_up)

    @property
    def scattered(self) -> float:
        """Relative difference of the number with the largest deviation in one step."""
        return math.expm1(_root_mean_square(self.differences[self.beyond[0].name]))

    @property
    def loss_builds_up(self) -> bool:
        """True if differences of the loss lie much closer to a line through zero than to their mean.

        An effect that builds up lies there: an average of weights that teaches, a part of the loss that counts iterations.
        """
        each = self.differences.get(LOSS, [])
        if len(each) < LEAST_STEPS:
            return False
        line = range(1, len(each) + 1)
        slope = statistics.linear_regression(line, each, proportional=True).slope
        deviation = math.dist(each, [slope * at for at in line]) / math.sqrt(len(each) - 1)
        return deviation < statistics.stdev(each) / 2

    @functools.cached_property
    def left_open(self) -> Seen:
        """The number of which a comparison leaves the largest factor open.

        A loss has no effect but through its gradient. A single step shows no scatter, so the noise floor stands for it.
        """
        found = []
        for name in self.numbers:
            each = self.differences[name]
            scatter = statistics.stdev(each) if len(each) > 1 else self.reference.floor.get(name, 0.0)
            if name == UPDATE and self.counts_ahead:  # the update moves with Adam's step counter
                scatter = 0.0
            if name != LOSS or NORM not in self.numbers:
                hidden = abs(self.mean(name)) + _ERRORS * scatter / math.sqrt(len(each))
                found.append(Seen(1.0, math.exp(hidden), name=name))
        return max(found, key=lambda seen: seen.mine)

    @property
    def noise(self) -> str:
        """Reason why the two runs do not agree closely."""
        if not self.has_same_weights:
            return "its initial weights differ from run to run"
        if not self.has_same_rows:
            return "its steps get other rows than yours"
        return "the noise of its random numbers" if self.reference.draws else "two runs of it differ"

    @property
    def missing(self) -> str:
        """Reason why no number was seen."""
        return self.trace.missing or self.reference.missing or "no loss, gradient norm or update was seen"


# -- checks ------------------------------------------------------------------------------------------------------------
#
# Values of each check. A check that does not apply has none.

_STAGE = "zero_stage"
_TEXTS = {
    "steps": "fewer than {seen.theirs} optimizer steps were traced",
    "initial weights": "initial weights were not seen (an earlier version, or NVMe)",
    "samples": "each step trains on {seen.mine} samples a rank, and on {seen.theirs} with {pair.yours}",
    ROWS: "its optimizer steps have {seen.factor:.3g}x the rows of {pair.yours}",
    "epoch": (
        "its loader gives {seen.mine:.4g} optimizer steps an epoch instead of {seen.theirs:.4g}, because the last batch of "
        "an epoch is smaller than the others, or dropped"
    ),
    "last batch": "optimizer step {seen.step} has {seen.mine:.3g}x the usual rows, and {seen.theirs:.3g}x with {pair.yours}",
    "frozen weights": "weights were frozen after deepspeed.initialize",
    "other optimizers": (
        "optimizers outside of the engine make {seen.mine} steps in each optimizer step of the engine, and {seen.theirs} "
        "with {pair.yours}"
    ),
    "gradients by hand": "the script changes the gradients between backward and step",
    "backwards by hand": (
        "the script changes the gradients after {seen.mine} of the backwards of an optimizer step, and after {seen.theirs} "
        "with {pair.yours}"
    ),
    RATES: "learning rate is {seen.mine:.3g} instead of {seen.theirs:.3g} in optimizer step {seen.step}",
    "movement of the learning rate": (
        "learning rate has moved by a factor of {seen.mine:.6g} instead of {seen.theirs:.6g} in optimizer step {seen.step}"
    ),
    BUFFERS: (
        "buffers that its forwards change, like BatchNorm's running statistics, move {seen.factor:.3g}x as far as "
        "{pair.yours} in an optimizer step"
    ),
    "nothing seen": "{pair.missing}",
    "noise of other rows": (
        "{seen.name} is {seen.factor:.4g}x of {pair.yours}, and runs differ by {pair.scattered:.0%} in one step, because "
        "their rows differ"
    ),
    "unknown noise": (
        "{seen.name} is {seen.factor:.4g}x of {pair.yours}, and the noise of its random numbers was not measured"
    ),
    "numbers": "{seen.name} is {seen.factor:.4g}x of {pair.yours}{pair.besides}",
    "scatter": "{seen.name} is {pair.scattered:.1%} off {pair.yours} in a step, up or down",
    "noise": "a factor of {seen.factor:.2g} in its {seen.name} would stay unseen: {pair.noise}",
    "closeness": "compared only to within a factor of {seen.factor:.2f}: {pair.noise}",
}
_BUILDS_UP = ", more so in each step, as if a part of it or an average of weights counted iterations of your loop"
# Reasons why a number is proportional to the micro-batch (1) or to the accumulation (-1). Measured:
# `register_output_backward_hooks` divides at every output, and a row of `data/deepspeed_faults.json` names it.
_PROPORTIONS = {
    (LOSS, 1): (
        "; it grows with the micro-batch, like a sum over its rows, or like a loss that the script divides by the "
        "accumulation although DeepSpeed does so"
    ),
    (LOSS, -1): (
        "; it grows with the accumulation: the gradients of the micro-batches are added up and not averaged. A Trainer does "
        "so if its model takes num_items_in_batch and ignores it: trainer.model_accepts_loss_kwargs = False before train() "
        "averages them"
    ),
    (NORM, 1): (
        "; it shrinks with the accumulation, as if the gradient were divided by it twice: DeepSpeed does so for "
        "loss.backward() of a loss that the model returns beside its logits (engine.backward divides once)"
    ),
}


def _steps(pair: Pair) -> list[Seen]:
    count = sum(not reference.skipped for reference, _ in pair.steps)
    return [Seen(LEAST_STEPS, count)] * (count < LEAST_STEPS)


def _initial_weights(pair: Pair) -> list[Seen]:
    """Return values if weights were not seen, which versions before drew otherwise at stage 3 of a named model."""
    stages = {one.stage for one in pair.traces}
    is_other = not pair.is_users and 3 in stages and len(stages) == 2
    return [Seen(1, 0)] * (is_other and not all(one.initial for one in pair.traces))


def _epochs(pair: Pair) -> list[Seen]:
    theirs, mine = (one.epoch_steps for one in pair.traces)
    return [Seen(theirs, mine)] * bool(theirs and mine)


def _last_batches(pair: Pair) -> list[Seen]:
    """Return the rows of each step, in those of most steps, if no loader tells its length."""
    rows = [[step.rows for step in run] for run in pair.runs]
    usual = [max(1, statistics.median(each)) for each in rows]
    each = enumerate(zip(*rows, strict=True), 1)
    return [] if _epochs(pair) else [Seen(a / usual[0], b / usual[1], step) for step, (a, b) in each]


def _frozen_weights(pair: Pair) -> list[Seen]:
    return [Seen(1, 0)] * (pair.leaves_zero and any(one.holds_frozen for one in pair.traces))


def _other_optimizers(pair: Pair) -> list[Seen]:
    theirs, mine = (statistics.mode(step.outside_steps for step in run) for run in pair.runs)
    return [Seen(theirs, mine)]


def _backwards_by_hand(pair: Pair) -> list[Seen]:
    """Return the backwards after which the script changes what stage 0 steps with, whether or not it has had an effect yet."""
    theirs, mine = (max(step.changed_by_hand for step in run) for run in pair.runs)
    return [Seen(theirs, mine)]


def _rates(pair: Pair) -> Iterator[Seen]:
    """Yield the learning rates of the steps, and those that the schedules lead to if they lie apart.

    A schedule's length is rounded, so the reference's neighbouring intervals are its rates too.
    """
    yield from _first_rates(pair.steps)
    reference = pair.reference
    first = [rate for step in reference.steps for rate in step.rates]  # a short schedule has come down by then
    least = _LATER_TOLERANCE * max([*first, *(high for _, high in reference.ahead)], default=0.0)
    for at, (step, (low, high), _) in enumerate(zip(AHEAD, pair.trace.ahead, reference.ahead, strict=False)):
        lows, highs = zip(*reference.ahead[max(0, at - 1) : at + 2], strict=True)
        if low > max(highs) + least:
            yield Seen(max(highs), low, step)
        if high < min(lows) - least:
            yield Seen(min(lows), high, step)


def _first_rates(pairs: Iterable[tuple[TracedStep, TracedStep]]) -> Iterator[Seen]:
    """Yield the learning rates of both runs in each step."""
    for step, (theirs, mine) in enumerate(pairs, 1):
        one, other = sorted(set(theirs.rates)), sorted(set(mine.rates))
        if len(one) != len(other):  # DeepSpeed may split groups, which repeats rates
            one, other = one[-1:], other[-1:]
        yield from (Seen(a, b, step) for a, b in zip(one, other, strict=False))


def _moved_rates(pair: Pair) -> list[Seen]:
    """Return by how much the highest rate has moved.

    A rate that counts micro-batches may move by less than its tolerance in the first steps, and far apart later. A schedule
    that counts parts of a step is up to one step ahead or behind, so the reference's neighbouring steps are its rates too.
    """
    rates = [[max(step.rates, default=0.0) for step in run] for run in pair.runs]
    if not all(each[0] for each in rates):  # a warm-up from zero, which has been compared
        return []
    (before, theirs), (_, mine) = ([rate / each[0] for rate in each[-2:]] for each in rates)
    low, high = sorted((before, 2 * theirs - before))
    return [Seen(min(max(mine, low), high), mine, len(pair.steps))]


def _buffers(pair: Pair) -> list[Seen]:
    """Return the buffers that forwards change: four forwards of two rows move them further than one of eight."""
    if not pair.is_users or BUFFERS not in pair.differences:
        return []
    return [seen for seen in [pair.seen(BUFFERS)] if seen.difference > pair.tolerance(BUFFERS)]


def _noise_of_other_rows(pair: Pair) -> list[Seen]:
    floor = pair.reference.floor
    each = [] if pair.has_same_rows else pair.beyond[:1]
    return [
        seen
        for seen in each
        if seen.difference <= _ERRORS * floor.get(seen.name, 0.0) / math.sqrt(len(pair.differences[seen.name]))
    ]


def _unknown_noise(pair: Pair) -> list[Seen]:
    return [seen for seen in pair.beyond[:1] if pair.noise_is_unknown and seen.difference <= _MOST]


def _numbers(pair: Pair) -> list[Seen]:
    return [seen for seen in pair.beyond[:1] if seen.difference > pair.tolerance(seen.name)]


def _scatter(pair: Pair) -> list[Seen]:
    return [seen._replace(mine=1.0 + pair.scattered) for seen in pair.beyond[:1]]


# -- causes ------------------------------------------------------------------------------------------------------------
#
# Settings because of which a candidate differs, each with the reason, and the candidates that share it.


def _by_cut(pair: Pair) -> Cause | None:
    return (MICRO_BATCH, pair.other_micro_batch) if pair.is_cut else None


def _by_iterations(pair: Pair) -> Cause | None:
    own, now = pair.reference.iterations, pair.trace.iterations
    if own == now:
        return None
    return (
        ACCUMULATION,
        f"this counts iterations of your loop, and {now} instead of {own} of them make an optimizer step, "
        "or it is computed from the micro-batch",
    )


def _by_loss(pair: Pair) -> Cause | None:
    """Return the micro-batch if the loss differs with it, with a reason if it is proportional to it."""
    if not pair.is_cut or LOSS not in (seen.name for seen in pair.beyond):
        return None
    because = f"the loss depends on how the batch is cut ({pair.other_micro_batch})"
    return MICRO_BATCH, because + _proportion(pair, LOSS)


def _by_division(pair: Pair) -> Cause | None:
    because = _proportion(pair, NORM) if pair.beyond[0].name == NORM else ""
    return (MICRO_BATCH, pair.other_micro_batch + because) if because else None


def _proportion(pair: Pair, name: str) -> str:
    """Return why a number grows with the micro-batch or with the accumulation; empty if it is proportional to neither."""
    times = math.log(pair.candidate.micro_batch / pair.own.micro_batch)
    mean = statistics.fmean(pair.differences[name])
    reasons = {sign: text for (of, sign), text in _PROPORTIONS.items() if of == name}
    return next((text for sign, text in reasons.items() if times and abs(mean - sign * times) < _PROPORTIONAL), "")


def _by_frozen_weights(pair: Pair) -> Cause:
    return _STAGE, (
        f"stage {pair.stage} steps them with gradients of zero, so that weight decay and Adam's counter go on, and stage 0 "
        "leaves them out"
    )


def _by_sums(pair: Pair) -> Cause | None:
    """Return the stage if one of both does not sum what several backwards of a step give."""
    (theirs, mine), backwards = (one.stage for one in pair.traces), pair.trace.iterations
    partial = [stage for stage in (mine, theirs) if stage in (1, 2)]
    if backwards <= pair.trace.accumulation or len(partial) != 1:
        return None
    return _STAGE, f"stage {partial[0]} does not sum the {backwards} gradients of a step"


def _by_stage(pair: Pair) -> Cause | None:
    theirs, mine = (one.stage for one in pair.traces)
    if theirs == mine:
        return None
    if not pair.leaves_zero or not pair.is_users:
        return _STAGE, f"stage {mine} instead of {theirs}"
    limit = max(one.clips_at for one in pair.traces)
    clipping = f'"gradient_clipping": {limit:g}' if limit else "gradient_clipping"
    return _STAGE, (
        f"stage {pair.stage} gives its own flat copies of weights and gradients to the optimizer, on which changes by hand "
        f"(clipping) have no effect, and without the shapes that Muon and Shampoo use; {clipping} in the DeepSpeed config "
        "works at every stage"
    )


_Open = functools.partial(Check, verdict=Verdict.NOT_COMPARED)
_BY_SCHEDULE = (_by_iterations, _by_sums, _by_stage, _by_cut)
_BY_NUMBERS = (_by_loss, _by_sums, _by_stage, _by_division, _by_cut)
CHECKS = (
    _Open("steps", _steps),
    _Open("initial weights", _initial_weights),
    _Open("samples", lambda pair: [Seen(pair.own.rows_per_rank, pair.candidate.rows_per_rank)]),
    Check(ROWS, lambda pair: [Seen(1.0, rows_factor(*pair.traces, is_cut=pair.is_cut))], causes=(_by_sums, _by_stage)),
    Check("epoch", _epochs, math.log1p(_LATER_TOLERANCE), causes=(_by_cut,)),
    Check("frozen weights", _frozen_weights, causes=(_by_frozen_weights,)),
    Check("other optimizers", _other_optimizers, causes=(_by_iterations,)),
    Check("gradients by hand", lambda pair: _backwards_by_hand(pair) * pair.leaves_zero, causes=(_by_stage,)),
    Check("backwards by hand", _backwards_by_hand, causes=(_by_iterations,)),
    Check(RATES, _rates, _RATE_TOLERANCE, _BY_SCHEDULE),
    Check("movement of the learning rate", _moved_rates, _RATE_ROUNDING, _BY_SCHEDULE),
    Check(BUFFERS, _buffers, causes=(_by_cut, _by_sums, _by_stage)),
    _Open("nothing seen", lambda pair: [Seen(1, 0)] * (not pair.numbers)),
    _Open("noise of other rows", _noise_of_other_rows),
    _Open("unknown noise", _unknown_noise),
    Check("numbers", _numbers, causes=_BY_NUMBERS),
    Check("scatter", _scatter, causes=_BY_NUMBERS),
    _Open("noise", lambda pair: [pair.left_open], _UNSEEN),
)
# What an equal training leaves open.
REMARKS = (
    Check("closeness", lambda pair: [pair.left_open], _CLOSE),
    Check("epoch", _epochs, _RATE_TOLERANCE),
    Check("last batch", _last_batches, _COARSE_TOLERANCE),
)


# -- figures -----------------------------------------------------------------------------------------------------------


def _figures(pair: Pair) -> str:
    parts = []
    for name in pair.numbers:
        theirs, mine = map(statistics.fmean, zip(*pair.values(name), strict=True))
        parts.append(f"{name} {mine:.4g} / {theirs:.4g}")
    if UPDATE in pair.numbers:
        moved = " (stage 0 counts Adam's steps one ahead)" if pair.counts_ahead else ""
        parts[-1] = f"update {pair.seen(UPDATE).factor:.2f}x{moved}"
    steps_seen = max(len(pair.differences[name]) for name in pair.numbers)
    return ", ".join([*parts, "learning rate equal", counted(steps_seen, "step")])


def rows_factor(reference: TrainingTrace, trace: TrainingTrace, *, is_cut: bool = True) -> float:
    """Return the ratio of the rows per optimizer step; 1 if they are about equal.

    Args:
        is_cut: the micro-batches differ. A forward of as many rows as before then has packed rows, which are not counted.
    """
    theirs, mine = (statistics.median(step.rows for step in one.steps) for one in (reference, trace))
    is_packed = is_cut and mine * reference.iterations == theirs * trace.iterations
    rows = Seen(theirs, mine)
    if not mine or not theirs or is_packed or rows.difference <= _COARSE_TOLERANCE:
        return 1.0
    return rows.factor


def _least(name: str, *traces: TrainingTrace) -> float:
    """Return the smallest tolerance of a quantity.

    Adam divides a gradient by its own size, so that the rounding of a gradient near zero shows in the update. In fp32 these
    differ by 0.1 % between stages 2 and 3, where loss and gradient norm agree to six digits (a PPO loop on two CPU ranks).
    Updates are therefore compared as in 16 bits.
    """
    if name == BUFFERS:
        return _COARSE_TOLERANCE
    precisions = ["bf16"] if name == UPDATE else [one.precision for one in traces]
    return max(LEAST_TOLERANCE[precision] for precision in precisions)


def _has_same_rows(pair: tuple[TracedStep, TracedStep]) -> bool:
    one, other = pair
    return abs(one.digest - other.digest) <= _SAME_ROWS * max(1.0, one.rows)


def _is_early(trace: TrainingTrace) -> bool:
    """Return True if Adam's step counter is one ahead."""
    return trace.stage == 0 and trace.precision in ("bf16", "fp16")


def _counter_factor(step: int) -> float:
    """Return Adam's update with a step counter that is one ahead, divided by the right one."""

    def correction(count: int) -> float:
        return math.sqrt(1 - _BETAS[1] ** count) / (1 - _BETAS[0] ** count)

    return correction(step + 1) / correction(step)


# -- certifier ---------------------------------------------------------------------------------------------------------


class Certifier:
    """Compares every trial of a study with its reference, so that no candidate wins that trains something else.

    The reference is the first trace of the user's own config. A named model has no config of the user, so its reference
    is the first candidate of which a whole step was traced.
    """

    def __init__(self, job: Job, records: Iterable[Record] = ()) -> None:
        self._job = job
        script = job.script
        self.own = own_candidate(script) if script is not None and script.profile.is_known else None
        self.reference: TrainingTrace | None = None  # trace of `own`
        for record in records:
            if record.outcome is not None and record.outcome.ok:
                self.learn(record.candidate, record.outcome, record.role)

    def learn(self, candidate: Candidate, outcome: Outcome, role: str) -> None:
        """Take the reference from a trial; a repeated run of the same config raises the noise floor."""
        trace, reference = outcome.trace, self.reference
        if trace is None or role == RESUME or not self._is_whole(candidate, trace):
            return
        if self.own is None:
            self.own = candidate
        if candidate != self.own:
            return
        if reference is None:
            self.reference = trace
        elif trace.steps != reference.steps:
            self.reference = with_floor(reference, trace)

    def _is_whole(self, candidate: Candidate, trace: TrainingTrace) -> bool:
        """Return False if a rank of a named model ran only some micro-batches of a step, to extrapolate the rest."""
        return self._job.script is not None or trace.iterations == candidate.accumulation

    def certificate(self, candidate: Candidate, trace: TrainingTrace | None) -> Certificate:
        """Return the verdict on a candidate's trace."""
        if trace is None or not self._is_whole(candidate, trace):
            return Certificate(Verdict.NOT_COMPARED, "no whole optimizer step of it was traced")
        if self.reference is None or self.own is None:
            whose = "the reference" if self._job.script is None else "your own config"
            return Certificate(Verdict.NOT_COMPARED, f"{whose} was not measured")
        return compare(self.reference, self.own, trace, candidate, is_users=self._job.script is not None)

    def checked(self, candidate: Candidate, outcome: Outcome, role: str) -> Outcome:
        """Return a trial's outcome, as invalid if the candidate trains something else than the reference."""
        self.learn(candidate, outcome, role)
        measured = outcome.measurement
        if measured is None or role == RESUME or candidate == self.own or outcome.trace is None:
            return outcome
        found = self.certificate(candidate, outcome.trace)
        if found.verdict is not Verdict.DIFFERS:
            return outcome
        return dataclasses.replace(
            outcome,
            kind=OutcomeKind.INVALID,
            measurement=None,
            reason=found.text,
            evidence=f"training trace, at {measured.samples_per_second:.4g} samples/s",
            source=Source.TRACE,
            trains_otherwise=found.cause,
        )

    def shares_cause(self, candidate: Candidate, outcome: Outcome) -> Callable[[Candidate], bool]:
        """Return a test for candidates that train otherwise for the same reason as this one."""
        own, cause = self.own, outcome.trains_otherwise
        if own is not None and cause == MICRO_BATCH:
            return lambda other: other.micro_batch != own.micro_batch
        if own is not None and cause == ACCUMULATION:
            return lambda other: other.accumulation != own.accumulation
        if cause != _STAGE:
            return lambda other: other.family == candidate.family
        accumulates = candidate.accumulation > 1
        return lambda other: other.stage == candidate.stage and (other.accumulation > 1) == accumulates


def length_lines(reference: TrainingTrace, trace: TrainingTrace) -> list[str]:
    """Return what ends a loop after another number of optimizer steps than under the reference."""
    own = reference.loop_ends
    found = {where: now for where, now in trace.loop_ends.items() if where in own}
    return [
        f"{where} counts iterations of your loop: it ends after {now:.4g} optimizer steps instead of {own[where]:.4g}. Multiply "
        f"the limit by {own[where] / now:.4g}"
        for where, now in found.items()
        if Seen(own[where], now).difference > _RATE_TOLERANCE
    ]


def structure_differs(reference: TrainingTrace, trace: TrainingTrace) -> str:
    """Return how a restarted training differs in what does not depend on its weights; empty if it does not.

    Args:
        reference: trace of the training's first start.
        trace: trace after a restart, from other weights and rows.
    """
    rows = rows_factor(reference, trace)
    if rows != 1.0:
        return f"it trains on {rows:.3g}x the rows in an optimizer step"
    each = [{step.rates for step in one.counted} for one in (reference, trace)]
    pairs = zip(reference.counted[:1], trace.counted[:1], strict=False)
    wrong = [seen for seen in _first_rates(pairs) if seen.difference > _RATE_TOLERANCE]
    if wrong and all(len(rates) == 1 for rates in each):  # otherwise a schedule has moved on since
        return f"its learning rate is {wrong[0].mine:.3g} instead of {wrong[0].theirs:.3g} at its first start"
    return ""


def trains_otherwise(job: Job, records: Sequence[Record]) -> Callable[[Candidate], bool]:
    """Return a test for candidates that train something else than the user's config, by what a study has traced."""
    certifier = Certifier(job, records)
    tests = [
        certifier.shares_cause(record.candidate, record.outcome)
        for record in records
        if record.outcome is not None and record.outcome.source is Source.TRACE
    ]
    return lambda candidate: any(test(candidate) for test in tests)


def certificate_lines(job: Job, records: Sequence[Record], winner: Record) -> list[str]:
    """Return the lines about a winner's training; none for a study without traces."""
    if not any(record.outcome is not None and record.outcome.trace is not None for record in records):
        return []
    certifier = Certifier(job, records)
    trace = winner.outcome.trace if winner.outcome is not None else None
    found = certifier.certificate(winner.candidate, trace)
    lengths = length_lines(certifier.reference, trace) if certifier.reference and trace else []
    return [found.line, *lengths]
