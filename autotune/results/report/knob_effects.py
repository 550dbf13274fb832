"""Knob effects in paired trials, and verdicts inferred for untried candidates."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autotune.predict.predictor import Predictor
from autotune.predict.step_time import host_limit_bytes
from autotune.problem.candidate import ACCUMULATION, MICRO_BATCH, RUNG_KNOBS, Candidate, Value, is_read
from autotune.problem.hardware import Hardware
from autotune.problem.outcome import Measurement
from autotune.problem.space import SearchSpace
from autotune.results.report.model import Cell, KnobEffects, KnobPair, Status, Step, Trial
from autotune.search.leaderboard import SpeedRatio
from autotune.search.pruning import Dominance, DominanceRules

# -- paired knob effects -----------------------------------------------------------------------------------------------
#
# Effects of a knob with all else equal, and of the winner's neighbours: pairs of trials, without a model.

BROAD = 0.05  # share; a neighbour that is slower by less counts as equal
TRADED = "micro-batch for accumulation, same batch"  # both change, and the global batch does not
Measured = Mapping[Candidate, Measurement]


def changed_knob(one: Candidate, other: Candidate) -> str | None:
    """Return the only knob that differs between two candidates. Knobs that only one of them reads because of it are ignored.

    An offload is not: a stage that cannot offload is compared with another one without offload.
    """
    mine, theirs = ({**dict.fromkeys(_OFFLOADS, "none"), **candidate.as_dict} for candidate in (one, other))
    different = {name for name in mine.keys() & theirs.keys() if mine[name] != theirs[name]}
    if different == set(RUNG_KNOBS) and one.rows_per_rank == other.rows_per_rank:
        different = {TRADED}
    if len(different) != 1:
        return None
    only = mine.keys() ^ theirs.keys()
    if any(is_read(name, theirs if name in mine else mine) for name in only):
        return None
    return different.pop()


def value_of(candidate: Candidate, knob: str) -> Value:
    """Return the candidate's value for a name from `changed_knob`."""
    return candidate.micro_batch if knob == TRADED else candidate.as_dict.get(knob, "none")


def value_text(value: Value) -> str:
    """Format a knob's value for tables."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, int | float) and abs(value) >= 100_000:
        return f"{value:.3g}"
    return str(value)


def paired(measured: Measured) -> tuple[KnobPair, ...]:
    """Return every change of a knob that pairs of trials show, largest effect on speed first."""
    found: dict[tuple[str, Value, Value], list[tuple[SpeedRatio, float]]] = defaultdict(list)
    for one, other, knob in _pairs(list(measured)):
        first, second = sorted((one, other), key=lambda c: _order(value_of(c, knob)))
        a, b = measured[first], measured[second]
        change = SpeedRatio.of(b, a), float(b.peak_bytes - a.peak_bytes)
        found[knob, value_of(first, knob), value_of(second, knob)].append(change)
    made = []
    for (knob, before, after), differences in found.items():
        ratios, sizes = [ratio for ratio, _ in differences], [size for _, size in differences]
        speeds = [ratio.times - 1 for ratio in ratios]
        low, high = statistics.median(one.low for one in ratios) - 1, statistics.median(one.high for one in ratios) - 1
        made.append(
            KnobPair(
                knob,
                f"{value_text(before)} → {value_text(after)}",
                len(differences),
                statistics.median(speeds),
                (min(speeds), max(speeds)),
                statistics.median(sizes),
                (min(sizes), max(sizes)),
                is_noise=min(low, *speeds) <= 0 <= max(high, *speeds),
            )
        )
    return tuple(sorted(made, key=lambda pair: (pair.is_noise, -abs(pair.speed), pair.knob, pair.change)))


def _pairs(candidates: Sequence[Candidate]) -> Iterator[tuple[Candidate, Candidate, str]]:
    """Yield candidates that differ in one knob. Those that agree in all others share a key, so that few are compared."""
    names = {name for candidate in candidates for name in candidate.as_dict}
    for knob in (*sorted(names), TRADED):
        left_out = set(RUNG_KNOBS) if knob == TRADED else {knob}
        having = [candidate for candidate in candidates if left_out <= candidate.as_dict.keys()]
        shared = (_in_all(having) if knob in _GATES else names) - left_out
        alike: dict[tuple[object, ...], list[Candidate]] = defaultdict(list)
        for candidate in having:
            alike[tuple(candidate.get(name) for name in sorted(shared))].append(candidate)
        for group in alike.values():
            for i, one in enumerate(group):
                yield from ((one, other, knob) for other in group[i + 1 :] if changed_knob(one, other) == knob)


_OFFLOADS = ("offload_optimizer", "offload_param")
_GATES = ("zero_stage", *_OFFLOADS)  # they decide whether other knobs are read


def _in_all(candidates: Sequence[Candidate]) -> set[str]:
    """Return the knobs that every candidate has."""
    return set.intersection(*(set(candidate.as_dict) for candidate in candidates)) if candidates else set()


def _order(value: Value) -> tuple[bool, float, str]:
    """Return a sort key: `none` before `cpu`, numbers by size."""
    number = float(value) if isinstance(value, int | float) else 0.0
    return isinstance(value, str) and value != "none", number, str(value)


def steps_around(
    winner: Candidate,
    measured: Measured,
    trials: Mapping[Candidate, Trial],
    space: SearchSpace | None,
    allowed: Callable[[Candidate], bool],
    predictor: Predictor | None,
) -> tuple[Step, ...]:
    """Return every candidate one step of one knob from the winner: measured, failed or, with a predictor, predicted.

    Args:
        allowed: returns True if the space has such a candidate for the job.
    """
    if winner not in measured:
        return ()
    found: list[Step] = []
    best = measured[winner]
    near = {**_near(winner, space, allowed), **{c: k for c in trials if (k := changed_knob(winner, c))}}
    untried = [candidate for candidate in near if candidate not in trials]
    known: dict[Candidate, Judgement] = {}
    if predictor and untried:
        ran_out = [candidate for candidate, trial in trials.items() if trial.lacks_memory_on(predictor.hardware)]
        known = judge_candidates([winner, *untried], ran_out, predictor.hardware, predictor)
    for candidate, knob in near.items():
        change = f"{value_text(value_of(winner, knob))} → {value_text(value_of(candidate, knob))}"
        trial = trials.get(candidate)
        if trial is not None:
            one = measured.get(candidate)
            ratio = SpeedRatio.of(one, best) if one else None
            size = float(one.peak_bytes - best.peak_bytes) if one else None
            speed = ratio.times - 1 if ratio else None
            noise = ratio is not None and ratio.is_noise
            found.append(Step(knob, change, str(candidate), trial.status, speed, size, trial.number, is_noise=noise))
        elif known:
            judged, own = known[candidate], known[winner]
            # a config that does not fit gains nothing
            speed = judged.samples_per_second / own.samples_per_second - 1 if judged.cell is Cell.PREDICTED else None
            size = judged.needed_bytes - own.needed_bytes
            found.append(Step(knob, change, str(candidate), None, speed, size, cell=judged.cell))
    return tuple(sorted(found, key=lambda step: (step.status is None, step.knob, step.change)))


def _near(winner: Candidate, space: SearchSpace | None, allowed: Callable[[Candidate], bool]) -> dict[Candidate, str]:
    """Return the neighbours in the space, with the knob of each.

    Neighbours have any other value of a choice, or the next value of an ordered knob.
    """
    found: dict[Candidate, str] = {}
    for name, domain in (space.knobs if space else {}).items():
        if name not in winner.as_dict:
            continue
        others = [winner.but(**{name: value}) for value in _next(winner.as_dict[name], domain.values)]
        if name == MICRO_BATCH:
            whole = winner.rows_per_rank
            sizes = _next(winner.micro_batch, [size for size in domain.values if whole % int(size) == 0])
            others += [winner.but(**{MICRO_BATCH: size, ACCUMULATION: whole // int(size)}) for size in sizes]
        for other in others:
            knob = changed_knob(winner, other)
            if knob is not None and allowed(other):
                found[other] = knob
    return found


def _next(value: Value, values: Sequence[Value]) -> list[Value]:
    """Return the values one step away."""
    if not all(isinstance(one, int | float) and not isinstance(one, bool) for one in (value, *values)):
        return [one for one in values if one != value]
    ordered = sorted({value, *values}, key=float)
    at = ordered.index(value)
    return [*ordered[max(0, at - 1) : at], *ordered[at + 1 : at + 2]]


_TELLING = (Status.FITS, Status.ABOVE, Status.RAN_OUT)  # other trials failed or were interrupted, so they have no speed


def basin(steps: Sequence[Step]) -> str:
    """Describe the winner's measured neighbours: a sharp peak or a broad basin."""
    tried = [step for step in steps if step.status in _TELLING]
    if not tried:
        other = sum(step.status is not None for step in steps)
        what = "measured or ran out of memory" if other else "tried"
        rest = f" ({other} failed or {'was' if other == 1 else 'were'} cut short)" if other else ""
        return f"No neighbour of the winner was {what}{rest}: whether it is a sharp peak is not known."
    good = [
        step
        for step in tried
        if step.status is Status.FITS and step.speed is not None and (step.speed > -BROAD or step.is_noise)
    ]
    out = sum(step.status in (Status.RAN_OUT, Status.ABOVE) for step in tried)
    over = f"; {out} of them need{'s' if out == 1 else ''} too much memory" if out else ""
    are = "neighbour is" if len(tried) == 1 else "neighbours are"
    count = f"{len(good)} of {len(tried)} tried {are} within {BROAD:.0%} of the winner's speed or within noise, and fit{over}."
    shape = "A broad basin" if len(good) >= len(tried) / 2 else "A sharp peak" if not good else "A narrow basin"
    return f"{shape}: {count}"


def effects_of_knobs(
    winner: Candidate | None,
    measured: Measured,
    trials: Mapping[Candidate, Trial],
    space: SearchSpace | None,
    allowed: Callable[[Candidate], bool],
    predictor: Predictor | None,
) -> KnobEffects:
    """Return the effects of knobs in pairs, and around the winner if there is one."""
    pairs = paired(measured)
    if winner is None:
        return KnobEffects(pairs)
    steps = steps_around(winner, measured, trials, space, allowed, predictor)
    return KnobEffects(pairs, steps, basin(steps))


# -- inferred verdicts -------------------------------------------------------------------------------------------------
#
# Conclusions about untried candidates, from those that ran out of memory and from the predictor.


@dataclass(frozen=True)
class Judgement:
    """Conclusion about a candidate without a trial of its own. The figures are 0 without a predictor."""

    cell: Cell  # RULED_OUT, TOO_MUCH, PREDICTED or, without a predictor, UNKNOWN
    culprit: Candidate | None  # of an excluded candidate: one that ran out of memory and needs no more
    needed_bytes: float = 0.0
    samples_per_second: float = 0.0
    lacks_host_memory: bool = False


def judge_candidates(
    candidates: Sequence[Candidate], ran_out: Collection[Candidate], hardware: Hardware, predictor: Predictor | None
) -> dict[Candidate, Judgement]:
    """Judge candidates without a trial.

    Args:
        ran_out: candidates that ran out of a device's memory.
        predictor: calibrated.
    """
    every = list(dict.fromkeys([*candidates, *ran_out]))
    dominance = Dominance(
        every, DominanceRules.for_device(hardware.device, hardware.count, predictor.trace if predictor else None)
    )
    culprits: dict[Candidate, Candidate] = {}
    for candidate in ran_out:
        for i in np.flatnonzero(dominance.at_least_as_large(candidate)):
            culprits.setdefault(every[i], candidate)
    if predictor is None or not candidates:
        return {
            one: Judgement(Cell.RULED_OUT if one in culprits else Cell.UNKNOWN, culprits.get(one)) for one in candidates
        }
    table = predictor.table(candidates)
    host = table.host * hardware.count / hardware.nodes > host_limit_bytes(hardware)
    columns = (predictor.fits(table).tolist(), table.needed.tolist(), table.samples.tolist(), host.tolist())
    found = {}
    for candidate, fits, *figures in zip(candidates, *columns, strict=True):
        cell = Cell.RULED_OUT if candidate in culprits else Cell.PREDICTED if fits else Cell.TOO_MUCH
        found[candidate] = Judgement(cell, culprits.get(candidate), *figures)
    return found
