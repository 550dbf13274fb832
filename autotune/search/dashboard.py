"""What optuna-dashboard shows of a study, made right by what a study stores. Read off its version 0.21.0.

It knows nothing of the constraints of Optuna 5 (`_serializer.py` reads the attribute `constraints`, Optuna writes
`constraints:NAME`), and its best trial is the storage's: of the COMPLETE trials the one of the highest value. So

* what does not fit is told as PRUNED, with its speed as the value: Optuna's TPE asks for feasibility before it asks for the
  state (`samplers/_tpe/sampler.py`, `_split_trials`), and sees what it saw before; the dashboard's best trial fits;
* what does not fit has a mark in the attribute that the dashboard reads, so that its plots set it apart;
* a study has a note that names our winner, and how the dashboard's best trial differs from it: verification decides, and a
  finished trial cannot be changed;
* each trial has flat attributes, which are columns of the dashboard's table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import optuna
from optuna.trial import TrialState

from autotune.problem.hardware import Hardware
from autotune.problem.outcome import Outcome
from autotune.search.distributions import constraints
from autotune.search.records import RESUME, VERIFY, Record
from autotune.units import GIB, format_bytes

_VERSION, _BODY = "dashboard:note_ver", "dashboard:note_str:0"  # `_note.py`; a body under 2045 characters is one piece
MOST_CHARACTERS = 2000
_CONSTRAINTS = "constraints"  # what the dashboard, and Optuna before version 5, read: a list, feasible at 0 or less
# Optuna adds the list to the constraints that have names; samplers go by the order of sums, which this does not change.
_MARK = 1e-9


def flat(outcome: Outcome, hardware: Hardware) -> dict[str, Any]:
    """A trial's attributes for the dashboard's table: `kind`, and where known `peak_gib`, `tokens_per_s`, and `over_gib`, by how
    much it is above the ceiling (below zero: it has room)."""
    found: dict[str, Any] = {"kind": outcome.kind.value}
    if outcome.peak_bytes or outcome.measurement:
        peak = outcome.measurement.peak_bytes if outcome.measurement else outcome.peak_bytes or 0
        found["peak_gib"] = round(peak / GIB, 3)
    if outcome.measurement or outcome.kind.is_oom:
        found["over_gib"] = round(constraints(outcome, hardware)["memory_gib_over"], 3)
    if outcome.measurement:
        found["tokens_per_s"] = round(outcome.measurement.tokens_per_second, 2)
    return found


def tell(study: optuna.Study, trial: optuna.Trial, outcome: Outcome, hardware: Hardware) -> None:
    """Ends a trial that says something of its candidate; again, where a process was killed half way through it."""
    known = trial.constraints
    values = constraints(outcome, hardware)
    fits, measured = all(value <= 0 for value in values.values()), outcome.measurement
    if not fits and measured is not None and not known:
        trial.report(measured.samples_per_second, measured.steps)  # the last report is the value of a pruned trial
    for name, value in values.items():
        if name not in known:
            trial.set_constraint(name, value)
    study._storage.set_trial_system_attr(trial._trial_id, _CONSTRAINTS, [0.0 if fits else _MARK])
    if fits and measured is not None:
        study.tell(trial, measured.samples_per_second)
    else:
        study.tell(trial, state=TrialState.PRUNED)


def best_shown(study: optuna.Study) -> int | None:
    """The number of the trial that the dashboard calls best; None where it has none."""
    try:
        return study._storage.get_best_trial(study._study_id).number
    except ValueError:
        return None


def save_note(study: optuna.Study, text: str) -> None:
    """The study's note, as `optuna_dashboard.save_note` would write it, without depending on the dashboard."""
    storage, which = study._storage, study._study_id
    version = int(storage.get_study_system_attrs(which).get(_VERSION, 0))
    storage.set_study_system_attr(which, _VERSION, version + 1)
    storage.set_study_system_attr(which, _BODY, text[:MOST_CHARACTERS])


def winners_note(number: int, why: str, records: Sequence[Record], shown: int | None, hardware: Hardware) -> str:
    """Markdown: which trial is the winner, and why the dashboard may call another best.

    Args:
        shown: the trial that it calls best.
    """
    lines = [f"**autotune's winner is trial {number}** ({why})."]
    if shown is not None and shown != number:
        lines.append(_why_another(number, shown, {record.number: record for record in records}, hardware))
    lines.append(
        "Trials that did not fit are shown as pruned; `kind` says how each ended, and `over_gib` by how much it was above the "
        "memory ceiling. `autotune report` has the whole study on one page."
    )
    return "\n\n".join(line for line in lines if line)


def _why_another(number: int, shown: int, records: Mapping[int, Record], hardware: Hardware) -> str:
    winner, other = records.get(number), records.get(shown)
    if winner is None or other is None:
        return ""
    head = f"The best trial as this dashboard shows it, {shown}, "
    if other.outcome and any(value > 0 for value in constraints(other.outcome, hardware).values()):
        return f"{head}does not fit: it was recorded by an earlier version, or under another ceiling."
    if winner.candidate == other.candidate:
        return f"{head}is the same config, as the search measured it."
    later = [r for r in records.values() if r.candidate == other.candidate and r.number > shown and r.outcome]
    told = [_in_words(r.outcome, hardware) for r in later if r.outcome and r.role in (VERIFY, RESUME)]
    if told:
        return (
            f"{head}is another config, which was faster in the search; tried again in a fresh process, it {told[-1]}."
        )
    return f"{head}is another config, which looked faster when it was measured; it is not the winner."


def _in_words(outcome: Outcome, hardware: Hardware) -> str:
    """How a trial ended, after `it`; nothing that a rank said."""
    if outcome.measurement is None:
        return "ran out of memory" if outcome.kind.is_oom else f"ended in {outcome.kind.value}"
    over = outcome.measurement.peak_bytes - hardware.ceiling_bytes
    if over > 0:
        return f"took {format_bytes(over)} more than the ceiling"
    return f"gave {outcome.measurement.samples_per_second:.4g} samples a second"
