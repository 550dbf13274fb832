"""DeepSpeed's JIT ops: loaded, and built where this machine has not yet.

torch guards every build by a lock file and waits for it without end. A build that was killed leaves its lock behind, and
from then on every process that wants the op hangs: training, DeepSpeed's own tuner, `ds_report`. Locks that no process
holds are therefore broken first.
"""

from __future__ import annotations

import time
from pathlib import Path

from autotune.linux import is_open

LIVELY_SECONDS = 120.0  # a folder that changed this lately may be building on another host with the same home


def load_ops(names: list[str]) -> dict[str, str]:
    """Loads the named DeepSpeed ops; returns what failed and why."""
    from deepspeed.accelerator import get_accelerator

    failed = {}
    for name in names:
        try:
            builder = get_accelerator().create_op_builder(name)
            if builder is not None:
                wait_for_lock(_build_folder(builder.name) / "lock")
                builder.load(verbose=False)
        except Exception as error:
            failed[name] = str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__
    return failed


def wait_for_lock(lock: Path, lively_seconds: float = LIVELY_SECONDS) -> None:
    """Returns when nobody builds behind `lock`, having removed the file if whoever made it is gone."""
    while lock.exists():
        if not is_open(lock) and time.time() - _last_change(lock.parent) > lively_seconds:
            lock.unlink(missing_ok=True)
            print(f"removed {lock}: the build that made it is gone", flush=True)
            return
        time.sleep(0.2)


def _build_folder(op: str) -> Path:
    """Where torch builds the extension, by torch's own rule."""
    from torch.utils.cpp_extension import _get_build_directory

    return Path(_get_build_directory(op, verbose=False))


def _last_change(folder: Path) -> float:
    """Seconds since the epoch."""
    times = []
    for entry in folder.iterdir():
        try:
            times.append(entry.stat().st_mtime)
        except FileNotFoundError:
            continue
    return max(times, default=0.0)
