"""Convert a study to a gallery entry: figures, sizes and public names, without anything that identifies the user."""

from __future__ import annotations

import datetime
import json
import re
from functools import cache
from importlib import resources
from typing import Any

from pydantic import ValidationError

from autotune.errors import UserError
from autotune.gallery.entry import NAME, VERSION, Entry, Machine, Origin, Trained, Tried, Versions
from autotune.gallery.values import PUBLIC_TARGETS, knob_trouble
from autotune.problem.candidate import LORA, Candidate, Value, is_read
from autotune.problem.hardware import Hardware
from autotune.problem.job import Job, parse_lora
from autotune.problem.model_sizes import SHAPE_KEYS, size_trouble
from autotune.problem.models import shipped_models
from autotune.problem.outcome import Outcome
from autotune.search.records import RESUME, VERIFY, Record
from autotune.search.study import StudyStore
from autotune.units import GIB
from autotune.version import __version__


def entry_of(store: StudyStore) -> Entry:
    """Return the study as an entry. Each candidate gets its latest attributable trial; the winner gets the trial that won.

    Raises:
        UserError: the study has measured nothing.
    """
    if store.table:
        raise UserError(f"study {store.name} searches a recorded table: only what was measured can be shared")
    told = _told(store.records(), store.winner)
    if not any(outcome.measurement for outcome in told.values()):
        raise UserError(f"study {store.name} has measured nothing that could be shared: run it first")
    job, hardware = store.job, store.hardware
    if hardware.sliced:
        raise UserError(f"study {store.name} is of a slice: the gallery takes what was measured on all nodes")
    knobs = {candidate: _public_knobs(candidate) for candidate in told}
    kept = [candidate for candidate in told if knobs[candidate] is not None]
    tried = [_tried(knobs[candidate] or {}, told[candidate]) for candidate in kept]
    winner = store.winner
    try:
        return Entry(
            origin=Origin(kind="study", date=f"{datetime.date.today():%Y-%m}", autotune=_version(__version__)),
            machine=_machine(hardware),
            job=_trained(job),
            versions=_versions(store.versions),
            space=_space(store),
            candidates=tried,
            winner=kept.index(winner.candidate) if winner is not None and winner.candidate in kept else None,
            verified=winner is not None and winner.role == VERIFY and winner.candidate in kept,
        )
    except ValidationError as error:  # a study may hold unforeseen values, which are not written
        fields = ".".join(str(part) for part in error.errors()[0]["loc"])
        raise UserError(f"study {store.name} cannot be shared: its {fields} has no place in a gallery entry") from None


def _told(records: list[Record], winner: Record | None) -> dict[Candidate, Outcome]:
    """Return the outcome of each candidate. An OOM during verification or resume replaces an earlier success."""
    told: dict[Candidate, Outcome] = {}
    for record in records:
        outcome = record.outcome
        if outcome is None or not record.candidate.knobs or not outcome.kind.says_something_of_the_candidate:
            continue
        if record.role == RESUME and outcome.ok:
            continue
        told[record.candidate] = outcome
    if winner is not None and winner.outcome is not None and winner.candidate.knobs:
        told[winner.candidate] = winner.outcome
    return told


def _public_knobs(candidate: Candidate) -> dict[str, Value] | None:
    """Return the candidate's knobs that an entry may contain; None if a knob that must be left out defines the candidate."""
    kept: dict[str, Value] = {}
    for name, value in candidate.knobs:
        if name == LORA and value != "none":
            value = public_lora(str(value))
        if knob_trouble(name, value) is None:
            kept[name] = value
        elif not isinstance(value, str):
            return None
    return {name: value for name, value in kept.items() if is_read(name, kept)}


def public_lora(text: str) -> str:
    """Replace targets that exist in no public architecture by `all-linear`."""
    lora = parse_lora(text)
    targets = lora.targets if set(lora.targets) <= PUBLIC_TARGETS else ("all-linear",)
    saved = tuple(name for name in lora.saved if name in PUBLIC_TARGETS)
    return str(type(lora)(lora.rank, targets, lora.alpha, saved, lora.dropout, lora.fp32))


def _tried(knobs: dict[str, Value], outcome: Outcome) -> Tried:
    measured = outcome.measurement
    if measured is None:
        missing = outcome.missing_bytes
        return Tried(
            knobs=knobs,
            outcome=outcome.kind.value,
            phase=outcome.phase.value,
            missing_gib=_rounded(missing / GIB) if missing else None,
        )
    return Tried(
        knobs=knobs,
        outcome=outcome.kind.value,
        step_seconds=_rounded(measured.step_seconds),
        spread=_rounded(measured.step_seconds_spread / measured.step_seconds, 2),
        samples_per_second=_rounded(measured.samples_per_second),
        tokens_per_second=_rounded(measured.tokens_per_second),
        peak_gib=_rounded(measured.peak_bytes / GIB),
    )


def _rounded(value: float, digits: int = 5) -> float:
    return float(f"{value:.{digits}g}")


def _machine(hardware: Hardware) -> Machine:
    facts = hardware.gpu_facts
    name = re.sub(r"[^A-Za-z0-9 ()@.+-]+", " ", hardware.name).strip()[:80].strip()
    return Machine(
        device="cuda" if hardware.device == "cuda" else "cpu",
        gpu=hardware.facts,
        name=facts.name if facts is not None and not hardware.gpus else name or hardware.device,
        count=hardware.count,
        nodes=hardware.nodes,
        memory_gib=_rounded(hardware.memory_bytes / GIB),
        capacity_gib=_rounded(hardware.capacity_bytes / GIB),
        headroom=hardware.headroom,
        host_memory_gib=_rounded(hardware.host_memory_bytes / GIB, 3),
    )


def _trained(job: Job) -> Trained:
    """Return the job with its model as sizes. The model's name is added if every size matches a public model."""
    config = job.model.config
    known = next((name for name, spec in shipped_models().items() if _alike(spec.config, config)), None)
    architecture = str(config.get("model_type", ""))
    parameters = job.model.parameters or (shipped_models()[known].parameters if known else None)
    vision = config.get("vision_config")
    return Trained(
        model=known,
        architecture=architecture if architecture in public_architectures() else None,
        parameters=parameters,
        shape=shape_of(config),
        vision=shape_of(vision) if isinstance(vision, dict) else None,
        task=job.task,
        seq_len=job.seq_len,
        tokens_per_sample=_rounded(job.tokens_per_sample),
        precision=job.precision,
        optimizer=job.optimizer,
        global_batch_size=job.global_batch_size,
        lora=public_lora(str(job.lora)) if job.lora else None,
        attention=job.attention,
        compiled=job.compiled,
        packed=job.packed,
    )


def shape_of(config: dict[str, Any]) -> dict[str, bool | int | float]:
    """Return the keys of a configuration that determine a model's size."""
    text = config.get("text_config")
    text = {**config, **text} if isinstance(text, dict) else config
    return {key: text[key] for key in sorted(SHAPE_KEYS & text.keys()) if size_trouble(key, text[key]) is None}


def _alike(known: dict[str, Any], config: dict[str, Any]) -> bool:
    """Check that a configuration has the same sizes as a published one, under any name."""
    same = known.get("model_type") == config.get("model_type")
    ours, theirs = shape_of(known), shape_of(config)
    return (
        same
        and bool(ours)
        and all(theirs.get(key) == value for key, value in ours.items() if key in theirs)
        and (len(ours.keys() & theirs.keys()) >= 4)
    )


@cache
def public_architectures() -> frozenset[str]:
    """Return transformers' own names of architectures."""
    tasks = json.loads((resources.files("autotune") / "data" / "tasks.json").read_text(encoding="utf-8"))
    names = {spec.config.get("model_type") for spec in shipped_models().values()}
    for listed in tasks.values():
        if isinstance(listed, list):
            names |= set(listed)
    return frozenset(str(name) for name in names if isinstance(name, str) and re.fullmatch(NAME, name))


def _versions(versions: dict[str, str]) -> Versions:
    found = {name: _version(versions.get(name, "")) for name in ("torch", "deepspeed", "transformers")}
    return Versions(**found)


def _version(text: str) -> str | None:
    """Return a version without the suffix of a custom build."""
    return next((one for one in (text, text.partition("+")[0]) if re.fullmatch(VERSION, one)), None)


def _space(store: StudyStore) -> dict[str, list[Value]]:
    try:
        knobs = store.searched_space().knobs
    except UserError:
        return {}
    return {
        name: values
        for name, domain in knobs.items()
        if (values := [value for value in domain.values if knob_trouble(name, value) is None])
    }
