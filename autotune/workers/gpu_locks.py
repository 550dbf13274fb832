"""Locks that give a GPU to one study or training at a time.

Two of them on one card would attribute each other's memory and speed to a candidate. The lock of a card is an abstract Unix
socket with its UUID in the name, which one process can bind: unix(7). The kernel releases it whenever the holder ends, and no
file remains. A second name, which /proc/net/unix shows to every user, tells who the holder is.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from autotune.errors import UserError
from autotune.problem.hardware import Hardware

_LONGEST_NAME = 107  # bytes of a name, without the first one, which is zero


@contextmanager
def lock_gpus(hardware: Hardware, who: str) -> Iterator[None]:
    """Hold the GPUs of `hardware` for this process. CPU ranks have none, and neither have GPUs that are only named.

    Args:
        who: name of the holder in messages of other processes: `study NAME`.

    Raises:
        UserError: another autotune process holds one of the GPUs.
    """
    end = f", pid {os.getpid()}".encode()
    with ExitStack() as held:
        for uuid in hardware.gpus:
            lock, shown = (held.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(2))
            try:
                lock.bind(f"\0{_name(uuid)}")
            except OSError:
                raise UserError(
                    f"{uuid} is in use by autotune ({lock_holder(uuid) or 'another process'}): wait for it, or choose other "
                    "GPUs with CUDA_VISIBLE_DEVICES"
                ) from None
            named = f"{_name(uuid)} {' '.join(who.split())}".encode()
            shown.bind(b"\0" + named[: _LONGEST_NAME - len(end)] + end)
        yield


def lock_holder(uuid: str) -> str:
    """Return the holder of a GPU, or an empty string if it is free."""
    mark = f" @{_name(uuid)} "
    lines = Path("/proc/net/unix").read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line.partition(mark)[2] for line in lines if mark in line), "")


def _name(uuid: str) -> str:
    return f"autotune-{uuid}"
