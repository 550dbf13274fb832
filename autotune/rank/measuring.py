"""What the two ranks that measure share: how they start and end, and the save that certifies a candidate."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from autotune.group.protocol import Message
from autotune.problem.outcome import Phase
from autotune.rank.base import EXIT_REPORTED, BaseRank, greet, leave

_SAVED_BYTES_PER_PARAMETER = 4  # of an engine that trains in fp32; of others half as much


def measure_as(kind: type[BaseRank], address: str, number: int) -> NoReturn:
    """Runs a rank of this kind, reports how it ended, and leaves without waiting for its peers."""
    channel, spec = greet(address, number)
    for caught in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):  # the fork server handles them, its children do not
        signal.signal(caught, signal.SIG_DFL)
    _redirect_output(spec["log"])
    _offer_to_the_kernel()
    rank = kind(channel, spec)
    try:
        rank.run()
    except BaseException as error:
        rank.report(error)
        leave(EXIT_REPORTED)
    say_goodbye(rank)


def say_goodbye(rank: BaseRank) -> NoReturn:
    """The end of a rank that has done what it was asked for."""
    rank.channel.send("bye")
    leave(0)


def _redirect_output(log: str) -> None:
    """Standard output and error go to the log, standard input is empty."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)


def _offer_to_the_kernel() -> None:
    """Where main memory runs out the kernel kills a trial's ranks first: the tuner lives on, and knows why."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def certify_save(rank: BaseRank, engine: Any, save: Callable[[str], Any], message: Message) -> None:
    """Answers a `certify` message by a save of the gathered weights, as training would make one, and removes it.

    Nothing is saved where the engine's config does not gather its weights, or where the disk has not room for twice the
    file. Every rank calls it.

    Args:
        save: of the engine's gathered 16-bit weights into a folder; whether it did.
    """
    rank.phase = Phase.SAVE
    saved = False
    parameters = sum(getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters())
    gathers = engine.zero_optimization_stage() < 3 or engine.zero_gather_16bit_weights_on_model_save()
    free_bytes = shutil.disk_usage(message["folder"]).free
    if gathers and free_bytes > 2 * _SAVED_BYTES_PER_PARAMETER * parameters:
        with tempfile.TemporaryDirectory(dir=message["folder"]) as folder:
            saved = bool(save(folder))
            if rank.world > 1:
                rank.torch.distributed.barrier()
    device = rank.own_device
    device.synchronize()
    rank.channel.send("measured", certified=True, saved=saved, **device.peaks())
