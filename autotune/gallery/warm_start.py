"""Shipped gallery entries, the nearest one to a job, and card rates learned from them."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path

from autotune.errors import UserError, one_line
from autotune.gallery.schema import Entry, Machine, Trained, check, read_entry
from autotune.predict.calibration import QUIRKS, TIME, CalibrationEvidence
from autotune.predict.step_time import matmul_parameters
from autotune.problem.candidate import CHECKPOINTING, MICRO_BATCH, Candidate
from autotune.problem.hardware import Hardware
from autotune.problem.job import Job
from autotune.problem.outcome import OutcomeKind
from autotune.search.tpe import Distances


def entries_folder() -> Path:
    """Return the folder: inside the package if installed, otherwise at the top of the repository."""
    package = Path(__file__).parents[1]
    inside = package / "gallery_entries"
    return inside if inside.is_dir() else package.parent / "gallery" / "entries"


@cache
def shipped_entries() -> dict[str, Entry]:
    """Read the entries of this version, by name. An unreadable entry is left out, as no decision depends on it."""
    found = {}
    for path in sorted(entries_folder().glob("*.json")):
        try:
            found[path.stem] = checked(path)
        except Exception:  # entries are optional, so none of them may end a run
            continue
    return found


def checked(path: Path) -> Entry:
    """Read an entry and check its figures.

    Raises:
        UserError: the entry breaks the schema, or a figure is impossible; the message names file and field.
    """
    entry = read_entry(path)
    try:
        check(entry)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    except (ArithmeticError, ValueError) as error:
        raise UserError(f"{path}: its figures cannot be: {one_line(error)}") from None
    return entry


# -- nearest entry -----------------------------------------------------------------------------------------------------
#
# Find the gallery entry nearest to a job, and the candidate that matches its winner.
#
# Distances are in doublings: two jobs whose models differ by a factor of two, all else equal, are 2 apart. The largest
# weights belong to the properties that decide which configs fit and which is fast: the card, the weights a rank holds,
# and whether these are trained.

NEAR_ENOUGH = 3.0  # beyond it an entry gives no information about the job
PARAMETERS, MEMORY, SPEED, RANKS, LENGTH = 2.0, 3.0, 1.0, 1.0, 1.0  # weight of each doubling
OTHER_LORA, OTHER_PRECISION, OTHER_OPTIMIZER, OTHER_TASK, OTHER_ARCHITECTURE = 4.0, 3.0, 0.5, 1.5, 0.25
# Knobs that a start must share with the entry's winner. A difference in one of them makes it another config.
DECIDING = ("zero_stage", "offload_optimizer", "offload_param", CHECKPOINTING)
MOST_BATCH_TIMES = 2.0  # largest factor between the micro-batches of winner and start


@dataclass(frozen=True)
class GalleryStart:
    """A candidate to begin with, and its source."""

    candidate: Candidate
    entry: str  # name of the entry
    why: str  # for the user: source of the winner, its job and its machine


def nearest(entries: Mapping[str, Entry], job: Job, hardware: Hardware) -> list[tuple[float, str]]:
    """Return (distance, name) of the entries with a winner that are near enough, the nearest first."""
    found = []
    for name, entry in entries.items():
        away = distance(entry, job, hardware) if entry.winner is not None else math.inf
        if away <= NEAR_ENOUGH:
            found.append((away, name))
    return sorted(found)


def distance(entry: Entry, job: Job, hardware: Hardware) -> float:
    """Return the distance between an entry and a job on its machine; infinite if they cannot be compared."""
    if entry.machine.device != hardware.device:
        return math.inf
    return _between_machines(entry.machine, hardware) + _between_jobs(entry.job, job)


def _between_machines(machine: Machine, hardware: Hardware) -> float:
    away = RANKS * _doublings(machine.count, hardware.count)
    away += MEMORY * _doublings(machine.capacity_gib, hardware.capacity_bytes / 2**30)
    if machine.gpu is None or machine.gpu != hardware.facts:
        ours, theirs = hardware.gpu_facts, machine.facts
        if ours is not None and theirs is not None:
            away += SPEED * _doublings(theirs.tflops, ours.tflops) + SPEED * _doublings(
                theirs.link_gb_per_s, ours.link_gb_per_s
            )
        elif hardware.device == "cuda":
            return math.inf
    return away


def _between_jobs(trained: Trained, job: Job) -> float:
    sizes = _sizes(trained, job)
    if sizes is None:
        return math.inf
    away = PARAMETERS * _doublings(*sizes) + LENGTH * _doublings(trained.seq_len, job.seq_len)
    away += OTHER_LORA * ((trained.lora is None) != (job.lora is None))
    away += OTHER_PRECISION * ((trained.precision == "fp32") != (job.precision == "fp32"))
    away += OTHER_OPTIMIZER * (trained.optimizer != job.optimizer)
    away += OTHER_TASK * (trained.task != job.task)
    return away + OTHER_ARCHITECTURE * (trained.architecture != job.model.config.get("model_type"))


def _sizes(trained: Trained, job: Job) -> tuple[float, float] | None:
    """Return a comparable size of the entry's model and of the job's: parameters in matrix products, else all parameters.

    None if neither is known for both.
    """
    multiplied = matmul_parameters(trained.config(), trained.task), matmul_parameters(job.model.config, job.task)
    for theirs, ours in (multiplied, (trained.parameters, job.model.parameters)):
        if theirs and ours:
            return theirs, ours
    return None


def _doublings(one: float, other: float) -> float:
    return abs(math.log2(one / other))


def start_from(
    entries: Mapping[str, Entry], job: Job, hardware: Hardware, candidates: Sequence[Candidate]
) -> GalleryStart | None:
    """Return the candidate that matches the winner of the nearest entry.

    None if no entry is near, or no candidate is similar.
    """
    for _, name in nearest(entries, job, hardware):
        entry = entries[name]
        assert entry.best is not None
        winner = entry.best.candidate
        if like := [candidate for candidate in candidates if _alike(winner, candidate)]:
            told = (
                "the best" if sum(one.outcome == OutcomeKind.OK for one in entry.candidates) > 1 else "the one config"
            )
            like_it = like[int(Distances(like).to(winner).argmin())]
            return GalleryStart(like_it, name, f"{told} known for {entry_label(entry)}")
    return None


def _alike(winner: Candidate, candidate: Candidate) -> bool:
    times = candidate.micro_batch / winner.micro_batch
    return all(
        _plainly(winner.get(knob)) == _plainly(candidate.get(knob))
        for knob in DECIDING
        if candidate.get(knob) is not None
    ) and (MICRO_BATCH not in candidate.as_dict or 1 / MOST_BATCH_TIMES <= times <= MOST_BATCH_TIMES)


def _plainly(value: object) -> object:
    """Map an unset knob and its "off" values to None."""
    return value if value not in (None, False, "none", 0) else None


def entry_label(entry: Entry) -> str:
    """Describe an entry for the user: model, machine and source."""
    model = entry.job.model or entry.job.architecture or "a model of its size"
    where = f"published at {entry.origin.source}" if entry.origin.source else _KINDS[entry.origin.kind]
    return f"{model} on {entry.machine.count} x {entry.machine.gpu or entry.machine.name} ({where})"


_KINDS = {"study": "a study that was shared", "recorded": "recorded by this project"}


# -- card rates --------------------------------------------------------------------------------------------------------
#
# Card rates that the gallery's entries teach. Predictions for a job near an entry start from them.
#
# `benchmarks/predict/card_rates.py` has a predictor observe each entry and writes what it has learnt to
# `data/gallery_rates.json`: to trace an entry's model takes longer than a run may wait. The rates hold for steps
# alone, since memory does not depend on the card.

FILE = "gallery_rates.json"


@dataclass(frozen=True)
class WarmStartRates:
    """Rates learnt from one entry."""

    entry: str  # name of the entry
    learnt: CalibrationEvidence
    why: str  # for the user: source, job and machine


def rates_for(entries: Mapping[str, Entry], job: Job, hardware: Hardware) -> WarmStartRates | None:
    """Return the rates of the nearest entry on the same card; None if none is near."""
    known = shipped_rates()
    for _, name in nearest(entries, job, hardware):
        entry = entries[name]
        if name in known and entry.machine.gpu == hardware.facts:
            return WarmStartRates(name, known[name], entry_label(entry))
    return None


@cache
def shipped_rates() -> dict[str, CalibrationEvidence]:
    """Read the learnt rates by entry name. The result is empty if they belong to other constants, or cannot be read."""
    try:
        data = json.loads(resources.files("autotune.data").joinpath(FILE).read_text(encoding="utf-8"))
        learnt = {name: CalibrationEvidence(**one) for name, one in data["entries"].items()}
        return learnt if data["constants"] == constants() else {}
    except Exception:  # rates are optional, so reading them may not end a run
        return {}


def constants() -> str:
    """Return a digest of the predictor's prior constants, which identifies the rates that fit them."""
    priors = [(name, float(prior.mean), float(prior.sigma)) for name, prior in TIME.items()]
    return hashlib.sha256(json.dumps([priors, list(QUIRKS.items())]).encode()).hexdigest()[:16]
