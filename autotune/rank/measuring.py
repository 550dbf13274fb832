"""Shared parts of the measuring ranks: start, end, and the saves and loads that verify a candidate."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from autotune.errors import Unusable
from autotune.group.extensions import use_own_folder
from autotune.group.protocol import Message
from autotune.problem.checkpoint import checkpoint_bytes
from autotune.problem.outcome import Phase
from autotune.rank.base import EXIT_REPORTED, BaseRank, greet, leave
from autotune.rank.sandbox import Sandbox


def run_as(kind: type[BaseRank]) -> NoReturn:
    """Run a rank from the command line (a cold start): address of the parent's socket, and rank number."""
    measure_as(kind, sys.argv[1], int(sys.argv[2]))


def measure_as(kind: type[BaseRank], address: str, number: int) -> NoReturn:
    """Turn this process into rank `number` of the group of the parent at `address`, a Unix socket.

    The rank runs, reports how it ended, and leaves without waiting for its peers.
    """
    # Temporary folder of multiprocessing for this process and its children. A folder that multiprocessing creates
    # itself would remain after a kill.
    multiprocessing.current_process()._config["tempdir"] = os.path.dirname(address)  # type: ignore[attr-defined]
    channel, spec = greet(address, number)
    for caught in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):  # handlers of the fork server, not of ranks
        signal.signal(caught, signal.SIG_DFL)
    _redirect_output(spec["log"])
    _offer_to_the_kernel()
    rank = kind(channel, spec)
    try:
        if confined := spec.get("sandbox"):
            use_own_folder()  # this cache outlives the trial
            environment = {**os.environ, **spec.get("env", {})}
            try:
                Sandbox.from_json(confined).enter(os.path.dirname(address), environment)
            except OSError as error:
                raise Unusable(
                    f"the sandbox of a trial cannot be entered ({error}): `autotune doctor` says why"
                ) from error
        rank.run()
    except BaseException as error:
        rank.report(error)
        leave(EXIT_REPORTED)
    say_goodbye(rank)


def say_goodbye(rank: BaseRank) -> NoReturn:
    """End a rank that has done all its work."""
    rank.channel.send("bye")
    leave(0)


def _redirect_output(log: str) -> None:
    """Redirect standard output and error to the log, and empty standard input."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)


def _offer_to_the_kernel() -> None:
    """Make the kernel kill a trial's ranks first on a host OOM, so that the tuner survives and can classify it."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="utf-8")


def certify_save(rank: BaseRank, save: Callable[[str, str], Any]) -> None:
    """Answer a `certify` message by gathering the weights as a save in training does. Every rank must call this.

    The bytes are written nowhere, because the speed of a disk is not attributable to the candidate.

    Args:
        save: saves the engine's gathered 16-bit weights into a folder under a name; returns True on success.
    """
    rank.phase = Phase.SAVE
    rank.fault(Phase.SAVE)
    null = Path(os.devnull)
    saved = bool(save(str(null.parent), null.name))
    rank.own_device.synchronize()
    rank.channel.send("measured", certified=True, saved=saved, **rank.own_device.peaks())


def checkpoint(rank: BaseRank, engine: Any, save: Callable[[str], Any], message: Message) -> None:
    """Answer a `checkpoint` message by a full checkpoint in `message["folder"]`. Every rank must call this.

    A fresh group can resume from it. The answer is `checkpointed=False` if the disk has too little space.
    """
    rank.phase = Phase.SAVE
    sizes = [(getattr(p, "ds_numel", p.numel()), p.requires_grad) for p in engine.module.parameters()]
    most_bytes = checkpoint_bytes(
        sum(n for n, trained in sizes if trained), sum(n for n, trained in sizes if not trained)
    )
    free_bytes = rank.reduce([float(shutil.disk_usage(message["folder"]).free)], "MIN")[0]
    room = free_bytes > 1.1 * most_bytes
    if room:
        save(message["folder"])
    rank.channel.send("measured", checkpointed=room)


def load(rank: BaseRank, load_checkpoint: Callable[[str], Any]) -> None:
    """Load the checkpoint named in the spec into a fresh engine, and send the peak memory of the load.

    Args:
        load_checkpoint: DeepSpeed's method of the engine.
    """
    folder = rank.spec.get("resume")
    if not folder:
        return
    rank.enter(Phase.LOAD)
    rank.fault(Phase.LOAD)
    device = rank.own_device
    device.reset_peaks()
    path, _ = load_checkpoint(folder)
    if path is None:
        raise RuntimeError("DeepSpeed found nothing to load in its own checkpoint")
    device.synchronize()
    device.note()
    rank.channel.send("loaded", **device.peaks())
