"""Search space narrowed to one job and one machine: choices that the job lacks or the machine cannot run are removed."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from autotune.errors import UserError
from autotune.problem.candidate import (
    ACCUMULATION,
    CHECKPOINTING,
    COMPILED,
    MICRO_BATCH,
    MODEL_KNOBS,
    PACKING,
    TRACED_KNOBS,
    Value,
    knobs_of,
    settings_of,
)
from autotune.problem.hardware import Hardware
from autotune.problem.job import Job
from autotune.problem.knobs import FIRST_ORDER, KNOBS, is_off
from autotune.problem.needs import FATAL, OF_PACKAGES, READ, Circumstances, Release
from autotune.problem.space import Domain, SearchSpace
from autotune.problem.tasks import CAUSAL
from autotune.versions import dotted


class Fitted(NamedTuple):
    """Space narrowed to a job and a machine, and a line for each setting that was left out, with its reason."""

    space: SearchSpace
    notes: list[str]


def fitted(space: SearchSpace, job: Job, hardware: Hardware, *, here: bool = True) -> Fitted:
    """Return the space for this job on this machine, and the settings that were left out.

    Args:
        here: ranks would run in the environment of this call. If False, a study is read: other packages may be installed, or this
            version may know more needs of a knob. Then knobs fixed by hand may be left out, too.

    Raises:
        UserError: a knob fixed by hand, in the space or in the user's own config, is not available here; or a space of the user's
            has a knob that the installed DeepSpeed does not know.
    """
    own = for_job(space, job)
    compiles = COMPILED in own.knobs and True in own.knobs[COMPILED].values
    around = Circumstances.of(job, hardware, space.lossy, compiles)
    if here:
        _check_own(around)
    else:
        around = dataclasses.replace(around, deepspeed=READ, packages=False)
    knobs: dict[str, Domain] = {}
    lacking: dict[str, list[str]] = {}  # missing requirement -> settings that lack it
    referred = {condition for domain in own.knobs.values() for condition, _ in domain.when}
    for name, domain in own.knobs.items():
        missing = {value: why for value in domain.values if (why := unmet(name, value, around))}
        for value, why in missing.items():
            lacking.setdefault(why, []).append(f"{name} {value}")
        left = _left(name, domain, missing, around, space)
        if left is not None and (name in referred or not _nothing_but_off(name, left, around)):
            knobs[name] = left
    notes = [f"{', '.join(settings)} {why}: left out" for why, settings in lacking.items()]
    narrowed = dataclasses.replace(own, knobs=knobs)
    unread = narrowed.never_read() & KNOBS.keys() & space.knobs.keys()
    for name in sorted(unread):
        why = f"{name} is read by no candidate of space {space.name}: it needs {KNOBS[name].read.where}"
        # An error is raised only for knobs that gain nothing without their conditions. Buckets and offloading that a stage does
        # not read are common.
        if here and knobs[name].fixed and KNOBS[name].needs and name not in FIRST_ORDER:
            raise UserError(f"{why}; leave it out of `fixed`, or give it what it needs")
        notes.append(f"{why}: left out")
        del knobs[name]
    return Fitted(dataclasses.replace(own, knobs=knobs), notes)


def _check_own(around: Circumstances) -> None:
    """Raise UserError for a knob of the user's own config with which DeepSpeed fails here.

    DeepSpeed may ignore other knobs, and a script with them was seen to start.
    """
    around = dataclasses.replace(around, lossy=True, compiles=True)
    for name, value in settings_of(around.job.base_config).items():
        if name not in KNOBS or is_off(name, value, around.job.precision):
            continue
        fatal = (why for need in KNOBS[name].needs if need in FATAL and (why := need(value, around)))
        if why := _unknown(name, around.deepspeed) or next(fatal, ""):
            raise UserError(f"your own DeepSpeed config: {name} {value} {why}; leave it out")


def _left(
    name: str, domain: Domain, missing: dict[Value, str], around: Circumstances, space: SearchSpace
) -> Domain | None:
    """Return the knob's domain without values that lack a requirement, or None if no value is left."""
    if not missing:
        return domain
    value, why = next(iter(missing.items()))
    unknown = not space.shipped and why == _unknown(name, around.deepspeed)
    if around.packages and (domain.fixed or unknown):
        raise UserError(f"space {space.name}: {name} {value} {why}; leave it out")
    left = tuple(one for one in domain.values if one not in missing)
    if not left and KNOBS[name].off is None:
        raise UserError(f"space {space.name}: {name} {value} {why}; add another value, or leave {name} out")
    return dataclasses.replace(domain, values=left) if left else None


def _nothing_but_off(name: str, domain: Domain, around: Circumstances) -> bool:
    """Check that a knob's only remaining value is its absence, and that a config may leave it out.

    Either the knob was narrowed to that value, or this DeepSpeed refuses its name.
    """
    knob = KNOBS.get(name)
    off = knob is not None and all(is_off(name, one) for one in domain.values)
    return off and (not domain.fixed or bool(_unknown(name, around.deepspeed)))


def unmet(name: str, value: Value, around: Circumstances) -> str:
    """Return the requirement that a setting lacks here, as the predicate of a sentence; empty if it lacks none."""
    knob = KNOBS.get(name)
    if knob is None or is_off(name, value, around.job.precision):
        return ""
    asked = (need for need in knob.needs if around.packages or need not in OF_PACKAGES)
    return _unknown(name, around.deepspeed) or next((why for need in asked if (why := need(value, around))), "")


def _unknown(name: str, deepspeed: Release) -> str:
    """Return why a DeepSpeed does not know the knob, and which versions do; empty if it knows it."""
    knob = KNOBS[name]
    own, since, until = map(dotted, (deepspeed, knob.since, knob.until))
    if deepspeed < knob.since:
        return f"is not known to deepspeed {own}: {since} or newer knows it"
    if knob.until and deepspeed > knob.until:
        return f"is not known to deepspeed {own} any more: {until} was the last that knew it"
    return ""


def for_job(space: SearchSpace, job: Job) -> SearchSpace:
    """Return the space for this job.

    Knobs that the user's own config sets and the space does not tune are fixed at their values. Knobs that cannot be passed to
    the job's script or workload are left out.
    """
    knobs = dict(_with_base(space, job.base_config).knobs)
    if job.workload is not None:
        for knob in TRACED_KNOBS:
            knobs.pop(knob, None)
    if not job.lengths or job.task != CAUSAL:
        knobs.pop(PACKING, None)
    if job.script is None:
        return dataclasses.replace(space, knobs=knobs)
    seen = job.script.profile
    for knob in MODEL_KNOBS:
        knobs.pop(knob, None)
    if not seen["checkpointing"]:
        knobs.pop(CHECKPOINTING, None)
    if seen.get("checkpointed"):  # no switch for it was found, so that it stays on
        knobs.setdefault(CHECKPOINTING, Domain((True,)))
    if seen["batch_note"]:
        knobs |= {MICRO_BATCH: Domain((seen["micro_batch"],)), ACCUMULATION: Domain((seen["accumulation"],))}
    return dataclasses.replace(space, knobs=knobs)


def _with_base(space: SearchSpace, base: dict[str, Any]) -> SearchSpace:
    knobs = dict(space.knobs)
    for name, value in knobs_of(base).items():
        knobs.setdefault(name, Domain((value,)))
    return dataclasses.replace(space, knobs=knobs)
