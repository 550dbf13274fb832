"""Scripts that start their ranks by a function: this rank is one of those, and calls it.

`torch.multiprocessing.spawn` and `start_processes`, and accelerate's `notebook_launcher`, start N processes that call the same
function. Here these are the ranks that there are already. The group that they have joined stays, whatever address and port the
function says (`process_group.py`).
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from autotune.errors import Unusable
from autotune.problem.script import line_of
from autotune.rank.hooks.context import Context
from autotune.rank.versions import imported


def install(context: Context) -> None:
    """Where a launcher was typed the script's ranks are started already, and what it starts is something else."""
    if line_of(context.script).kind:
        return
    import torch.multiprocessing

    def start_processes(original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        call = inspect.signature(original).bind(*args, **kwargs)
        call.apply_defaults()
        given = call.arguments
        if not given["nprocs"] or not _starts_ranks(context):
            return original(*args, **kwargs)
        number = _local_rank(context, given["nprocs"], "torch.multiprocessing")
        _call(context, given["fn"], (number, *given["args"]))
        return None if given["join"] else _Ended()

    # `spawn` is a function of the module of that name, which it hides
    for owner in (torch.multiprocessing, sys.modules["torch.multiprocessing.spawn"]):
        context.patches.wrap(owner, "start_processes", start_processes)
    if (launchers := imported("accelerate", "launchers")) is None:
        return

    def notebook_launcher(original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Sets the environment of its ranks itself, and leaves starting them to torch's launcher."""
        from torch.distributed.launcher.api import elastic_launch  # a tenth of a second

        def launch(started: Callable[..., Any], launcher: Any, /, *args: Any) -> Any:
            if not _starts_ranks(context):
                return started(launcher, *args)
            _local_rank(context, launcher._config.nproc_per_node, "accelerate's notebook_launcher")
            return {int(os.environ["RANK"]): _call(context, launcher._entrypoint, args)}

        context.patches.wrap(elastic_launch, "__call__", launch)
        return original(*args, **kwargs)

    for owner in (launchers, sys.modules["accelerate"]):
        context.patches.wrap(owner, "notebook_launcher", notebook_launcher)


class _Ended:
    """What `start_processes(join=False)` gives: the context of processes, all of which have ended."""

    processes: Sequence[Any] = ()

    def pids(self) -> list[int]:
        return []

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        return True


def _starts_ranks(context: Context) -> bool:
    """Whether what is started now can only be the ranks: this process has neither been started as one nor does it train."""
    return context.engine is None and not context.relaunched


def _local_rank(context: Context, started: int, by: str) -> int:
    """The number of this rank among those that the script starts on a machine.

    Raises:
        Unusable: it starts others than there are, and not one for each GPU.
    """
    from autotune.rank import cuda  # imports torch

    ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    if started != ranks and not (context.device == "cuda" and cuda.device_count() == started > ranks):
        raise Unusable(
            f"{context.script.target} starts {started} processes by itself ({by}), and here are {ranks} ranks: give --gpus "
            f"{started}, or let it start {ranks}"
        )
    context.relaunched = started
    return int(os.environ["LOCAL_RANK"])


def _call(context: Context, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Calls it as a new process would. What comes after it is for the process that has started all others: where these were
    ranks, the first one goes on as that.

    Raises:
        SystemExit: of the function's, with its code, or since another rank goes on.
    """
    found = None
    try:
        found = function(*arguments)
    except SystemExit as ended:
        if ended.code not in (None, 0):
            raise
    if context.engine is None:
        context.relaunched = 0  # they have prepared something: its ranks are started elsewhere
    elif os.environ["LOCAL_RANK"] != "0":
        raise SystemExit(0)
    return found
