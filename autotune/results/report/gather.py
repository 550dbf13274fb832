"""Build the content of a study's page."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path

from autotune.executors.nodes.hostfile import hostfile_of
from autotune.group.environment import variables_of
from autotune.masking import MASK, masked_data
from autotune.predict.predictor import Predictor
from autotune.problem.candidate import Candidate, Value
from autotune.problem.hardware import Hardware
from autotune.problem.job import Job
from autotune.problem.outcome import Kind, Measurement, Outcome
from autotune.problem.space import SearchSpace
from autotune.results.export import deepspeed_config, environment_of, needs
from autotune.results.lossy import lossy_settings
from autotune.results.report.data import Clock, Code, Forecast, Gain, Status, StudyReport, Trial, Verdict
from autotune.results.report.forecasts import accuracy, forecasts
from autotune.results.report.mattered import shown, what_mattered
from autotune.results.report.memory_bars import memory_bars, of_interest
from autotune.results.report.memory_map import memory_map
from autotune.results.sliced import slice_line
from autotune.results.winner import closest_lines, measured_alike, train_with, unlike_steps
from autotune.search.records import AS_IS, RESUME, SEARCH, TRAINING, VERIFY, Record
from autotune.search.rivals import rivals
from autotune.search.study import StudyStore
from autotune.units import format_bytes
from autotune.version import __version__

MOST_TEXT = 400  # characters of a failure's message; the log has the rest


@dataclass(frozen=True)
class Searched:
    """A study's space and its candidates. A later version may be unable to read it, and passes None instead."""

    space: SearchSpace
    candidates: tuple[Candidate, ...]


def study_report(
    store: StudyStore, searched: Searched | None, predictor: Predictor | None, why_none: str
) -> StudyReport:
    """Return the full content of a study's page.

    Args:
        predictor: a fresh one for the study's job and hardware, or None.
        why_none: reason for a missing predictor.
    """
    records, hardware, job = store.records(), store.hardware, store.job
    winner = store.winner
    shown_memory = of_interest(records, winner, hardware)
    expected, broken_down = (
        forecasts(records, predictor, set(shown_memory.values())) if predictor is not None else ({}, {})
    )
    trials = tuple(_trial(record, hardware, expected.get(record.number)) for record in records)
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
        machine=str(hardware),
        device=hardware.device,
        capacity_bytes=hardware.capacity_bytes,
        ceiling_bytes=hardware.ceiling_bytes,
        headroom=hardware.headroom,
        objective=str(store.attributes.get("objective", "samples per second, all ranks")),
        verdict=_verdict(store, records, trials, winner, candidates),
        trials=trials,
        varying=varying,
        constant=constant,
        memory=tuple(memory_bars(name, one, records, broken_down, hardware) for name, one in shown_memory.items()),
        map=memory_map(by_candidate, candidates, hardware, predictor),
        clock=_clock(store, records),
        mattered=what_mattered(
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
        version=__version__,
    )


# -- trials ----------------------------------------------------------------------------------------------------------------


def _status(outcome: Outcome, hardware: Hardware) -> Status:
    if outcome.measurement is not None:
        return Status.FITS if outcome.measurement.peak_bytes <= hardware.ceiling_bytes else Status.ABOVE
    if outcome.kind.is_oom:
        return Status.RAN_OUT
    if outcome.kind is Kind.OK:
        return Status.FITS  # it resumed from a checkpoint
    return Status.FAILED if outcome.kind.says_something_of_the_candidate else Status.UNDECIDED


def _trial(record: Record, hardware: Hardware, expected: Forecast | None) -> Trial:
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
        why=record.note[:MOST_TEXT],
        happened="" if measured or outcome.ok else what_happened[:MOST_TEXT],
        log="" if measured else outcome.log or "",
        forecast=expected,
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
    """Return the measurements of the search. Verification runs later and more carefully, which would favour verified
    candidates."""
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
    return varying, tuple((name, shown(value)) for name, value in sorted(constant.items()) if value is not None)


# -- the verdict -----------------------------------------------------------------------------------------------------------


def _verdict(
    store: StudyStore,
    records: list[Record],
    trials: Sequence[Trial],
    winner: Record | None,
    candidates: Sequence[Candidate],
) -> Verdict:
    measured = winner.outcome.measurement if winner is not None and winner.outcome is not None else None
    # measured with another headroom
    if winner is None or measured is None or measured.peak_bytes > store.hardware.ceiling_bytes:
        return _no_winner(store, records, candidates)
    job = store.job
    trial = next(trial for trial in trials if trial.number == winner.number)
    verified = winner.role == VERIFY
    config = (store.folder or Path()) / f"{store.name}.json"
    exported = Code("DeepSpeed config", json.dumps(masked_data(deepspeed_config(winner.candidate, job)), indent=2))
    if job.script is not None:
        given = (store.threads, environment_of(store, winner.candidate))
        nodes = store.hardware.nodes
        hostfile = None if store.hardware.sliced else hostfile_of(store.folder or Path())  # no nodes were named
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
    return Verdict(
        winner=trial,
        head="The fastest config that fits" if verified else "The fastest config that fits so far, not verified yet",
        verified=verified,
        checks=_checks(winner, records, store.hardware, store.job),
        gains=_gains(winner, rivals(store), job, store.hardware),
        run_now=(*(Code(name, text) for name, text in commands), exported),
        instead=instead,
        needs=tuple(dict.fromkeys([*(hint.strip() for hint in hints), *needs(winner.candidate, job, variables)])),
        mfu=measured.mfu,
    )


def _no_winner(store: StudyStore, records: list[Record], candidates: Sequence[Candidate]) -> Verdict:
    # a masked command would not run
    again = tuple(Code("go on", command) for command in store.commands[-1:] if MASK not in command)
    if not any(record.outcome for record in records):
        return Verdict(None, "Nothing was tried yet.", lines=("This study has no finished trial.",), run_now=again)
    tried = {record.candidate for record in records}
    untried = [candidate for candidate in candidates if candidate not in tried]
    if of_interest(records, None, store.hardware).get("fastest so far") is not None:
        why = store.calls()[-1].ended if store.calls() else ""
        said = f"The search ended: {why}." if why else "The search was stopped before it ended."
        return Verdict(None, "No winner was chosen yet.", lines=(said,), run_now=again)
    lines = tuple(closest_lines(records, store.hardware, untried))
    return Verdict(None, "Nothing fits yet." if untried else "Nothing fits.", lines=lines, run_now=again)


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
        lines.append("Whether it goes on from a checkpoint was not tried.")
    elif resumed[-1].ok and resumed[-1].peak_bytes is not None:
        lines.append(f"Goes on from a checkpoint, at a peak of {format_bytes(resumed[-1].peak_bytes)}.")
    elif not resumed[-1].ok:
        lines.append(f"Whether it goes on from a checkpoint is not known: {resumed[-1].reason[:MOST_TEXT]}")
    if measured.predicted_seconds is not None:
        lines.append(f"{slice_line(measured, hardware).capitalize()}.")
    if measured.extrapolated:
        lines.append("Its step is extrapolated from a shortened accumulation.")
    lines += [f"It {line}." for line in lossy_settings(winner.candidate, job)]
    lines += [f"The clock of a GPU was limited: {', '.join(measured.clock_limits)}."] if measured.clock_limits else []
    return tuple(lines)


def _gains(winner: Record, records: list[Record], job: Job, hardware: Hardware) -> tuple[Gain, ...]:
    """Return the gains over the user's own config, the next best and the slowest that fits."""
    alike = measured_alike(winner, records)
    own = next((record.candidate for record in records if record.note == AS_IS), None)
    found: list[Gain] = []
    if own is not None and own in alike:
        found.append(_gain(AS_IS, own, alike[own], unlike_steps(own, winner.candidate, job)))
    fitting = {c: pair for c, pair in alike.items() if pair[1].peak_bytes <= hardware.ceiling_bytes}
    # The order uses ratios within one round, verified or searched, not figures of different rounds.
    ranked = sorted(fitting, key=lambda one: fitting[one][0].tokens_per_second / fitting[one][1].tokens_per_second)
    if ranked:
        found.append(_gain("the next best", ranked[0], alike[ranked[0]]))
    if len(ranked) > 1:
        found.append(_gain(f"the slowest of {len(ranked) + 1} that fit", ranked[-1], alike[ranked[-1]]))
    return tuple(found)


def _gain(over: str, other: Candidate, pair: tuple[Measurement, Measurement], detail: str = "") -> Gain:
    """Return a gain with a 95 % interval, from those of the two medians, taken as independent."""
    times = pair[0].tokens_per_second / pair[1].tokens_per_second
    spread = sum((one.step_seconds_spread / one.step_seconds) ** 2 for one in pair) ** 0.5
    low, high = times / (1 + spread), times * (1 + spread)
    return Gain(over, str(other) or AS_IS, times, (low, high), detail.strip(" ()"))


# -- time, facts -----------------------------------------------------------------------------------------------------------


def _clock(store: StudyStore, records: Sequence[Record]) -> Clock:
    spent = dict.fromkeys(
        (
            "measured steps of trials that ran",
            "starting and warming up engines of trials that ran",
            "trials that ran out of memory",
            "trials that failed or were cut short",
            "verifying and resuming the winner",
        ),
        0.0,
    )
    names = list(spent)
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
    used = sum(call[1] for call in calls)
    other = used - sum(spent.values())
    parts = [*spent.items(), ("between trials: imports, choosing, a script's first run", max(0.0, other))]
    return Clock(calls, used, tuple((name, seconds) for name, seconds in parts if seconds > 0))


def _facts(store: StudyStore) -> tuple[tuple[str, str], ...]:
    hardware, job = store.hardware, store.job
    facts = [
        ("devices", str(hardware)),
        ("main memory", format_bytes(hardware.host_memory_bytes)),
        ("a winner leaves free", f"{hardware.headroom:.0%} of {format_bytes(hardware.capacity_bytes)}"),
        ("ranks, and CPU threads of each", f"{job.ranks}, {store.threads}"),
        ("job", job.summary),
        *((f"version of {name}", version) for name, version in store.versions.items()),
        *(sorted({**store.fingerprint.get("environment", {}), **hardware.environment}.items())),
    ]
    if job.model.parameters:
        facts.insert(4, ("parameters of the model", f"{job.model.parameters:,}"))
    return tuple(facts)
