"""Report data of a study."""

from __future__ import annotations

import dataclasses
import json
import shlex
import statistics
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from autotune.executors.cluster.transports import hostfile_of
from autotune.masking import MASK, masked, masked_data
from autotune.predict.predictor import SIGMAS, Prediction, Predictor
from autotune.problem.candidate import Candidate, Value
from autotune.problem.hardware import Hardware
from autotune.problem.job import Job
from autotune.problem.outcome import Measurement, Outcome, OutcomeKind
from autotune.problem.space import SearchSpace
from autotune.results.console import (
    batch_size_note,
    code_legend,
    config_sentence,
    missing_memory,
    no_winner_lines,
    own_line,
    shortened,
    train_with,
)
from autotune.results.export import environment_of, lossy_settings, training_changes
from autotune.results.report.knob_effects import Judgement, effects_of_knobs, judge_candidates, value_text
from autotune.results.report.model import (
    Accuracy,
    Bar,
    Bars,
    Cell,
    MeasuredGain,
    MemoryMap,
    Square,
    Status,
    StudyReport,
    TimeUse,
    Trial,
    TrialPrediction,
    WinnerSummary,
)
from autotune.search.certificate import certificate_lines
from autotune.search.leaderboard import SpeedRatio, StudyFacts
from autotune.search.study import StudyStore
from autotune.search.trials import AS_IS, RESUME, SEARCH, TRAINING, VERIFY, Record, resumed_peak_bytes
from autotune.util.units import format_bytes
from autotune.workers.launchers import variables_of

# -- report data of a study --------------------------------------------------------------------------------------------
#
# Build the content of a study's page.

MOST_TEXT = 400  # characters of a failure's message; the log has the rest


@dataclass(frozen=True)
class SearchedSpace:
    """A study's space and its candidates. A later version may be unable to read it, and passes None instead."""

    space: SearchSpace
    candidates: tuple[Candidate, ...]


def study_report(
    store: StudyStore, searched: SearchedSpace | None, predictor: Predictor | None, why_none: str
) -> StudyReport:
    """Return the full content of a study's page.

    Args:
        predictor: a fresh one for the study's job and hardware, or None.
        why_none: reason for a missing predictor.
    """
    records, hardware, job, facts = store.records(), store.hardware, store.job, store.facts()
    winner = facts.winner
    shown_memory = of_interest(facts)
    expected, broken_down = (
        forecasts(records, predictor, set(shown_memory.values())) if predictor is not None else ({}, {})
    )
    trials = tuple(_trial(record, facts, hardware, expected.get(record.number)) for record in records)
    by_candidate: dict[Candidate, list[Trial]] = {}
    for record, trial in zip(records, trials, strict=True):
        if record.candidate.knobs:
            by_candidate.setdefault(record.candidate, []).append(trial)
    candidates = searched.candidates if searched else ()
    known = set(candidates)
    varying, constant = _knobs([record.candidate for record in records])
    return StudyReport(
        study=store.name,
        model=job.model.name,
        job=job.summary,
        hardware=hardware,
        objective=str(store.attributes.get("objective", "samples per second, all ranks")),
        verdict=_verdict(store, facts, records),
        trials=trials,
        varying=varying,
        constant=constant,
        memory=tuple(memory_bars(name, one, records, broken_down, hardware) for name, one in shown_memory.items()),
        map=memory_map(by_candidate, candidates, hardware, predictor),
        clock=_clock(store, records),
        mattered=effects_of_knobs(
            winner.candidate if winner else None,
            _searched_alike(records),
            {candidate: _telling(found) for candidate, found in by_candidate.items()},
            searched.space if searched else None,
            known.__contains__,
            predictor,
        ),
        accuracy=accuracy(trials),
        no_forecast=why_none if predictor is None else "; ".join(predictor.notes()),
        skips=_skips(store, known),
        facts=_facts(store),
        commands=store.commands,
        space=store.space_text,
        fingerprint=store.fingerprint,
        forced=tuple(
            f"{one.get('at', '')}: {'; '.join(one.get('differences', []))}"
            for one in store.attributes.get("forced", [])
        ),
    )


# -- trials ----------------------------------------------------------------------------------------------------------------


def _status(outcome: Outcome, hardware: Hardware) -> Status:
    if outcome.measurement is not None:
        return Status.FITS if outcome.measurement.peak_bytes <= hardware.ceiling_bytes else Status.ABOVE
    if outcome.kind.is_oom:
        return Status.RAN_OUT
    if outcome.kind is OutcomeKind.OK:
        return Status.FITS  # it resumed from a checkpoint
    return Status.FAILED if outcome.kind.is_attributable_to_candidate else Status.UNDECIDED


def _trial(record: Record, facts: StudyFacts, hardware: Hardware, expected: TrialPrediction | None = None) -> Trial:
    label = str(record.candidate) or AS_IS
    outcome, knobs = record.outcome, record.candidate.as_dict
    if outcome is None:
        return Trial(record.number, label, knobs, record.role, Status.RUNNING, "running", why=record.note)
    measured = outcome.measurement
    what_happened = (outcome.evidence if outcome.kind.is_oom else outcome.reason) or outcome.reason
    return Trial(
        number=record.number,
        label=label,
        knobs=knobs,
        role=record.role,
        status=_status(outcome, hardware),
        kind=outcome.kind.value,
        phase="" if measured else outcome.phase.value,
        rank=outcome.rank,
        samples_per_second=measured.samples_per_second if measured else None,
        tokens_per_second=measured.tokens_per_second if measured else None,
        step_seconds=measured.step_seconds if measured else None,
        spread=measured.step_seconds_spread / measured.step_seconds if measured else None,
        peak_bytes=measured.peak_bytes if measured else outcome.peak_bytes,
        missing_bytes=outcome.missing_bytes,
        capacity_bytes=outcome.device_capacity_bytes,
        retries=measured.alloc_retries if measured else 0,
        seconds=outcome.seconds,
        why=shortened(record.note, MOST_TEXT),
        happened="" if measured or outcome.ok else shortened(what_happened, MOST_TEXT),
        log="" if measured else outcome.log or "",
        forecast=expected,
        remark=facts.remark(record.number),
    )


def _telling(found: Sequence[Trial]) -> Trial:
    """Return the most informative trial of a candidate: a measurement, else an attributable failure; the latest of equals."""
    return max(found, key=lambda trial: (trial.measured, trial.status is not Status.UNDECIDED, trial.number))


def _skips(store: StudyStore, known: AbstractSet[Candidate]) -> tuple[tuple[str, int], ...]:
    """Return (reason for not trying candidates, count), the rest last. Together with the tried ones they are the whole space."""
    told = sorted(store.skips.items(), key=lambda item: -item[1])
    untried = len(known - {record.candidate for record in store.records()})
    rest = untried - sum(count for _, count in told)
    ended = store.calls()[-1].ended if store.calls() else ""
    why = (
        f"the search ended first ({ended}), the gain predicted was too small, or it cannot be had on this machine"
        if ended
        else "not had its turn yet"
    )
    return (*told, *([(why, rest)] if rest > 0 else []))


def _searched_alike(records: Sequence[Record]) -> dict[Candidate, Measurement]:
    """Return the measurements of the search.

    Verification runs later and more carefully, which would favour verified candidates.
    """
    return {
        record.candidate: record.outcome.measurement
        for record in records
        if record.outcome and record.outcome.measurement and record.role == SEARCH and record.candidate.knobs
    }


def _knobs(candidates: Sequence[Candidate]) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """Return (varying knobs, constant knobs with their value). A knob that only some candidates have varies."""
    values: dict[str, set[Value | None]] = {}
    having = [candidate for candidate in candidates if candidate.knobs]
    for name in {name for candidate in having for name in candidate.as_dict}:
        values[name] = {candidate.get(name) for candidate in having}
    constant = {name: next(iter(found)) for name, found in values.items() if len(found) == 1}
    varying = tuple(name for name in sorted(values) if name not in constant)
    return varying, tuple((name, value_text(value)) for name, value in sorted(constant.items()) if value is not None)


# -- the verdict -----------------------------------------------------------------------------------------------------------


def _verdict(store: StudyStore, facts: StudyFacts, records: list[Record]) -> WinnerSummary:
    winner = facts.winner
    measured = winner.outcome.measurement if winner is not None and winner.outcome is not None else None
    if winner is None or measured is None:
        return _no_winner(store, facts)
    job, verified = store.job, facts.verified
    config = (store.folder or Path()) / f"{store.name}.json"
    exported = json.dumps(masked_data(winner.candidate.ds_config(job)), indent=2)
    if job.script is not None:
        given = (store.threads, environment_of(store, winner.candidate))
        nodes = store.hardware.nodes
        hostfile = hostfile_of(store.folder or Path())
        python = str(store.python) if store.python else None
        about = (winner.candidate, job, store.name, config, *given)
        how = train_with(*about, nodes=nodes, hostfile=hostfile, python=python)
        commands, instead, hints = how.commands, how.instead, how.hints
    else:
        watched = ["autotune", "launch", store.name, "--", "train.py", "--deepspeed", str(config)]
        commands = (
            ("your training script, watched", shlex.join(watched)),
            (
                "the config for Trainer (or accelerate, sbatch)",
                f"autotune export {shlex.quote(store.name)} --format hf",
            ),
        )
        instead, hints = "", ()
    variables = variables_of(winner.candidate, store.threads, environment_of(store, winner.candidate))
    return WinnerSummary(
        winner=_trial(winner, facts, store.hardware),
        sentence=config_sentence(winner.candidate, job, store.hardware),
        legend=code_legend(winner.candidate),
        own=own_line(facts, job),
        comparison=tuple(facts.comparison()),
        head="The fastest config that fits" if verified else "The fastest config that fits so far, not verified yet",
        verified=verified,
        checks=_checks(winner, records, store.hardware, store.job),
        gains=_gains(facts, job),
        run_now=(*commands, ("DeepSpeed config", exported)),
        instead=instead,
        needs=tuple(
            dict.fromkeys([*(hint.strip() for hint in hints), *training_changes(winner.candidate, job, variables)])
        ),
        mfu=measured.mfu,
    )


def _no_winner(store: StudyStore, facts: StudyFacts) -> WinnerSummary:
    # a masked command would not run
    again = tuple(("go on", command) for command in store.commands[-1:] if MASK not in command)
    own = own_line(facts, store.job)
    if facts.best is not None:
        why = facts.call.ended
        said = f"The search ended: {why}." if why else "The search was stopped before it ended."
        return WinnerSummary(None, "No winner yet.", own=own, lines=(said,), run_now=again)
    first, *lines = no_winner_lines(facts, store.job, store.hardware)
    head, _, rest = first.partition(": ")
    return WinnerSummary(
        None, f"{head[0].upper()}{head[1:]}.", own=own, lines=(*filter(None, [rest]), *lines), run_now=again
    )


def _checks(winner: Record, records: Sequence[Record], hardware: Hardware, job: Job) -> tuple[str, ...]:
    assert winner.outcome is not None
    assert winner.outcome.measurement is not None
    measured = winner.outcome.measurement
    free = hardware.capacity_bytes - measured.peak_bytes
    lines = [
        f"Verified in trial {winner.number}: a fresh process, whole steps, an evaluation's forward and the gathering of a save."
        if winner.role == VERIFY
        else "Not verified: the budget or the call ended first. Run the same command again to verify it.",
        f"Leaves {format_bytes(free)} of {format_bytes(hardware.capacity_bytes)} free "
        f"({free / hardware.capacity_bytes:.0%}; asked for: {hardware.headroom:.0%}).",
        f"{measured.alloc_retries or 'No'} allocator retries.",
    ]
    resumed = [r.outcome for r in records if r.role == RESUME and r.candidate == winner.candidate and r.outcome]
    if not resumed:
        lines.append("Resuming from a checkpoint was not tested.")
    elif resumed[-1].ok and resumed[-1].peak_bytes is not None:
        lines.append(f"Resumes from a checkpoint, at a peak of {format_bytes(resumed[-1].peak_bytes)}.")
    elif not resumed[-1].ok:
        lines.append(f"It is not known if it resumes from a checkpoint: {shortened(resumed[-1].reason, MOST_TEXT)}")
    if measured.extrapolated:
        lines.append("Its step is extrapolated from a shortened accumulation.")
    lines += [f"{line[0].upper()}{line[1:]}." for line in certificate_lines(job, list(records), winner)]
    lines += [f"It {line}." for line in lossy_settings(winner.candidate, job)]
    if measured.clock_limits:
        median = f"; its median was {measured.sm_clock_mhz} MHz" if measured.sm_clock_mhz else ""
        lines.append(f"The driver limited the GPU clock ({', '.join(measured.clock_limits)}){median}.")
    return tuple(lines)


def _gains(facts: StudyFacts, job: Job) -> tuple[MeasuredGain, ...]:
    """Return the gains over the user's own config, the next best and the slowest that fits."""
    found: list[MeasuredGain] = []
    if facts.own is not None and facts.own_ratio is not None and facts.winner is not None:
        own = facts.own.candidate
        found.append(_gain(AS_IS, own, facts.own_ratio, batch_size_note(own, facts.winner.candidate, job)))
    if (rival := facts.next_best) is not None:
        beyond = " that is not tied" if facts.tied else ""
        found.append(_gain(f"the next best{beyond}", rival.candidate, rival.ratio))
    if len(facts.slower) > 1:
        slowest, fit = facts.slower[-1], 1 + len(facts.tied) + len(facts.slower)
        found.append(_gain(f"the slowest of {fit} measured that fit", slowest.candidate, slowest.ratio))
    return tuple(found)


def _gain(over: str, other: Candidate, ratio: SpeedRatio, detail: str = "") -> MeasuredGain:
    return MeasuredGain(over, str(other) or AS_IS, ratio.times, (ratio.low, ratio.high), detail.strip(" ;"))


# -- time, facts -----------------------------------------------------------------------------------------------------------


def _clock(store: StudyStore, records: Sequence[Record]) -> TimeUse:
    names = (
        "measured steps of trials that ran",
        "starting and warming up engines of trials that ran",
        "trials that ran out of memory",
        "trials that failed or were cut short",
        "verifying and resuming the winner",
    )
    spent = dict.fromkeys(names, 0.0)
    for record in records:
        outcome = record.outcome
        if outcome is None or record.role == TRAINING:
            continue
        if record.role in (VERIFY, RESUME):
            spent[names[4]] += outcome.seconds
        elif outcome.measurement is not None:
            spent[names[0]] += outcome.seconds - outcome.outside_seconds
            spent[names[1]] += outcome.outside_seconds
        else:
            spent[names[2] if outcome.kind.is_oom else names[3]] += outcome.seconds
    calls = tuple(
        (call.started, call.used_seconds, call.budget_seconds, call.ended or "not ended") for call in store.calls()
    )
    other = sum(call[1] for call in calls) - sum(spent.values())
    parts = [*spent.items(), ("between trials: imports, choosing, a script's first run", max(0.0, other))]
    return TimeUse(calls, tuple((name, seconds) for name, seconds in parts if seconds > 0))


def _facts(store: StudyStore) -> tuple[tuple[str, str], ...]:
    hardware, job = store.hardware, store.job
    return (
        ("devices", str(hardware)),
        ("main memory", format_bytes(hardware.host_memory_bytes)),
        ("a winner leaves free", f"{hardware.headroom:.0%} of {format_bytes(hardware.capacity_bytes)}"),
        ("ranks, and CPU threads of each", f"{job.ranks}, {store.threads}"),
        *([("parameters of the model", f"{job.model.parameters:,}")] if job.model.parameters else []),
        ("job", job.summary),
        *((f"version of {name}", version) for name, version in store.versions.items()),
        *(sorted({**store.fingerprint.get("environment", {}), **hardware.environment}.items())),
    )


# -- forecasts ---------------------------------------------------------------------------------------------------------
#
# Forecast of each trial from earlier trials, and the forecasts' errors.
#
# Predictions are not stored. They are recomputed from the trace, with a predictor that observes the trials in order.
# The predictor is refitted only before the trials of `_refits`, as a fit costs as much as many predictions. A trial's
# forecast uses earlier trials only.


def _refits(count: int) -> list[int]:
    """Return 0, 1, 2, 3, 4, 6, 9, 13, …: each 1.5 times the one before."""
    at, found = 0, []
    while at < count:
        found.append(at)
        at = max(at + 1, at * 3 // 2)
    return found


def forecasts(
    records: Sequence[Record], predictor: Predictor, explained: Collection[Candidate]
) -> tuple[dict[int, TrialPrediction], dict[Candidate, Prediction]]:
    """Return (forecast by trial number, breakdown before the first trial of each candidate in `explained`).

    The predictor has observed all trials afterwards.
    """
    told = [
        record for record in records if record.outcome is not None and record.role != RESUME and record.candidate.knobs
    ]
    found: dict[int, TrialPrediction] = {}
    broken_down: dict[Candidate, Prediction] = {}
    starts = _refits(len(told))
    for start, end in pairwise([*starts, len(told)]):
        block = told[start:end]
        candidates = [record.candidate for record in block]
        table = predictor.table(candidates)
        fits = predictor.fits(table)
        for i, record in enumerate(block):
            spread = float(np.exp(SIGMAS * table.step_sigma[i]))
            peak, step, sigma = float(table.peak[i]), float(table.step[i]), float(table.peak_sigma[i])
            found[record.number] = TrialPrediction(
                peak,
                (max(0.0, peak - SIGMAS * sigma), peak + SIGMAS * sigma),
                step,
                (step / spread, step * spread),
                bool(fits[i]),
            )
        for candidate in dict.fromkeys(candidates):
            if candidate in explained and candidate not in broken_down:
                broken_down[candidate] = predictor.predict(candidate)
        for record in block:
            assert record.outcome is not None
            predictor.observe(record.candidate, record.outcome)
    return found, broken_down


def accuracy(trials: Sequence[Trial]) -> Accuracy | None:
    """Return the error over each config's first trial, as later ones are no longer unseen. None without a measurement."""
    firsts: dict[str, Trial] = {}
    for trial in trials:
        if trial.forecast is not None:
            firsts.setdefault(trial.label, trial)
    memory, step, memory_inside, step_inside = [], [], [], []
    for trial in firsts.values():
        expected, peak, seconds = trial.forecast, trial.peak_bytes, trial.step_seconds
        if expected is None or peak is None or seconds is None:
            continue
        memory.append(abs(expected.peak_bytes / peak - 1))
        step.append(abs(expected.step_seconds / seconds - 1))
        memory_inside.append(expected.peak_interval[0] <= peak <= expected.peak_interval[1])
        step_inside.append(expected.step_interval[0] <= seconds <= expected.step_interval[1])
    if not memory:
        return None
    expected_to_fit = [trial for trial in firsts.values() if trial.forecast and trial.forecast.fits]
    return Accuracy(
        len(memory),
        statistics.median(memory),
        statistics.median(step),
        sum(memory_inside) / len(memory),
        sum(step_inside) / len(step),
        len(expected_to_fit),
        sum(trial.status is Status.RAN_OUT for trial in expected_to_fit),
    )


# -- memory bars -------------------------------------------------------------------------------------------------------
#
# Memory of a page's main configs by content: as predicted, and as a trial can separate it.


def of_interest(facts: StudyFacts) -> dict[str, Candidate]:
    """Return the configs whose memory is shown: the winner, the next best that fits, and the probe run's."""
    found: dict[str, Candidate] = {}
    if facts.winner is not None:
        found["winner"] = facts.winner.candidate
        if rivals := (*facts.faster, *facts.tied, *facts.slower):
            found["runner-up"] = rivals[0].candidate
    elif facts.best is not None:
        found["fastest so far"] = facts.best.candidate
    if facts.own is not None and facts.own.candidate not in found.values():
        found[AS_IS] = facts.own.candidate
    if not found and facts.closest is not None:  # nothing fits
        found["nearest"] = facts.closest.candidate
    return found


def memory_bars(
    name: str,
    candidate: Candidate,
    records: Sequence[Record],
    broken_down: Mapping[Candidate, Prediction],
    hardware: Hardware,
) -> Bars:
    """Return the predicted and measured memory of a candidate as bars."""
    bars: list[Bar] = []
    if candidate in broken_down:
        bars.append(predicted_bar(broken_down[candidate], hardware))
    mine = [
        record.outcome
        for record in records
        if record.candidate == candidate and record.outcome and record.role != RESUME
    ]
    measured = [(o.measurement.peak_bytes, o.measurement) for o in mine if o.measurement]
    if measured:
        bars.append(_measured_bar(max(measured, key=lambda pair: pair[0])[1], hardware))
    elif out := [o for o in mine if o.kind.is_oom]:
        needed = float(out[-1].device_capacity_bytes or hardware.capacity_bytes)
        parts = (("all there was", needed), ("more that was asked for", float(out[-1].missing_bytes or 0)))
        bars.append(Bar("measured", parts, missing_memory(out[-1], hardware)))
    if measured and (resumed_bytes := resumed_peak_bytes(list(records), candidate)) is not None:
        note = "once, while it resumes from a checkpoint"
        if resumed_bytes > hardware.ceiling_bytes:
            note += "; it did not run out, and the headroom is for steps, so it may exceed the ceiling"
        bars.append(Bar("resuming", (("not told apart", float(resumed_bytes)),), note))
    return Bars(name, str(candidate) or AS_IS, tuple(bars))


def predicted_bar(one: Prediction, hardware: Hardware) -> Bar:
    """Return the predicted memory at its peak by content."""
    notes = [
        f"highest in {one.moment}",
        reclaimed_memory_note(one.peak_bytes, one.needed_bytes, hardware.ceiling_bytes),
    ]
    return Bar("predicted", tuple((n, s) for n, s in one.memory.items() if s > 0), "; ".join(filter(None, notes)))


def reclaimed_memory_note(peak_bytes: float, needed_bytes: float, ceiling_bytes: int) -> str:
    """Explain why a config fits although its peak is above the ceiling; empty otherwise."""
    if not needed_bytes <= ceiling_bytes < peak_bytes:
        return ""
    return f"{format_bytes(needed_bytes)} are needed: cached blocks are given back before memory runs out"


def _measured_bar(measured: Measurement, hardware: Hardware) -> Bar:
    """Return a trial's memory by content: on GPUs from torch's allocator, on CPU ranks from counted tensors."""
    peak = float(measured.peak_bytes)
    if hardware.device == "cpu":
        tensors = float(max(measured.live_tensor_bytes.values(), default=0))
        rest = "rest of the process" if tensors else "not told apart"
        parts = [("tensors", min(tensors, peak)), (rest, max(0.0, peak - tensors))]
    elif not measured.torch_allocated_bytes:
        parts = [("not told apart", peak)]
    else:
        allocated, reserved = float(measured.torch_allocated_bytes), float(measured.torch_reserved_bytes or 0)
        kept = max(0.0, min(reserved, peak) - allocated)
        parts = [("allocated by torch", min(allocated, peak)), ("kept by the allocator", kept)]
        parts += [("context and communication", max(0.0, peak - sum(size for _, size in parts)))]
    return Bar("measured", tuple((name, size) for name, size in parts if size > 0))


# -- memory map --------------------------------------------------------------------------------------------------------
#
# The memory map: every micro-batch under every stage, checkpointing and offload, with the knowledge about it.

MOST_COLUMNS = 16
MOST_IN_A_SQUARE = 12  # candidates checked in an untried square, which may have thousands
MOST_LOOKED_AT = 50_000  # candidates of the space; two million would take a minute
# a trial with one of these tells about its square; most certain knowledge first
_TELLING = (Status.FITS, Status.ABOVE, Status.RAN_OUT, Status.FAILED)
_Row = tuple[int, bool, str, str]
_Place = tuple[_Row, int]


def _row(candidate: Candidate) -> _Row:
    return candidate.stage, candidate.checkpointing, candidate.offload_optimizer, candidate.offload_param


def _row_name(row: _Row) -> str:
    stage, checkpointing, optimizer, parameters = row
    parts = [f"stage {stage}"]
    parts += ["checkpointing"] * checkpointing
    parts += [f"optimizer on {optimizer.upper() if optimizer == 'cpu' else 'NVMe'}"] * (optimizer != "none")
    parts += [f"parameters on {parameters.upper() if parameters == 'cpu' else 'NVMe'}"] * (parameters != "none")
    return ", ".join(parts)


def memory_map(
    trials: Mapping[Candidate, Sequence[Trial]],
    candidates: Sequence[Candidate],
    hardware: Hardware,
    predictor: Predictor | None,
) -> MemoryMap | None:
    """Return the map of a study; None if it would be empty.

    Args:
        trials: of each candidate that was tried.
        candidates: the whole space; empty if it can no longer be read.
        predictor: calibrated; without one, untried squares stay unknown.
    """
    tried: dict[_Place, list[Trial]] = defaultdict(list)
    for candidate, found in trials.items():
        tried[_row(candidate), candidate.micro_batch] += found
    untried: dict[_Place, list[Candidate]] = defaultdict(list)
    stride = -(-len(candidates) // MOST_LOOKED_AT) or 1
    for candidate in candidates[::stride]:
        untried[_row(candidate), candidate.micro_batch].append(candidate)
    places = tried.keys() | untried.keys()
    if not places:
        return None
    columns = _columns({size for _, size in tried}, {size for _, size in places})
    asked = {
        place: _some(found)
        for place, found in untried.items()
        if place[1] in columns and _of_trials(tried.get(place, [])) is None
    }
    known = _judged(asked, trials, hardware, predictor)
    known |= {place: square for place, found in tried.items() if (square := _of_trials(found)) is not None}
    cut_short = Square(Cell.UNKNOWN, tooltip="tried, but the trial was cut short or failed by no fault of the config")
    known = {**dict.fromkeys(tried, cut_short), **known}
    rows = sorted(
        {row for row, _ in places}, key=lambda row: (*row[:2], row[2] != "none", row[2], row[3] != "none", row[3])
    )
    nothing = Square(
        Cell.NONE if candidates else Cell.UNKNOWN, tooltip="not in the space" if candidates else "not tried"
    )
    named = [(_row_name(row), tuple(known.get((row, size), nothing) for size in columns)) for row in rows]
    told = [row for row in named if any(square.cell not in (Cell.UNKNOWN, Cell.NONE) for square in row[1])] or named
    notes = (
        [] if len(columns) == len({size for _, size in places}) else ["Not every micro-batch of the space is shown."]
    )
    if hidden := [name for name, _ in named if name not in dict(told)]:
        notes.append(f"Nothing is known of these, and they are not shown: {'; '.join(hidden)}.")
    return MemoryMap(tuple(columns), tuple(told), " ".join(notes))


def _columns(tried: set[int], every: set[int]) -> list[int]:
    """Return the micro-batches to show: all, or those tried and powers of two."""
    if len(every) <= MOST_COLUMNS:
        return sorted(every)
    powers = [size for size in sorted(every) if size & (size - 1) == 0 and size not in tried]
    return sorted([*sorted(tried), *powers][:MOST_COLUMNS])


def _some(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return a few of the candidates, evenly spaced."""
    step = max(1, -(-len(candidates) // MOST_IN_A_SQUARE))
    return list(candidates[::step])


def _of_trials(found: Sequence[Trial]) -> Square | None:
    """Build a square from its trials; None if they give no information."""
    telling = [trial for trial in found if trial.status in _TELLING]
    if not telling:
        return None
    counts = Counter(trial.status for trial in telling)
    peaks = [trial.peak_bytes for trial in telling if trial.measured and trial.peak_bytes]
    phases = tuple(sorted({trial.phase for trial in telling if trial.status is Status.RAN_OUT}))
    ranks = sorted({trial.rank for trial in telling if trial.status is Status.RAN_OUT and trial.rank is not None})
    parts = [f"{many} {status.value}" for status, many in counts.items()]
    parts += [f"in {' and '.join(phases)}"] if phases else []
    parts += [f"on rank {', '.join(str(rank) for rank in ranks)}"] if ranks else []
    parts += [f"least peak {format_bytes(min(peaks))}"] if peaks else []
    numbers = tuple(trial.number for trial in telling)
    told = f"{'; '.join(parts)} (trials {', '.join(map(str, numbers))})"
    best = min(counts, key=_TELLING.index)
    return Square(Cell(best.value), min(peaks, default=None), phases, told, numbers)


def _judged(
    asked: Mapping[_Place, Sequence[Candidate]],
    trials: Mapping[Candidate, Sequence[Trial]],
    hardware: Hardware,
    predictor: Predictor | None,
) -> dict[_Place, Square]:
    """Build squares without informative trials, from those that ran out of memory and from the predictor."""
    flat = [candidate for found in asked.values() for candidate in found]
    if not flat:
        return {}
    ran_out = [c for c, found in trials.items() if any(trial.lacks_memory_on(hardware) for trial in found)]
    known = judge_candidates(flat, ran_out, hardware, predictor)
    return {place: _summed_up([known[candidate] for candidate in found]) for place, found in asked.items()}


def _summed_up(judged: Sequence[Judgement]) -> Square:
    """Build a square from the judgements of its candidates."""
    free = [one for one in judged if one.cell is not Cell.RULED_OUT]
    if not free:
        why = f"needs no less memory than {judged[0].culprit}, which ran out"
        return Square(Cell.RULED_OUT, tooltip=f"not tried: {why}")
    if free[0].cell is Cell.UNKNOWN:
        return Square(Cell.UNKNOWN, tooltip="not tried")
    fitting = [one for one in free if one.cell is Cell.PREDICTED]
    least = min(fitting or free, key=lambda one: one.needed_bytes)
    size = least.needed_bytes  # the allocator returns further cached blocks before an OOM
    what = "main memory" if not fitting and least.lacks_host_memory else f"{format_bytes(size)} needed at least"
    return Square(least.cell, size, tooltip=f"{least.cell.value} ({what})")


# -- secrets -------------------------------------------------------------------------------------------------------------


def without_secrets(report: StudyReport) -> StudyReport:
    """Return the report without tokens and passwords from a command line, a config or the text of a rank."""
    job = report.fingerprint.get("job", {})
    if job.get("script"):
        # An argument file's text and data may hold anything.
        script = {name: value for name, value in job["script"].items() if name != "files"}
        report = dataclasses.replace(report, fingerprint={**report.fingerprint, "job": {**job, "script": script}})
    return _masked(dataclasses.replace(report, fingerprint=masked_data(report.fingerprint)))  # type: ignore[no-any-return]


def _masked(data: Any) -> Any:
    """Return the data with every text masked, keys of mappings included. Values of enums are kept."""
    if type(data) is str:
        return masked(data)
    if isinstance(data, dict):
        return {_masked(key): _masked(value) for key, value in data.items()}
    if isinstance(data, tuple | list):
        return type(data)(map(_masked, data))
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        return type(data)(**{field.name: _masked(getattr(data, field.name)) for field in dataclasses.fields(data)})
    return data
