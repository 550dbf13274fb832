"""Measurement protocol: warm-up, timed steps, and execution of the script."""

from __future__ import annotations

import math
import multiprocessing
import os
import runpy
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NoReturn

from autotune.errors import Unusable
from autotune.problem.job import Script, checkpoint_bytes
from autotune.problem.outcome import Phase
from autotune.rank.base import EXIT_REPORTED, BaseRank, connect_to_parent, exit_process
from autotune.rank.sandbox import Sandbox
from autotune.rank.step_statistics import MAX_TIMED_MICRO_BATCHES, OVERRUN, UNLIKE, pace_of
from autotune.script.command_line import ACCELERATE
from autotune.script.script import line_of
from autotune.util.linux import drop_capabilities
from autotune.workers.jit_ops import use_own_folder
from autotune.workers.protocol import Message

# -- parts of all measuring ranks --------------------------------------------------------------------------------------


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
    channel, spec = connect_to_parent(address, number)
    for caught in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):  # handlers of the fork server, not of ranks
        signal.signal(caught, signal.SIG_DFL)
    _redirect_output(spec["log"])
    with suppress(OSError):  # on a host OOM the kernel kills a trial's ranks first, so that the tuner can classify it
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="utf-8")
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
        else:
            drop_capabilities()
        rank.run()
    except BaseException as error:
        rank.report(error)
        exit_process(EXIT_REPORTED)
    finish_rank(rank)


def finish_rank(rank: BaseRank) -> NoReturn:
    """End a rank that has done all its work."""
    rank.channel.send("bye")
    exit_process(0)


def _redirect_output(log: str) -> None:
    """Redirect standard output and error to the log, and empty standard input."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)


def certify_save(rank: BaseRank, save: Callable[[str, str], Any]) -> None:
    """Answer a `certify` message by gathering the weights as a save in training does. Every rank must call this.

    The bytes are written nowhere, because the speed of a disk is not attributable to the candidate. `save` takes a
    folder and a name, and returns True on success.
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
    """Load the checkpoint named in the spec by a fresh engine's method, and send the peak memory of the load."""
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


# -- timing ------------------------------------------------------------------------------------------------------------
#
# Rules for the length of warm-up and measurement, and the resulting step times. Pure functions: no clock, no torch.

SETTLED = 0.05  # warm-up ends when two step times in a row differ by less than this fraction
MAX_WARMUP_STEPS = 6
WARMUP_SHARE = 0.4  # share of the longest measurement's seconds after which warm-up ends
BEATEN_STEPS = 2  # steps after which a candidate may be beaten
LONGER = 2  # factor on the most steps and seconds if recurring work may have been missed
ALIKE_STEPS = 12  # equal steps after which nothing is expected to recur, even if the first took longer
ALIKE_SHARE = 0.25  # share of the longest measurement's seconds that may be spent on that check

StepParts = list[float]  # seconds of one optimizer step: the whole, or each micro-batch that was run


@dataclass(frozen=True)
class MeasureRequest:
    """Parameters of a `measure` message."""

    micro_batch: int
    accumulation: int
    min_steps: int
    max_steps: int
    min_seconds: float
    max_seconds: float
    most_seconds: float = math.inf  # upper limit of any extension
    beaten_step_seconds: float = math.inf  # a candidate whose interval lies above cannot win
    share_seconds: float = math.inf  # for warm-up and measured steps, of which there is at least one
    full: bool = False  # run every micro-batch of an accumulation, without extrapolation

    @classmethod
    def of(cls, message: dict[str, Any]) -> MeasureRequest:
        """Return the request of a message; ignore unknown fields."""
        return cls(**{field.name: message[field.name] for field in fields(cls) if field.name in message})

    @property
    def can_be_beaten(self) -> bool:
        """Return True if a candidate that is too slow to win is measured no longer than needed to see that."""
        return self.beaten_step_seconds < math.inf

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches that are run per step."""
        if self.full or self.accumulation <= MAX_TIMED_MICRO_BATCHES:
            return self.accumulation
        return MAX_TIMED_MICRO_BATCHES

    @property
    def extrapolated(self) -> bool:
        """Return True if fewer micro-batches run than a step accumulates."""
        return self.micro_batches < self.accumulation


def warmed_up(step_seconds: list[float], request: MeasureRequest) -> bool:
    """Return True if the warm-up may end: step times have settled, or it took its share of the time."""
    count = len(step_seconds)
    if count >= MAX_WARMUP_STEPS or sum(step_seconds) > WARMUP_SHARE * request.share_seconds:
        return True
    # The first step allocates the optimizer's states and compiles kernels, so it is never compared with the second.
    settled = count >= 3 and abs(step_seconds[-1] - step_seconds[-2]) <= SETTLED * step_seconds[-2]
    return settled or sum(step_seconds) > min(request.min_seconds, WARMUP_SHARE * request.max_seconds)


def after_warmup(request: MeasureRequest, step_seconds: list[float]) -> MeasureRequest:
    """Return the request with the share that these warm-up steps leave."""
    return replace(request, share_seconds=request.share_seconds - sum(step_seconds))


def holds_another(request: MeasureRequest, elapsed_seconds: float, seconds_per_step: float) -> bool:
    """Return True if the request's share holds another step."""
    return elapsed_seconds + seconds_per_step <= request.share_seconds


def holds_timed_step(request: MeasureRequest, warmup: list[float]) -> bool:
    """Return True if a step is timed after the warm-up; otherwise the warm-up's last step is all that is measured.

    A first step has one-time work (states of the optimizer, kernels), so a second one may overrun the share as a first
    one may. The request is the one after the warm-up.
    """
    if len(warmup) > 1:
        return holds_another(request, 0.0, warmup[-1])
    whole = request.share_seconds + warmup[0]
    return (2 + SETTLED) * warmup[0] <= OVERRUN * whole


def enough(request: MeasureRequest, elapsed_seconds: float, steps: int) -> bool:
    """Return True if the measured steps and seconds satisfy the request, or its share holds no other step."""
    if steps >= request.max_steps or elapsed_seconds > request.max_seconds:
        return True
    if steps and not holds_another(request, elapsed_seconds, elapsed_seconds / steps):
        return True
    return steps >= request.min_steps and elapsed_seconds > request.min_seconds


def beaten(request: MeasureRequest, step_seconds: list[float]) -> bool:
    """Return True if the interval of the step time lies above the limit, so that more steps cannot change the outcome.

    Args:
        step_seconds: averages over all ranks, so that all ranks decide alike.
    """
    if len(step_seconds) < BEATEN_STEPS:
        return False
    pace = pace_of(step_seconds)
    return pace.seconds - max(pace.spread, SETTLED * pace.seconds) > request.beaten_step_seconds


def settled(request: MeasureRequest, elapsed_seconds: float, step_seconds: list[float], warmup: list[float]) -> bool:
    """Return True if the measured steps represent a script's step time, or the time for that is over.

    More steps are needed if a step had extra work (data generation, an evaluation), which may recur. Recurring work
    also runs in the first step. There it cannot be distinguished from the one-time work of an engine.

    Args:
        step_seconds: averages over all ranks, so that all ranks decide alike.
        warmup: averages of the preceding steps.
    """
    pace, count = pace_of(step_seconds, len(warmup)), len(step_seconds)
    if pace.settled:
        alike = count >= min(ALIKE_STEPS, LONGER * request.max_steps) or max(warmup) <= UNLIKE * pace.seconds
        return alike or elapsed_seconds > ALIKE_SHARE * request.max_seconds
    times = LONGER if pace.pending else 1
    most_seconds = min(times * request.max_seconds, max(request.max_seconds, request.most_seconds))
    return count >= times * request.max_steps or elapsed_seconds > most_seconds


def stretch(request: MeasureRequest, elapsed_seconds: float, steps: int, seconds_per_step: float) -> int:
    """Return the number of steps, at least one, to run before the ranks compare their clocks again.

    A comparison after every step would make each step wait for the slowest rank, which training does not do.
    """
    wanted = max(request.min_steps - steps, math.ceil((request.min_seconds - elapsed_seconds) / seconds_per_step))
    if steps < BEATEN_STEPS and seconds_per_step > request.beaten_step_seconds:
        wanted = min(wanted, BEATEN_STEPS - steps)
    affordable = int((min(request.max_seconds, request.share_seconds) - elapsed_seconds) / seconds_per_step)
    return max(1, min(wanted, affordable, request.max_steps - steps))


def extrapolate(parts: StepParts, accumulation: int) -> float:
    """Return the seconds of a whole step of `accumulation` micro-batches.

    The first micro-batch is counted once: it has no gradients to add to, so it is faster than the following ones.

    Args:
        parts: seconds of [first, middle, boundary], or of [whole step].
    """
    if len(parts) < 2:
        return parts[0]
    return parts[0] + (accumulation - 2) * parts[1] + parts[-1]


# -- execution ---------------------------------------------------------------------------------------------------------
#
# Run a user's script in this process, as `python` would.

ACCELERATE_MODULE = "accelerate.commands.launch"


def run_script(script: Script, arguments: Sequence[str]) -> None:
    """Run the script as `__main__` with these arguments and its folder first on the path.

    The caller sets the current folder. All exceptions of the script are raised, SystemExit included.

    A script typed behind `accelerate launch` is started by that launcher in this process, because only the launcher
    knows the environment of its ranks. `hooks/launchers.py` takes over at the point at which ranks would start.
    """
    line = line_of(script)
    if line.kind == ACCELERATE:
        module = ["--module"] if script.is_module else []
        target = str(script.path) if script.path is not None else script.target
        run_target(["-m", ACCELERATE_MODULE, *line.launcher[line.head :], *module, target, *arguments])
    else:
        run_target(
            ["-m", script.target, *arguments] if script.is_module else [str(script.path), *arguments], script.target
        )


def run_target(words: Sequence[str], name: str | None = None) -> None:
    """Run a Python file, or `-m` and a module, as `__main__` with the remaining words. A file may have another name."""
    path = sys.path[:]
    try:
        if words[0] == "-m":
            sys.argv = [words[1], *words[2:]]
            sys.path.insert(0, "")
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = [name or words[0], *words[1:]]
            sys.path.insert(0, str(Path(words[0]).parent))
            runpy.run_path(words[0], run_name="__main__")
    finally:
        sys.path[:] = path
