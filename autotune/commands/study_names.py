"""Name of a study without a typed name, and its folder."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from autotune.errors import UserError
from autotune.problem.hardware import Hardware
from autotune.problem.job import Job
from autotune.problem.sources import MEMORY, SOURCES, digests, edited_since
from autotune.search.fingerprint import identity

_LONGEST = 120  # characters of a name
# files of these names exist in a study's folder, besides the winner's NAME.json and NAME.html
_TAKEN = ("probe", "share", "launch", "confidential")


def study_name(job: Job, hardware: Hardware, global_batch_size: int | str | None = None) -> str:
    """Return a name that is stable for a job on a machine, so that the same command resumes.

    Args:
        global_batch_size: as requested, `free` included; a script's job is not known yet.
    """
    key = hashlib.sha256(json.dumps(identity(job, hardware), sort_keys=True).encode()).hexdigest()[:6]
    if job.script:
        cap = hardware.memory_cap_bytes
        asked = [f"{what}{value}" for what, value in (("b", global_batch_size), ("c", cap)) if value]
        key = hashlib.sha256(" ".join([job.script.key, *asked]).encode()).hexdigest() if asked else job.script.key
        key = key[:6]
    rest = f"-{hardware.count}x{hardware.facts or hardware.device}-{key}"
    model = job.model.name.lstrip(".-") or "model"  # a folder may have a name that a study may not
    return f"{model[: _LONGEST - len(rest)]}{rest}"


def name_since_edits(name: str, runs: Path, job: Job) -> tuple[str, list[str]]:
    """Return the name of a study without a typed name, and lines for display.

    If files that the script uses were edited since the study was made, another name is returned, which the same texts find again.
    Otherwise the name is unchanged and there are no lines.
    """
    first, changed = name, list[str]()
    while job.script is not None:
        memory = runs / name / MEMORY
        known = json.loads(memory.read_text(encoding="utf-8"))["profile"].get(SOURCES, {}) if memory.is_file() else {}
        if not (found := edited_since(known, job.script.cwd)):
            break
        texts = json.dumps([name, digests(known, job.script.cwd)], sort_keys=True)
        name, changed = f"{first}-{hashlib.sha256(texts.encode()).hexdigest()[:4]}", [*changed, *found]
    if not changed:
        return name, []
    files = ", ".join(dict.fromkeys(changed))
    verb = "were" if len(set(changed)) > 1 else "was"
    return name, [f"{files} {verb} edited since study {first}: this is another, {name} (--force goes on with {first})"]


def study_folder(runs: Path, name: str) -> Path:
    """Return `runs/NAME`, which need not exist.

    Raises:
        UserError: the name is not plain.
    """
    if not name or "/" in name or name[0] in ".-" or len(name) > _LONGEST or not name.isprintable():
        raise UserError(
            f"--study {name!r}: expected a plain name of at most {_LONGEST} letters, without slashes and not starting with a "
            "dot or a hyphen"
        )
    if name in _TAKEN:
        raise UserError(f"--study {name}: its folder has a file of that name for something else; choose another")
    return runs / name
