"""Hook scripts that start their ranks by a function: this rank calls the function as one of them.

`torch.multiprocessing.spawn`, `start_processes` and accelerate's `notebook_launcher` start N processes that call one
function. Here the existing ranks take their place. They keep their process group, and the function's address and port
have no effect (`process_group.py`).
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
    """Install the hooks unless a launcher was typed, which has already started the ranks."""
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

    # the function `spawn` hides the module of that name
    for owner in (torch.multiprocessing, sys.modules["torch.multiprocessing.spawn"]):
        context.patches.wrap(owner, "start_processes", start_processes)
    if (launchers := imported("accelerate", "launchers")) is None:
        return

    def notebook_launcher(original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Wrap accelerate's function, which sets the ranks' environment itself and calls torch's launcher."""
        from torch.distributed.launcher.api import elastic_launch  # the import takes a tenth of a second

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
    """Result of `start_processes(join=False)`: a context whose processes have all ended."""

    processes: Sequence[Any] = ()

    def pids(self) -> list[int]:
        return []

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        return True


def _starts_ranks(context: Context) -> bool:
    """Return True if this process is not yet a started rank and does not train, so it can only start ranks."""
    return context.engine is None and not context.relaunched


def _local_rank(context: Context, started: int, by: str) -> int:
    """Return this rank's number among those that the script starts on a machine.

    Raises:
        Unusable: the number differs from that of the ranks, and is not one per GPU.
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
    """Call the function like a new process, and continue as the starting process on the first rank.

    Raises:
        SystemExit: the function's own, with its code, or the end of any rank except the first.
    """
    found = None
    try:
        found = function(*arguments)
    except SystemExit as ended:
        if ended.code not in (None, 0):
            raise
    if context.engine is None:
        context.relaunched = 0  # the function only prepared something, and ranks are started elsewhere
    elif os.environ["LOCAL_RANK"] != "0":
        raise SystemExit(0)
    return found
