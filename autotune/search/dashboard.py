"""Adapt a study to optuna-dashboard. Based on the source of version 0.21.0.

The dashboard does not know the constraints of Optuna 5: `_serializer.py` reads the attribute `constraints`, while
Optuna writes `constraints:NAME`. Its best trial is the storage's best, the COMPLETE trial with the highest value.
autotune therefore writes a study as follows:

* A candidate that does not fit is PRUNED, with its speed as the value. Optuna's TPE checks feasibility before the state
  (`samplers/_tpe/sampler.py`, `_split_trials`), so the sampler is unaffected, and the dashboard's best trial fits.
* A candidate that does not fit gets the attribute that the dashboard reads, so that its plots show the trial as
  infeasible.
* A note names autotune's winner and how the dashboard's best trial differs from it. Verification chooses the winner,
  and a finished trial cannot be changed.
* Each trial has flat attributes, which become columns of the dashboard's table.
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

# names from `_note.py`; a body under 2045 characters is one piece
_VERSION, _BODY = "dashboard:note_ver", "dashboard:note_str:0"
MOST_CHARACTERS = 2000
_CONSTRAINTS = "constraints"  # read by the dashboard and by Optuna before version 5: a list, feasible at 0 or less
# Optuna adds the list to the named constraints. Samplers sort by the order of sums, which this value does not change.
_MARK = 1e-9


def flat(outcome: Outcome, hardware: Hardware) -> dict[str, Any]:
    """Return a trial's flat attributes for the dashboard's table.

    Returns:
        `kind`, and if known `peak_gib`, `tokens_per_s` and `over_gib`: GiB above the ceiling, negative below it.
    """
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
    """End a trial with an attributable outcome. The call can be repeated if a process was killed during it."""
    known = trial.constraints
    values = constraints(outcome, hardware)
    fits, measured = all(value <= 0 for value in values.values()), outcome.measurement
    if not fits and measured is not None and not known:
        # Optuna takes the last report as the value of a pruned trial
        trial.report(measured.samples_per_second, measured.steps)
    for name, value in values.items():
        if name not in known:
            trial.set_constraint(name, value)
    study._storage.set_trial_system_attr(trial._trial_id, _CONSTRAINTS, [0.0 if fits else _MARK])
    if fits and measured is not None:
        study.tell(trial, measured.samples_per_second)
    else:
        study.tell(trial, state=TrialState.PRUNED)


def best_shown(study: optuna.Study) -> int | None:
    """Return the number of the dashboard's best trial; None if it has none."""
    try:
        return study._storage.get_best_trial(study._study_id).number
    except ValueError:
        return None


def save_note(study: optuna.Study, text: str) -> None:
    """Save the study's note as `optuna_dashboard.save_note` does, without a dependency on the dashboard."""
    storage, which = study._storage, study._study_id
    version = int(storage.get_study_system_attrs(which).get(_VERSION, 0))
    storage.set_study_system_attr(which, _VERSION, version + 1)
    storage.set_study_system_attr(which, _BODY, text[:MOST_CHARACTERS])


def winners_note(number: int, why: str, records: Sequence[Record], shown: int | None, hardware: Hardware) -> str:
    """Return a Markdown note that names the winner and explains why the dashboard may show another best trial.

    Args:
        number: the winner's trial number.
        why: how the winner was chosen.
        records: all trials.
        shown: the dashboard's best trial.
        hardware: the study's machine.
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
    """Describe how a trial ended, as a phrase after `it`, without text from a rank."""
    if outcome.measurement is None:
        return "ran out of memory" if outcome.kind.is_oom else f"ended in {outcome.kind.value}"
    over = outcome.measurement.peak_bytes - hardware.ceiling_bytes
    if over > 0:
        return f"took {format_bytes(over)} more than the ceiling"
    return f"gave {outcome.measurement.samples_per_second:.4g} samples a second"
