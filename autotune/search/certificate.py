"""Certificate: compare the training trace of a candidate with that of the user's own config."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

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
_LATER_TOLERANCE = 0.1  # of the highest learning rate in later steps, and of an epoch's optimizer steps
_COARSE_TOLERANCE = 0.25  # relative; the last batch of a data set may be smaller, and buffers may have 16 bits
_CLAMP = 1e-3  # smallest ratio, for a quantity that is zero in one run
_TINY = 1e-12  # a quantity below is zero
_SMALL_LOSS = 1e-4  # losses around zero, such as those of policy gradients, are compared with this size
_SAME_ROWS = 1e-6  # relative; digests of equal rows, summed in another order
# Root mean square difference of the projections of the same initial weights. Rounding to bf16 changes them by less than 0.001;
# another draw by 0.7, or 0.03 if norms' weights of 1 make up a third of the sample and the others have a deviation of 0.02.
_SAME_INITIAL = 5e-3
# Adam's betas by default. DeepSpeed makes a dummy optimizer step when it initializes stage 0 in 16 bits, so that Adam's
# step counter is one ahead: 0.744x in the first step, 0.83x in the second, harmless (`DEEPSPEED_FAULTS.md`, 0.19.8).
_BETAS = (0.9, 0.999)
_COUNTER_TOLERANCE = 0.1
_PROPORTIONAL = 0.05  # relative difference up to which the loss is said to grow with the micro-batch

LOSS, NORM, UPDATE, RATES, ROWS = "loss", "gradient norm", "update", "learning rate", "rows"
BUFFERS, OUTSIDE, BY_HAND = "buffers", "other optimizers", "gradients by hand"
_NUMBERS = (LOSS, NORM, UPDATE, BUFFERS)


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
    quantity: str = ""  # that differs
    factor: float = 1.0  # the candidate's value divided by the reference's
    cause: str = ""  # knob because of which it differs; empty if unknown

    @property
    def line(self) -> str:
        """Return the verdict as one line."""
        if self.verdict is Verdict.SAME:
            return f"trains the same: {self.text}"
        said = "trains something else" if self.verdict is Verdict.DIFFERS else "training not compared"
        return f"{said}: {self.text}"


def floor_of(first: TrainingTrace, second: TrainingTrace) -> dict[str, float]:
    """Return by how much two runs of one config differ: the root mean square over the steps, by quantity."""
    each = {name: _differences(first, second, name) for name in _NUMBERS}
    return {name: _root_mean_square(found) for name, found in each.items() if found}


def with_floor(reference: TrainingTrace, other: TrainingTrace) -> TrainingTrace:
    """Return the reference and its auxiliary engines with their noise floors; a known floor is never lowered.

    Args:
        reference: trace of the user's own config.
        other: trace of another run of the same config.
    """
    found = floor_of(reference, other)
    highest = {
        name: max(each.get(name, 0.0) for each in (reference.floor, found)) for name in {*reference.floor, *found}
    }
    pairs = zip(reference.auxiliary, other.auxiliary, strict=False)
    known = tuple(with_floor(one, again) for one, again in pairs)
    return dataclasses.replace(reference, floor=highest, auxiliary=(*known, *reference.auxiliary[len(known) :]))


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


def _builds_up(each: Sequence[float]) -> bool:
    """Return True if differences lie much closer to a line through zero than to their mean.

    An effect that builds up lies there: an average of weights that teaches, a part of the loss that counts iterations.
    """
    if len(each) < LEAST_STEPS:
        return False
    line = range(1, len(each) + 1)
    slope = sum(at * one for at, one in zip(line, each, strict=True)) / sum(at * at for at in line)
    deviation = math.dist(each, [slope * at for at in line]) / math.sqrt(len(each) - 1)
    return deviation < statistics.stdev(each) / 2


def compare(
    reference: TrainingTrace, own: Candidate, trace: TrainingTrace, candidate: Candidate, *, is_users: bool = True
) -> Certificate:
    """Compare a candidate's trace with the reference's.

    Args:
        reference: trace of the user's own config, with its noise floor.
        own: the config of the reference.
        is_users: the reference is the user's own config. A named model's is another candidate.
    """
    found = _verdict(Pair(reference, own, trace, candidate, is_users))
    unknown = ""
    untraced = TrainingTrace((), 0, "fp32", 1)
    pairs = itertools.zip_longest(reference.auxiliary, trace.auxiliary, fillvalue=untraced)
    for number, (theirs, mine) in enumerate(pairs, 2):
        if found.verdict is Verdict.DIFFERS:
            return found
        one = _verdict(Pair(theirs, own, mine, candidate, is_users))
        if one.verdict is Verdict.DIFFERS:
            return dataclasses.replace(one, text=f"in engine {number}, {one.text}")
        if one.verdict is Verdict.NOT_COMPARED:
            unknown += f"; engine {number} not compared: {one.text}"
    return dataclasses.replace(found, text=found.text + unknown)


def _verdict(pair: Pair) -> Certificate:
    """Return the verdict of the first check that fails, or the figures of an equal training."""
    failures = (check(pair) for check in _CHECKS)
    return next((found for found in failures if found is not None), None) or _same(pair)


@dataclass(frozen=True)
class Pair:
    """Traces of one engine under two configs."""

    reference: TrainingTrace
    own: Candidate
    trace: TrainingTrace
    candidate: Candidate
    is_users: bool

    @property
    def your(self) -> str:
        """Possessive of the reference."""
        return "your" if self.is_users else "the reference's"

    @property
    def yours(self) -> str:
        """Possessive of the reference, without a noun."""
        return "yours" if self.is_users else "the reference's"

    @property
    def traces(self) -> tuple[TrainingTrace, TrainingTrace]:
        """Both traces, the reference's first."""
        return self.reference, self.trace

    @property
    def is_cut(self) -> bool:
        """True if the batch is cut into other micro-batches."""
        return self.own.micro_batch != self.candidate.micro_batch

    @functools.cached_property
    def steps(self) -> list[tuple[TracedStep, TracedStep]]:
        """Steps that both runs made."""
        return _paired(*self.traces)

    @functools.cached_property
    def differences(self) -> dict[str, list[float]]:
        """Logarithms of the ratios of each step, by number that was seen."""
        each = {name: _differences(*self.traces, name) for name in _NUMBERS}
        return {name: found for name, found in each.items() if found}

    @property
    def numbers(self) -> list[str]:
        """Numbers of the optimizer steps that were seen."""
        return [name for name in self.differences if name != BUFFERS]

    @property
    def noise_is_unknown(self) -> bool:
        """True if the script draws random numbers, and no second run has shown what they change."""
        return self.reference.draws and not _is_noisy(self.reference)

    def mean(self, name: str) -> float:
        """Return the mean difference, without the effect of Adam's step counter in updates of stage 0 in 16 bits."""
        mean = statistics.fmean(self.differences[name])
        early = [_is_early(one) for one in self.traces]
        if name != UPDATE or early[0] == early[1]:
            return mean
        steps = range(1, len(self.differences[name]) + 1)
        ahead = statistics.fmean(math.log(_counter_factor(step)) for step in steps)
        corrected = mean - (ahead if early[1] else -ahead)
        return 0.0 if abs(corrected) <= _COUNTER_TOLERANCE else mean

    def factor(self, name: str) -> float:
        """Return the mean ratio."""
        return math.exp(statistics.fmean(self.differences[name]))

    def tolerance(self, name: str) -> float:
        """Return the tolerated mean difference.

        If the two runs trained on other rows, the variation between the reference's steps is tolerated too. If they began
        with other weights (`zero.Init` draws them on the device), all noise is, and so is a named model's.
        """
        reference = self.reference
        floor = _FLOORS * reference.floor.get(name, 0.0)
        if not same_weights(*self.traces) or (self.noise_is_unknown and not self.is_users):
            floor = _MOST
        elif not same_rows(*self.traces):
            values = [abs(value) for step in reference.counted if (value := _value(step, name))]
            logs = [math.log(value) for value in values if value > _TINY]
            floor = max(floor, _FLOORS * statistics.stdev(logs) if len(logs) > 1 else _MOST)
        return max(_least(name, *self.traces), min(floor, _MOST))

    @property
    def noise(self) -> str:
        """Reason why the two runs do not agree closely."""
        if not same_weights(*self.traces):
            return "its initial weights differ from run to run"
        if not same_rows(*self.traces):
            return "its rows differ from run to run"
        return "the noise of its random numbers" if self.reference.draws else "two runs of it differ"


# -- checks ------------------------------------------------------------------------------------------------------------
#
# Each check compares one thing, and returns None if it is equal or does not apply. The first failure is the verdict.

_TEXTS = {
    "steps": "fewer than {least} optimizer steps were traced",
    "weights": "initial weights were not seen (an earlier version, or NVMe)",
    "samples": "each step trains on {mine} samples a rank, and on {theirs} with {other}",
    ROWS: "it trains on {factor:.3g}x {your} rows in an optimizer step",
    "epoch": (
        "its loader gives {mine:.4g} optimizer steps an epoch instead of {theirs:.4g}, because the last batch of an epoch "
        "is smaller than the others, or dropped"
    ),
    "last batch": "optimizer step {step} trains on {mine} rows instead of {theirs}: the last batch of the data differs",
    "frozen": (
        "weights were frozen after deepspeed.initialize: stage {stage} steps them with gradients of zero, so that weight "
        "decay and Adam's counter go on, and stage 0 leaves them out"
    ),
    OUTSIDE: (
        "optimizers outside of the engine make {mine} steps in each optimizer step of the engine, and {theirs} "
        "with {yours}"
    ),
    "stage by hand": (
        "the script changes the gradients between backward and step{how}, which stage {stage} does not read: it steps with "
        "its own copy; {remedy} in the DeepSpeed config works at every stage"
    ),
    BY_HAND: (
        "the script changes the gradients{how} after {mine} of the backwards of an optimizer step, and after {theirs} with "
        "{yours}"
    ),
    BUFFERS: (
        "buffers that its forwards change, like BatchNorm's running statistics, move {factor:.3g}x as far as {yours} in an "
        "optimizer step"
    ),
}


def _failure(pair: Pair, name: str, cause: str = "", because: str = "", **figures: Any) -> Certificate:
    """Return the verdict of a failed check, in the words of its name."""
    text = _TEXTS[name].format(your=pair.your, yours=pair.yours, **figures)
    because = f": {because}" if because else ""
    return Certificate(Verdict.DIFFERS, text + because, name, figures.get("factor", math.inf), cause)


def _check_steps(pair: Pair) -> Certificate | None:
    if sum(not a.skipped for a, _ in pair.steps) >= LEAST_STEPS:
        return None
    return Certificate(Verdict.NOT_COMPARED, _TEXTS["steps"].format(least=LEAST_STEPS))


def _check_initial_weights(pair: Pair) -> Certificate | None:
    """Check that initial weights were seen, which versions before drew otherwise at stage 3 of a named model."""
    stages = {one.stage for one in pair.traces}
    seen = all(one.initial for one in pair.traces)
    if seen or pair.is_users or 3 not in stages or len(stages) == 1:
        return None
    return Certificate(Verdict.NOT_COMPARED, _TEXTS["weights"])


def _check_samples(pair: Pair) -> Certificate | None:
    mine, theirs = pair.candidate.rows_per_rank, pair.own.rows_per_rank
    if mine == theirs:
        return None
    other = "your config" if pair.is_users else "the config it would be compared with"
    return Certificate(Verdict.NOT_COMPARED, _TEXTS["samples"].format(mine=mine, theirs=theirs, other=other))


def _check_rows(pair: Pair) -> Certificate | None:
    factor = rows_factor(*pair.traces, is_cut=pair.is_cut)
    if factor == 1.0:
        return None
    return _failure(pair, ROWS, *_stage_cause(pair), factor=factor)


def _check_epoch(pair: Pair) -> Certificate | None:
    theirs, mine = (one.epoch_steps for one in pair.traces)
    if not theirs or not mine or abs(math.log(mine / theirs)) <= math.log1p(_LATER_TOLERANCE):
        return None
    found = _failure(pair, "epoch", MICRO_BATCH if pair.is_cut else "", mine=mine, theirs=theirs, factor=mine / theirs)
    return dataclasses.replace(found, quantity=ROWS)


def _check_frozen(pair: Pair) -> Certificate | None:
    reference, trace = pair.traces
    if not (reference.holds_frozen or trace.holds_frozen) or (reference.stage == 0) is (trace.stage == 0):
        return None
    found = _failure(pair, "frozen", _STAGE, stage=max(reference.stage, trace.stage))
    return dataclasses.replace(found, quantity=UPDATE, factor=1.0)


def _check_outside_steps(pair: Pair) -> Certificate | None:
    theirs, mine = (statistics.mode(one.outside_steps for one in run) for run in zip(*pair.steps, strict=True))
    if mine == theirs:
        return None
    cause = ACCUMULATION if pair.reference.iterations != pair.trace.iterations else ""
    return _failure(pair, OUTSIDE, cause, mine=mine, theirs=theirs)


def _check_changed_gradients(pair: Pair) -> Certificate | None:
    """Check what the script does to gradients between backward and step, whether or not it has had an effect yet."""
    theirs, mine = (max(one.changed_by_hand for one in run) for run in zip(*pair.steps, strict=True))
    stages = [one.stage for one in pair.traces]
    limit = max(one.clips_at for one in pair.traces)
    how = f" (clipping at {limit:g})" if limit else ""
    if (stages[0] == 0) is not (stages[1] == 0):
        if not (theirs if stages[0] == 0 else mine):
            return None
        remedy = f'"gradient_clipping": {limit:g}' if limit else "gradient_clipping"
        return _failure(pair, "stage by hand", _STAGE, stage=max(stages), how=how, remedy=remedy)
    if stages[0] or mine == theirs:
        return None
    return _failure(pair, BY_HAND, ACCUMULATION if pair.is_cut else "", mine=mine, theirs=theirs, how=how)


def _check_rates(pair: Pair) -> Certificate | None:
    yours = pair.yours
    if (wrong := _wrong_rate(pair.steps)) is not None:
        step, theirs, mine = wrong
        times = f"{mine / theirs:.3g}x of {yours}" if theirs else f"{mine:.3g} instead of 0"
        return _wrong_schedule(pair, f"learning rate is {times} in optimizer step {step + 1}", theirs, mine)
    if (moved := _wrong_movement(pair.steps)) is not None:
        theirs, mine = moved
        moves = f"by {100 * mine:.2g}% instead of {100 * theirs:.2g}% after {len(pair.steps)} optimizer steps"
        return _wrong_schedule(pair, f"learning rate has moved {moves}", theirs, mine)
    if (later := _wrong_later(*pair.traces)) is not None:
        step, theirs, mine = later
        text = f"learning rate will be {mine:.3g} instead of {theirs:.3g} in optimizer step {step}"
        return _wrong_schedule(pair, text, theirs, mine, later=True)
    return None


def _wrong_schedule(pair: Pair, text: str, theirs: float, mine: float, *, later: bool = False) -> Certificate:
    own, now = pair.reference.iterations, pair.trace.iterations
    cause, because = _stage_cause(pair)
    if own != now:
        subject = "length of the schedule counts" if later else "schedule advances with"
        cause = ACCUMULATION
        because = f"the {subject} iterations of your loop, and {now} instead of {own} of them make an optimizer step"
    elif not cause and pair.is_cut:
        cause, because = MICRO_BATCH, _other_micro_batch(pair)
    text = f"{text}: {because}" if because else text
    return Certificate(Verdict.DIFFERS, text, RATES, mine / theirs if theirs else math.inf, cause)


def _check_buffers(pair: Pair) -> Certificate | None:
    """Check buffers that forwards change: four forwards of two rows move them further than one of eight."""
    if not pair.is_users or BUFFERS not in pair.differences or abs(pair.mean(BUFFERS)) <= pair.tolerance(BUFFERS):
        return None
    cause = (MICRO_BATCH, _other_micro_batch(pair)) if pair.is_cut else _stage_cause(pair)
    return _failure(pair, BUFFERS, *cause, factor=pair.factor(BUFFERS))


def _check_numbers(pair: Pair) -> Certificate | None:
    """Check loss, gradient norm and update."""
    reference, trace = pair.traces
    found = pair.numbers
    if not found:
        why = trace.missing or reference.missing or "no loss, gradient norm or update was seen"
        return Certificate(Verdict.NOT_COMPARED, why)
    tolerance = {name: pair.tolerance(name) for name in found}
    beyond = {name for name in found if abs(pair.mean(name)) > tolerance[name]}
    scatter = _scatter_of_cut(pair)
    beyond |= {name for name in scatter if scatter[name] > tolerance[name]}
    # The loss has no effect except through its gradient, which clears it only if its own noise is small. A part of the
    # loss that grows shows in it first.
    cleared = {NORM, UPDATE} <= set(found) and abs(pair.mean(NORM)) <= _CLEARS
    if beyond == {LOSS} and cleared and not _builds_up(pair.differences[LOSS]):
        beyond = set()
    if not beyond:
        return None
    # The update of Adam hides a factor of the gradient, so the largest deviation names the quantity.
    name = max(beyond, key=lambda one: abs(statistics.fmean(pair.differences[one])))
    each, factor = pair.differences[name], pair.factor(name)
    times = f"{name} is {factor:.{3 if abs(math.log(factor)) > 0.01 else 5}g}x of {pair.yours}"
    noise = _ERRORS * reference.floor.get(name, 0.0) / math.sqrt(len(each))
    if abs(math.log(factor)) <= noise and not same_rows(reference, trace):
        apart = math.expm1(_root_mean_square(each))
        much = f"runs differ by {apart:.0%} in one step, because their rows differ"
        return Certificate(Verdict.NOT_COMPARED, f"{times}, and {much}")
    if abs(math.log(factor)) <= tolerance[name]:
        times = f"{name} is {math.expm1(scatter[name]):.1%} off {pair.yours} in a step, up or down"
    if pair.noise_is_unknown and abs(math.log(factor)) <= _MOST:
        return Certificate(Verdict.NOT_COMPARED, f"{times}, and the noise of its random numbers was not measured")
    return _other_numbers(pair, times, name, LOSS in beyond)


def _scatter_of_cut(pair: Pair) -> dict[str, float]:
    """Return the scatter of an effect of the cut, which may lie around zero; empty if noise scatters too.

    Named models average over a micro-batch's tokens.
    """
    is_exact = pair.noise_is_unknown or not pair.reference.draws
    if not pair.is_users or not pair.is_cut or not is_exact:
        return {}
    if not same_rows(*pair.traces) or not same_weights(*pair.traces):
        return {}
    return {name: _root_mean_square(pair.differences[name]) for name in pair.numbers if name != UPDATE}


def _other_numbers(pair: Pair, text: str, name: str, other_loss: bool) -> Certificate:
    """Return the verdict on another loss, gradient norm or update, with its cause."""
    factor, loss = pair.factor(name), pair.factor(LOSS) if other_loss else 1.0
    if name != LOSS and abs(loss - 1) >= 0.005:
        text += f", loss {loss:.3g}x"
    elif other_loss and _builds_up(pair.differences[LOSS]):
        text += ", more so in each step, as if a part of it or an average of weights counted iterations of your loop"
    if other_loss and pair.is_cut:
        because = f"the loss depends on how the batch is cut ({_other_micro_batch(pair)})"
        because += _proportion(loss, pair.own, pair.candidate, _GROWING_LOSS, _FULL_LOSS)
        return Certificate(Verdict.DIFFERS, f"{text}: {because}", name, factor, MICRO_BATCH)
    cause, because = _stage_cause(pair)
    norms = pair.differences.get(NORM)  # weights are equal in the first step only
    stages = {one.stage for one in pair.traces}
    if cause and name == UPDATE and 0 in stages and norms and abs(norms[0]) <= _least(NORM, *pair.traces):
        because = _FLAT_PARTS.format(max(stages))
    elif not cause and pair.is_cut:
        cause, because = MICRO_BATCH, _other_micro_batch(pair)
        if name == NORM:
            because += _proportion(factor, pair.own, pair.candidate, _DIVIDED_TWICE, "")
    text = f"{text}: {because}" if because else text
    return Certificate(Verdict.DIFFERS, text, name, factor, cause)


def _check_noise(pair: Pair) -> Certificate | None:
    """Check that noise leaves no factor open that would matter."""
    name, hidden = _left_open(pair)
    if hidden < _UNSEEN:
        return None
    times = f"{name} is {pair.factor(name):.3g}x of {pair.yours} on average"
    why = f"{times}, and a factor of {math.exp(hidden):.2g} would stay unseen: {pair.noise}"
    return Certificate(Verdict.NOT_COMPARED, why, name, pair.factor(name))


_CHECKS: tuple[Callable[[Pair], Certificate | None], ...] = (
    _check_steps,
    _check_initial_weights,
    _check_samples,
    _check_rows,
    _check_epoch,
    _check_frozen,
    _check_outside_steps,
    _check_changed_gradients,
    _check_rates,
    _check_buffers,
    _check_numbers,
    _check_noise,
)


def _same(pair: Pair) -> Certificate:
    """Return the figures of an equal training, with what they leave open."""
    text = _figures(pair)
    _, hidden = _left_open(pair)
    if hidden > _CLOSE:
        text += f"; compared only to within {math.expm1(hidden):.0%}: {pair.noise}"
    theirs, mine = (one.epoch_steps for one in pair.traces)
    if theirs and mine:
        if abs(math.log(mine / theirs)) > _RATE_TOLERANCE:
            text += "; " + _TEXTS["epoch"].format(mine=mine, theirs=theirs)
    elif (short := _short_step(pair)) is not None:
        rows = [step.rows for step in pair.steps[short]]
        text += "; " + _TEXTS["last batch"].format(step=short + 1, theirs=rows[0], mine=rows[1])
    return Certificate(Verdict.SAME, text)


def _left_open(pair: Pair) -> tuple[str, float]:
    """Return the quantity of which a comparison leaves the largest factor open, and the logarithm of the factor.

    A loss has no effect but through its gradient. A single step shows no scatter, so the noise floor stands for it.
    """
    reference, trace = pair.traces
    found = dict[str, float]()
    for name in pair.numbers:
        if name == LOSS and NORM in pair.numbers:
            continue
        each = pair.differences[name]
        moves = name == UPDATE and _is_early(reference) != _is_early(trace)  # with Adam's step counter
        scatter = statistics.stdev(each) if len(each) > 1 else reference.floor.get(name, 0.0)
        error = 0.0 if moves else scatter / math.sqrt(len(each))
        found[name] = abs(pair.mean(name)) + _ERRORS * error
    return max(found.items(), key=lambda item: item[1])


def _short_step(pair: Pair) -> int | None:
    """Return the index of the first step that is the short one of only one run; None if both have equal steps."""
    rows = [[step.rows for step in run] for run in zip(*pair.steps, strict=True)]
    if any(len(set(each)) > 2 for each in rows):  # batches by tokens
        return None
    short = [[one < statistics.median(each) for one in each] for each in rows]
    return next((at for at, (a, b) in enumerate(zip(*short, strict=True)) if a is not b), None)


def rows_factor(reference: TrainingTrace, trace: TrainingTrace, *, is_cut: bool = True) -> float:
    """Return the ratio of the rows per optimizer step; 1 if they are about equal.

    Args:
        is_cut: the micro-batches differ. A forward of as many rows as before then has packed rows, which are not counted.
    """
    mine, theirs = (statistics.median(step.rows for step in one.steps) for one in (trace, reference))
    if not mine or not theirs or (is_cut and mine * reference.iterations == theirs * trace.iterations):
        return 1.0
    return mine / theirs if abs(math.log(mine / theirs)) > math.log1p(_COARSE_TOLERANCE) else 1.0


def _wrong_rate(pairs: Iterable[tuple[TracedStep, TracedStep]]) -> tuple[int, float, float] | None:
    """Return (index of the step, reference's, candidate's) of the first other learning rate; None if all are equal."""
    for at, (theirs, mine) in enumerate(pairs):
        one, other = sorted(set(theirs.rates)), sorted(set(mine.rates))
        if len(one) != len(other):  # DeepSpeed may split groups, which repeats rates
            one, other = one[-1:], other[-1:]
        for a, b in zip(one, other, strict=False):
            if max(abs(a), abs(b)) > _TINY and abs(a - b) > _RATE_TOLERANCE * max(abs(a), abs(b)):
                return at, a, b
    return None


def _wrong_movement(pairs: Sequence[tuple[TracedStep, TracedStep]]) -> tuple[float, float] | None:
    """Return by how much the highest rate has moved, (reference's, candidate's), if a schedule of the loop differs.

    A rate that counts micro-batches may move by less than its tolerance in the first steps, and far apart later. A schedule
    that counts parts of a step is up to one step ahead or behind, so the reference's neighbouring steps are its rates too.
    """
    rates = [[max(step.rates, default=0.0) for step in run] for run in zip(*pairs, strict=True)]
    if not all(each[0] for each in rates):  # a warm-up from zero, which has been compared
        return None
    (before, theirs), (_, mine) = ([rate / each[0] - 1 for rate in each[-2:]] for each in rates)
    low, high = sorted((before, 2 * theirs - before))
    return None if low - _RATE_ROUNDING <= mine <= high + _RATE_ROUNDING else (theirs, mine)


def _wrong_later(reference: TrainingTrace, trace: TrainingTrace) -> tuple[int, float, float] | None:
    """Return (optimizer step, reference's, candidate's) of the first other learning rate that the schedules lead to.

    A schedule's length is rounded, so the reference's neighbouring intervals are its rates too.
    """
    first = [rate for step in reference.steps for rate in step.rates]  # a short schedule has come down by then
    least = _LATER_TOLERANCE * max([*first, *(high for _, high in reference.ahead)], default=0.0)
    for at, (step, (low, high), _) in enumerate(zip(AHEAD, trace.ahead, reference.ahead, strict=False)):
        near = reference.ahead[max(0, at - 1) : at + 2]
        lowest, highest = min(one for one, _ in near), max(one for _, one in near)
        if low > highest + least or high < lowest - least:
            return step, highest if low > highest else lowest, low if low > highest else high
    return None


def _differences(reference: TrainingTrace, trace: TrainingTrace, name: str) -> list[float]:
    """Return the logarithm of the ratio of each step; empty if a trace lacks the quantity."""
    found = []
    scale = max((abs(step.loss) for step in reference.counted if step.loss is not None), default=0.0)
    pairs = _compared(reference, trace)
    if name != UPDATE and _is_early(reference) != _is_early(trace):
        pairs = pairs[:1]  # Adam's step counter has led to other weights since
    for theirs, mine in pairs:
        a, b = _value(theirs, name), _value(mine, name)
        if theirs.skipped or a is None or b is None:
            continue
        if name == LOSS and (a <= 0 or b <= 0 or min(a, b) < _CLAMP * scale):
            found.append(_signed(a, b, scale))
        elif max(a, b) > _TINY:
            found.append(math.log(max(b, _CLAMP * a) / max(a, _CLAMP * b)))
    return found


def _signed(a: float, b: float, scale: float) -> float:
    """Return the difference of two losses of any sign, as the logarithm of a ratio."""
    share = (b - a) / max(abs(a), abs(b), 0.1 * scale, _SMALL_LOSS)
    return math.copysign(-math.log(max(_CLAMP, 1 - min(1.0, abs(share)))), share)


def _value(step: TracedStep, name: str) -> float | None:
    return {LOSS: step.loss, NORM: step.gradient_norm, UPDATE: step.update, BUFFERS: step.buffers}[name]


def _least(name: str, *traces: TrainingTrace) -> float:
    """Return the smallest tolerance of a quantity.

    Adam divides a gradient by its own size, so that the rounding of a gradient near zero shows in the update. In fp32 these
    differ by 0.1 % between stages 2 and 3, where loss and gradient norm agree to six digits (a PPO loop on two CPU ranks).
    Updates are therefore compared as in 16 bits.
    """
    if name == BUFFERS:
        return math.log1p(_COARSE_TOLERANCE)
    precisions = ["bf16"] if name == UPDATE else [one.precision for one in traces]
    return max(LEAST_TOLERANCE[precision] for precision in precisions)


def _paired(reference: TrainingTrace, trace: TrainingTrace) -> list[tuple[TracedStep, TracedStep]]:
    """Return the steps until the first one that only one run skipped, because its weights are one update behind since.

    Loss scales of one config differ by stage: after an overflow, stage 0 halves its own at once, and ZeRO at the second
    overflow (`hysteresis`).
    """
    both = zip(reference.steps, trace.steps, strict=False)
    return list(itertools.takewhile(lambda pair: pair[0].skipped == pair[1].skipped, both))


def _compared(reference: TrainingTrace, trace: TrainingTrace) -> list[tuple[TracedStep, TracedStep]]:
    """Return the steps until the first one on other rows, or all if the first is; weights have differed since."""
    pairs = _paired(reference, trace)
    return list(itertools.takewhile(lambda pair: _same_rows(*pair), pairs)) or pairs


def same_rows(one: TrainingTrace, other: TrainingTrace) -> bool:
    """Return True unless two runs are known to train on other rows from their first step on."""
    return all(_same_rows(*pair) for pair in _paired(one, other)[:1])


def _same_rows(one: TracedStep, other: TracedStep) -> bool:
    return abs(one.digest - other.digest) <= _SAME_ROWS * max(1.0, one.rows)


def same_weights(one: TrainingTrace, other: TrainingTrace) -> bool:
    """Return True unless the runs are known to begin with other weights."""
    if not one.initial or not other.initial:
        return True
    return math.dist(one.initial, other.initial) / math.sqrt(len(one.initial)) <= _SAME_INITIAL


def _is_early(trace: TrainingTrace) -> bool:
    """Return True if Adam's step counter is one ahead."""
    return trace.stage == 0 and trace.precision in ("bf16", "fp16")


def _counter_factor(step: int) -> float:
    """Return Adam's update with a step counter that is one ahead, divided by the right one."""

    def correction(count: int) -> float:
        return math.sqrt(1 - _BETAS[1] ** count) / (1 - _BETAS[0] ** count)

    return correction(step + 1) / correction(step)


def _figures(pair: Pair) -> str:
    steps = [(a, b) for a, b in _compared(*pair.traces) if not a.skipped]
    parts = []
    for name in pair.numbers:
        values = [(_value(b, name), _value(a, name)) for a, b in steps]
        seen = [each for each in values if None not in each]  # a norm may be seen in some steps only
        mine, theirs = (statistics.fmean(each) for each in zip(*seen, strict=True))  # type: ignore[arg-type]
        parts.append(f"{name} {mine:.4g} / {theirs:.4g}")
    if UPDATE in pair.numbers:
        moved = " (stage 0 counts Adam's steps one ahead)" * (_is_early(pair.reference) != _is_early(pair.trace))
        parts[-1] = f"update {pair.factor(UPDATE):.2f}x{moved}"
    steps_seen = max(len(pair.differences[name]) for name in pair.numbers)
    return ", ".join([*parts, "learning rate equal", counted(steps_seen, "step")])


# -- cause -------------------------------------------------------------------------------------------------------------
#
# Name the setting because of which a candidate differs, and the candidates that share it.

_STAGE = "zero_stage"
_FLAT_PARTS = (
    "from the same gradients; stage {} passes flat parts of the weights to the optimizer, which changes an optimizer that "
    "uses their shapes (Muon, Shampoo)"
)

_GROWING_LOSS = (
    "; it grows with the micro-batch, like a sum over its rows, or like a loss that the script divides by the accumulation "
    "although DeepSpeed does so"
)
_FULL_LOSS = (
    "; it grows with the accumulation: the gradients of the micro-batches are added up and not averaged. A Trainer does so if "
    "its model takes num_items_in_batch and ignores it: trainer.model_accepts_loss_kwargs = False before train() averages them"
)
# Measured: `register_output_backward_hooks` divides at every output, and a row of `data/deepspeed_faults.json` names it.
_DIVIDED_TWICE = (
    "; it shrinks with the accumulation, as if the gradient were divided by it twice: DeepSpeed does so for loss.backward() "
    "of a loss that the model returns beside its logits (engine.backward divides once)"
)


def _other_micro_batch(pair: Pair) -> str:
    return f"micro-batch {pair.candidate.micro_batch} instead of {pair.own.micro_batch}"


def _proportion(factor: float, own: Candidate, candidate: Candidate, with_micro: str, with_accumulation: str) -> str:
    """Return why a quantity grows with the micro-batch or with the accumulation; empty if it is proportional to neither."""
    times = math.log(candidate.micro_batch / own.micro_batch)
    if abs(math.log(factor) - times) < _PROPORTIONAL:
        return with_micro
    return with_accumulation if abs(math.log(factor) + times) < _PROPORTIONAL else ""


def _stage_cause(pair: Pair) -> tuple[str, str]:
    """Return the stage as cause, and why it changes a training; empty if both runs have one stage."""
    reference, trace = pair.traces
    backwards, partial = trace.iterations, (1, 2)  # stages that do not sum what several backwards give
    if trace.stage == reference.stage:
        return "", ""
    if backwards > trace.accumulation and (trace.stage in partial) != (reference.stage in partial):
        keeps = trace.stage if trace.stage in partial else reference.stage
        whose = "stage" if keeps == trace.stage else f"{pair.your} stage"
        if pair.candidate.offloaded or pair.own.offloaded:
            return _STAGE, f"with offload, {whose} {keeps} does not sum the {backwards} gradients of a step"
        return _STAGE, f"{whose} {keeps} keeps only the last of {backwards} gradients"
    if reference.stage == 0 and pair.is_users:
        return _STAGE, (
            f"stage {trace.stage} steps with its own copy of the gradients, on which changes by hand (clipping) have no "
            "effect; gradient_clipping in the DeepSpeed config works at every stage"
        )
    return _STAGE, f"stage {trace.stage} instead of {reference.stage}"


class Certifier:
    """Compares every trial of a study with its reference, so that no candidate wins that trains something else.

    The reference is the first trace of the user's own config. A named model has no config of the user, so its reference
    is the first candidate of which a whole step was traced.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        script = job.script
        self.own = own_candidate(script) if script is not None and script.profile.is_known else None
        self._reference: TrainingTrace | None = None  # trace of `own`

    @classmethod
    def of(cls, job: Job, records: Iterable[Record]) -> Certifier:
        """Return the certifier of a study with these trials."""
        made = cls(job)
        for record in records:
            if record.outcome is not None and record.outcome.ok:
                made.learn(record.candidate, record.outcome, record.role)
        return made

    def learn(self, candidate: Candidate, outcome: Outcome, role: str) -> None:
        """Take the reference from a trial; a repeated run of the same config raises the noise floor."""
        trace, reference = outcome.trace, self._reference
        if trace is None or role == RESUME or not self._is_whole(candidate, trace):
            return
        if self.own is None:
            self.own = candidate
        if candidate != self.own:
            return
        if reference is None:
            self._reference = trace
        elif trace.steps != reference.steps:
            self._reference = with_floor(reference, trace)

    def _is_whole(self, candidate: Candidate, trace: TrainingTrace) -> bool:
        """Return False if a rank of a named model ran only some micro-batches of a step, to extrapolate the rest."""
        return self._job.script is not None or trace.iterations == candidate.accumulation

    def certificate(self, candidate: Candidate, trace: TrainingTrace | None) -> Certificate:
        """Return the verdict on a candidate's trace."""
        if trace is None or not self._is_whole(candidate, trace):
            return Certificate(Verdict.NOT_COMPARED, "no whole optimizer step of it was traced")
        if self._reference is None or self.own is None:
            whose = "the reference" if self._job.script is None else "your own config"
            return Certificate(Verdict.NOT_COMPARED, f"{whose} was not measured")
        return compare(self._reference, self.own, trace, candidate, is_users=self._job.script is not None)

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

    def length_lines(self, trace: TrainingTrace) -> list[str]:
        """Return what ends a loop after another number of optimizer steps than under the reference."""
        return length_lines(self._reference, trace) if self._reference is not None else []


def length_lines(reference: TrainingTrace, trace: TrainingTrace) -> list[str]:
    """Return what ends a loop after another number of optimizer steps than under the reference."""
    own = reference.loop_ends
    found = {where: now for where, now in trace.loop_ends.items() if where in own}
    return [
        f"{where} counts iterations of your loop: it ends after {now:.4g} optimizer steps instead of {own[where]:.4g}. Multiply "
        f"the limit by {own[where] / now:.4g}"
        for where, now in found.items()
        if abs(math.log(now / own[where])) > _RATE_TOLERANCE
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
    if all(len(rates) == 1 for rates in each):  # a schedule has moved on since
        pairs = zip(reference.counted[:1], trace.counted[:1], strict=False)
        if (wrong := _wrong_rate(pairs)) is not None:
            return f"its learning rate is {wrong[2]:.3g} instead of {wrong[1]:.3g} at its first start"
    return ""


def trains_otherwise(job: Job, records: Sequence[Record]) -> Callable[[Candidate], bool]:
    """Return a test for candidates that train something else than the user's config, by what a study has traced."""
    certifier = Certifier.of(job, records)
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
    certifier = Certifier.of(job, records)
    trace = winner.outcome.trace if winner.outcome is not None else None
    found = certifier.certificate(winner.candidate, trace)
    lengths = certifier.length_lines(trace) if trace is not None else []
    return [found.line, *lengths]
