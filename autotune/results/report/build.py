"""Report data of a study."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from autotune.masking import MASK, masked, masked_data
from autotune.problem.candidate import Candidate, Value
from autotune.problem.hardware import Hardware
from autotune.problem.outcome import Outcome, OutcomeKind
from autotune.results.console import detail_lines, how_to_train, own_line, shortened, winner_lines
from autotune.results.export import environment_of, training_changes
from autotune.results.report.model import Status, StudyReport, Trial, WinnerSummary
from autotune.search.importance import knob_importance
from autotune.search.leaderboard import StudyFacts
from autotune.search.study import StudyStore
from autotune.search.trials import AS_IS, SEARCH, Record
from autotune.util.units import format_bytes
from autotune.workers.launchers import variables_of

# -- report data of a study --------------------------------------------------------------------------------------------
#
# Build the content of a study's page.

MOST_TEXT = 400  # characters of a failure's message; the log has the rest


def study_report(store: StudyStore) -> StudyReport:
    """Return the full content of a study's page."""
    records, hardware, job, facts = store.records(), store.hardware, store.job, store.facts()
    varying, constant = _knobs([record.candidate for record in records])
    return StudyReport(
        study=store.name,
        model=job.model.name,
        job=job.summary,
        hardware=hardware,
        verdict=_verdict(store, facts, records),
        trials=tuple(_trial(record, facts, hardware) for record in records),
        varying=varying,
        constant=constant,
        mattered=tuple(knob_importance(_searched_speeds(records)).items()),
        skips=tuple(sorted(store.skips.items(), key=lambda item: -item[1])),
        calls=tuple(
            (call.started, call.used_seconds, call.budget_seconds, call.ended or "not ended") for call in store.calls()
        ),
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
        return Status.OOM
    if outcome.kind is OutcomeKind.OK:
        return Status.FITS  # it resumed from a checkpoint
    return Status.FAILED if outcome.kind.is_attributable_to_candidate else Status.UNDECIDED


def _trial(record: Record, facts: StudyFacts, hardware: Hardware) -> Trial:
    label = str(record.candidate) or AS_IS
    outcome, knobs = record.outcome, record.candidate.as_dict
    if outcome is None:
        return Trial(record.number, label, knobs, record.role, Status.RUNNING, "running", why=record.note)
    measured = outcome.measurement
    trial = Trial(
        record.number,
        label,
        knobs,
        record.role,
        _status(outcome, hardware),
        outcome.kind.word,
        rank=outcome.rank,
        missing_bytes=outcome.missing_bytes,
        capacity_bytes=outcome.device_capacity_bytes,
        seconds=outcome.seconds,
        why=shortened(record.note, MOST_TEXT),
        remark=facts.remark(record.number),
    )
    if measured is not None:
        return dataclasses.replace(
            trial,
            samples_per_second=measured.samples_per_second,
            tokens_per_second=measured.tokens_per_second,
            step_seconds=measured.step_seconds,
            spread=measured.step_seconds_spread / measured.step_seconds,
            peak_bytes=measured.peak_bytes,
            retries=measured.alloc_retries,
        )
    what_happened = (outcome.kind.is_oom and outcome.evidence) or outcome.reason
    happened = "" if outcome.ok else shortened(what_happened, MOST_TEXT)
    log, phase = outcome.log or "", outcome.phase.value
    return dataclasses.replace(trial, phase=phase, peak_bytes=outcome.peak_bytes, happened=happened, log=log)


def _searched_speeds(records: Sequence[Record]) -> dict[Candidate, float]:
    """Return the samples per second of the search's trials.

    Verification runs later and more carefully, which would favour verified candidates.
    """
    return {
        record.candidate: record.outcome.measurement.samples_per_second
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


def value_text(value: Value) -> str:
    """Format a knob's value for tables."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, int | float) and abs(value) >= 100_000:
        return f"{value:.3g}"
    return str(value)


# -- the verdict -----------------------------------------------------------------------------------------------------------


def _verdict(store: StudyStore, facts: StudyFacts, records: list[Record]) -> WinnerSummary:
    winner, job, hardware = facts.winner, store.job, store.hardware
    own, lines = own_line(facts, job), tuple(winner_lines(facts, job, hardware))
    if winner is None:
        # a masked command would not run
        again = tuple(("go on", command) for command in store.commands[-1:] if MASK not in command)
        return WinnerSummary(None, own, lines, run_now=again)
    exported = json.dumps(masked_data(winner.candidate.ds_config(job)), indent=2)
    how = how_to_train(store, winner.candidate)
    variables = variables_of(winner.candidate, store.threads, environment_of(store, winner.candidate))
    hints = [*how.hints, *training_changes(winner.candidate, job, variables)]
    return WinnerSummary(
        winner=_trial(winner, facts, hardware),
        own=own,
        lines=lines,
        verified=facts.verified,
        details=tuple(detail_lines(facts, records, job, hardware)),
        run_now=how.commands,
        config=exported,
        needs=tuple(dict.fromkeys(hints)),
    )


# -- facts -----------------------------------------------------------------------------------------------------------


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
