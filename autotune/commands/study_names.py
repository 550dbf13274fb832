"""What a study is called where nobody has named it, and where it lies."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from autotune.errors import UserError
from autotune.problem.hardware import Hardware
from autotune.problem.job import Job
from autotune.search.fingerprint import identity


def study_name(job: Job, hardware: Hardware, global_batch_size: int | str | None = None) -> str:
    """The same for the same job on the same machine, so that the same command resumes.

    Args:
        global_batch_size: as asked for, `free` included: of a script the job is not known yet.
    """
    key = hashlib.sha256(json.dumps(identity(job, hardware), sort_keys=True).encode()).hexdigest()[:6]
    if job.script:
        cap = hardware.memory_cap_bytes
        asked = [f"{what}{value}" for what, value in (("b", global_batch_size), ("c", cap)) if value]
        key = hashlib.sha256(" ".join([job.script.key, *asked]).encode()).hexdigest() if asked else job.script.key
        key = key[:6]
    return f"{job.model.name}-{hardware.count}x{hardware.facts or hardware.device}-{key}"


def study_folder(runs: Path, name: str) -> Path:
    """`runs/NAME`, made or not.

    Raises:
        UserError: it is no plain name.
    """
    if not name or "/" in name or name.startswith(".") or len(name) > 120:
        raise UserError(f"--study {name!r}: expected a plain name, without slashes and not starting with a dot")
    return runs / name
