"""Calls of torchrun, `spawn` and similar launchers inside a script."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from autotune.errors import Unusable, UserError
from autotune.rank.hooks import accelerate
from autotune.rank.hooks.base import Context
from autotune.rank.measure import ACCELERATE_MODULE, run_target
from autotune.rank.patches import Call
from autotune.rank.versions import import_or_none
from autotune.script.command_line import ACCELERATE, DEEPSPEED, TORCHRUN, CommandLine, take_apart
from autotune.script.script import line_of

# -- launchers as subprocesses -----------------------------------------------------------------------------------------
#
# Hook programs that start their ranks themselves: this rank continues as one of them.
#
# A framework's command (`llamafactory-cli train`, `swift sft`, `axolotl train`, `trl sft`) and `accelerate launch` run
# here until they start processes. They start them by `subprocess`, `os.exec…` or torch's launcher. The started program
# then runs in this process with its intended environment. The command ends with the program's exit code.

_DEEPEST = 5  # nested starters
# The rank keeps its own values of these: rendezvous, rank and compute resources.
_OURS = {
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "DS_ACCELERATOR"),
}
_ACCUMULATION = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"


def install_relaunch(context: Context) -> None:
    """Install the hooks. torch's launcher is imported only for installed commands and accelerate's launcher."""
    taken = _Takeover(context)

    def popen(call: Call) -> None:
        taken.over(_words(call.given["args"]), call.given["env"])
        call()

    def replace(call: Call) -> Any:
        file, words, env = [*call.args, None][:3]
        taken.over([os.fsdecode(file), *list(words)[1:]], env)
        return call()

    def system(call: Call) -> Any:
        taken.over(_words(call.given["command"]), None)
        return call()

    context.patches.wrap(subprocess.Popen, "__init__", popen)
    for name in ("execv", "execvp", "execve", "execvpe"):
        context.patches.wrap(os, name, replace)
    context.patches.wrap(os, "system", system)
    line = line_of(context.script)
    _announce(context, line)
    if context.script.program is None and line.kind != ACCELERATE:
        return
    import torch.distributed.run

    def run(call: Call) -> Any:
        options = call.given["args"]
        module = ["-m"] if options.module else []
        taken.start([*module, options.training_script, *options.training_script_args], None, options.nproc_per_node)

    context.patches.wrap(torch.distributed.run, "run", run)


class _Takeover:
    """State of this rank in a chain of programs that start each other."""

    def __init__(self, context: Context) -> None:
        self._context, self._depth = context, 0
        self._home = sys.path[:]
        # every Python process that the running launcher starts is a rank
        self._launching = line_of(context.script).kind == ACCELERATE

    def over(self, words: list[str], env: Mapping[str, str] | None) -> None:
        """Continue as the started program if it would be a rank; otherwise return.

        Programs that a script starts after its engine exists are never ranks.
        """
        if self._context.engine is not None:
            return
        try:
            line = take_apart(words)
        except UserError:
            return  # `torchrun --help`
        target = list(line.target)
        if not target:
            return
        if line.kind == ACCELERATE:
            if target[0] == "-m":
                target[0] = "--module"
            self.start(["-m", ACCELERATE_MODULE, *line.launcher[line.head :], *target], env, None, launching=True)
        if line.kind:
            if line.gives_local_rank:
                target.insert(1 + (target[0] == "-m"), f"--local_rank={os.environ['LOCAL_RANK']}")
            self.start(target, env, line.ranks)
        if line.python and (self._launching or (not self._depth and self._starts_itself(target))):
            self.start(target, env, None)

    def start(
        self, target: list[str], env: Mapping[str, str] | None, ranks: int | str | None, *, launching: bool = False
    ) -> NoReturn:
        """Run the target in place of a new process.

        Args:
            env: environment of the new process; None means this one's.
            ranks: number of ranks that would have been started, if known.
            launching: True if the target is a launcher itself.
        """
        self._depth += 1
        self._launching = launching
        if self._depth > _DEEPEST:
            raise RuntimeError(f"{self._context.script.target} starts itself again and again: {shlex.join(target)}")
        self._context.relaunched = (
            int(ranks) if ranks is not None and str(ranks).isdigit() else self._context.relaunched or 1
        )
        for of_starter in (self._context.integers, self._context.flags, self._context.spellings):
            of_starter.clear()  # what the starter's own parser has read
        self._take(env if env is not None else os.environ)
        accelerate.begin_anew()
        sys.path[:] = self._home
        run_target(target)  # its exception propagates with its context
        raise SystemExit(0)

    def _take(self, env: Mapping[str, str]) -> None:
        patches, batch = self._context.patches, self._context.batch
        for name, value in env.items():
            if name not in _OURS and os.environ.get(name) != value:
                patches.set_environment(name, value)
        for folder in env.get("PYTHONPATH", "").split(os.pathsep):
            if folder and folder not in self._home:
                self._home.insert(0, folder)
        if batch is not None and _ACCUMULATION in os.environ:
            patches.set_environment(_ACCUMULATION, str(batch[1]))
        patches.set_environment("TORCHELASTIC_RUN_ID", "none")

    def _starts_itself(self, target: Sequence[str]) -> bool:
        """Return True if an installed command starts a file or a module of its package."""
        if self._context.script.program is None:
            return False
        names = set(
            re.findall(r"\w+", Path(self._context.script.program).read_text(errors="replace", encoding="utf-8"))
        )
        if target[0] == "-m":
            return len(target) > 1 and target[1].partition(".")[0] in names
        file = Path(target[0]).resolve()
        folders = [Path(path).resolve() for name in names for path in getattr(sys.modules.get(name), "__path__", ())]
        return any(file.is_relative_to(folder) for folder in folders)


_ANNOUNCED = {  # variables of each launcher, with the variable of this rank that has the value, and the value without it
    TORCHRUN: {
        "GROUP_RANK": ("GROUP_RANK", "0"),
        "GROUP_WORLD_SIZE": ("GROUP_WORLD_SIZE", "1"),
        "ROLE_NAME": ("", "default"),
        "ROLE_RANK": ("RANK", "0"),
        "ROLE_WORLD_SIZE": ("WORLD_SIZE", "1"),
        "TORCHELASTIC_RESTART_COUNT": ("", "0"),
        "TORCHELASTIC_MAX_RESTARTS": ("", "0"),
        "TORCHELASTIC_RUN_ID": ("", "none"),
    },
    DEEPSPEED: {
        "CROSS_RANK": ("GROUP_RANK", "0"),
        "CROSS_SIZE": ("GROUP_WORLD_SIZE", "1"),
        "LOCAL_SIZE": ("LOCAL_WORLD_SIZE", "1"),
    },
}


def _announce(context: Context, line: CommandLine) -> None:
    """Set the variables that a typed launcher sets for its ranks; accelerate's own code sets its variables."""
    for name, (source, default) in _ANNOUNCED.get(line.kind, {}).items():
        context.patches.set_environment(name, os.environ.get(source, default))


def _words(command: Any) -> list[str]:
    if isinstance(command, str | bytes | os.PathLike):
        text = os.fsdecode(command)
        try:
            return shlex.split(text)
        except ValueError:
            return []
    return [os.fsdecode(word) for word in command] if isinstance(command, Sequence) else []


# -- spawned functions -------------------------------------------------------------------------------------------------
#
# Hook scripts that start their ranks by a function: this rank calls the function as one of them.
#
# `torch.multiprocessing.spawn`, `start_processes` and accelerate's `notebook_launcher` start N processes that call one
# function. Here the existing ranks take their place. They keep their process group, and the function's address and port
# have no effect (`process_group.py`).


def install_spawning(context: Context) -> None:
    """Install the hooks unless a launcher was typed, which has already started the ranks."""
    if line_of(context.script).kind:
        return
    import torch.multiprocessing

    def start_processes(call: Call) -> Any:
        given = call.given
        if not given["nprocs"] or not _starts_ranks(context):
            return call()
        number = _local_rank(context, given["nprocs"], "torch.multiprocessing")
        _call(context, given["fn"], (number, *given["args"]))
        return None if given["join"] else _Ended()

    # the function `spawn` hides the module of that name
    for owner in (torch.multiprocessing, sys.modules["torch.multiprocessing.spawn"]):
        context.patches.wrap(owner, "start_processes", start_processes)
    if (launchers := import_or_none("accelerate", "launchers")) is None:
        return

    def notebook_launcher(call: Call) -> Any:
        """Wrap accelerate's function, which sets the ranks' environment itself and calls torch's launcher."""
        from torch.distributed.launcher.api import elastic_launch  # the import takes a tenth of a second

        def launch(started: Call) -> Any:
            launcher, *arguments = started.args
            if not _starts_ranks(context):
                return started()
            _local_rank(context, launcher._config.nproc_per_node, "accelerate's notebook_launcher")
            return {int(os.environ["RANK"]): _call(context, launcher._entrypoint, tuple(arguments))}

        context.patches.wrap(elastic_launch, "__call__", launch)
        return call()

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
    from autotune.rank import devices  # imports torch

    ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    if started != ranks and not (context.device == "cuda" and devices.device_count() == started > ranks):
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
