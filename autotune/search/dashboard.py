"""What optuna-dashboard can show of a study. Read off its version 0.21.0.

It knows nothing of the constraints of Optuna 5 (`_serializer.py` reads the attribute `constraints`, Optuna writes
`constraints:NAME`), and its best trial is the storage's, which ignores constraints: one above the ceiling may be shown as best.
Values stay as they are, since samplers learn from them. So a study has a note that names our winner, and each trial flat
attributes, which are columns of the dashboard's table.
"""

from __future__ import annotations

from typing import Any

import optuna

from autotune.problem.hardware import Hardware
from autotune.problem.outcome import Outcome
from autotune.search.distributions import constraints
from autotune.units import GIB

_VERSION, _BODY = "dashboard:note_ver", "dashboard:note_str:0"  # `_note.py`; a body under 2045 characters is one piece
MOST_CHARACTERS = 2000


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


def save_note(study: optuna.Study, text: str) -> None:
    """The study's note, as `optuna_dashboard.save_note` would write it, without depending on the dashboard."""
    storage, which = study._storage, study._study_id
    version = int(storage.get_study_system_attrs(which).get(_VERSION, 0))
    storage.set_study_system_attr(which, _VERSION, version + 1)
    storage.set_study_system_attr(which, _BODY, text[:MOST_CHARACTERS])


def winners_note(number: int, why: str) -> str:
    """Markdown: which trial is the winner, whatever the dashboard calls best."""
    return (
        f"**autotune's winner is trial {number}** ({why}).\n\n"
        "What this dashboard shows as the best trial may be above the memory ceiling: it does not read constraints. A trial "
        "with `over_gib` above 0 is no winner; `kind` says how each ended. `autotune report` has the whole study on one page."
    )
