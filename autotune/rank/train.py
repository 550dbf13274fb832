"""A rank of real training under `autotune launch`: the user's script to its own end, under the config that is tried.

Run as `python -m autotune.rank.train ADDRESS NUMBER`, or `become` in a child of the fork server.
"""

from __future__ import annotations

import atexit
import datetime
import functools
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from autotune.linux import die_with_parent
from autotune.problem.candidate import Candidate
from autotune.problem.outcome import Phase
from autotune.rank.base import BaseRank, greet, leave
from autotune.rank.checkpoints import load_any
from autotune.rank.execution import run_script
from autotune.rank.hooks import Hooks
from autotune.rank.hooks.batches import Sizes
from autotune.rank.hooks.context import Context
from autotune.rank.versions import imported

_PROGRESS_SECONDS = 0.2
_FIRST_STEPS = 3  # each is told of at once


class TrainRank(BaseRank):
    """Trains to the script's own end; reports progress, and memory failures the moment they happen. A `Watcher` of its
    hooks."""

    def run(self) -> None:
        # The first to be registered is the last to run: what the script registers may still need the group.
        atexit.register(self._leave_group)
        self.begin()
        assert self.job.script is not None
        os.chdir(self.job.script.cwd)
        candidate, folder = Candidate.of(self.spec["candidate"]), Path(self.spec["folder"])
        context = Context(self.job, candidate, self, self.spec["device"], folder, quiet=False)
        context.collective_timeout = self.collective_timeout
        self.hooks = Hooks(context)
        self.hooks.install()
        self._resume_trainer(self.spec["earlier"])
        self._note_loads()
        run_script(self.job.script, self.hooks.arguments())

    def _leave_group(self) -> None:
        """The group is ours to close: left open, its threads race the interpreter's end, and abort it now and then."""
        self.pulse.stop()
        if self.torch.distributed.is_initialized():
            self.torch.distributed.destroy_process_group()

    @property
    def collective_timeout(self) -> datetime.timedelta:
        """Whatever a library asks for by default, the longest of them (accelerate and gloo: 30 minutes); what the script asks
        for can raise it (`hooks.process_group`)."""
        return max(datetime.timedelta(minutes=30), deepspeed_timeout())

    # -- restarting --------------------------------------------------------------------------------------------------

    def _resume_trainer(self, earlier: dict[str, dict[str, int]]) -> None:
        """Trainer goes on from the newest whole checkpoint of this launch, or from the one that the script names where
        there is none.

        Args:
            earlier: by output folder, the checkpoints that were there when this launch first trained into it, see
                `checkpoints`. The parent is told of a folder that is not among them.
        """
        trainer_class = imported("transformers", "Trainer")
        if trainer_class is None:  # nor has the script one
            return

        def train(
            original: Callable[..., Any], trainer: Any, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any
        ) -> Any:
            folder = Path(trainer.args.output_dir).resolve()
            if str(folder) not in earlier:
                self.channel.send("checkpoints", folder=str(folder), found=checkpoints(folder))
            elif (newest := self._newest(folder, earlier[str(folder)])) is not None:
                resume_from_checkpoint = str(newest)
                self.channel.send("resumed", path=resume_from_checkpoint)
            return original(trainer, resume_from_checkpoint, *args, **kwargs)

        self.hooks.context.patches.wrap(trainer_class, "train", train)

    def _newest(self, folder: Path, earlier: dict[str, int]) -> Path | None:
        """The newest whole checkpoint. On several machines, which need not see the same files, one of which every rank finds
        its own part; every rank calls it."""
        if self.spec.get("nodes", 1) == 1:
            return newest_checkpoint(folder, earlier, self.world)
        mine = whole_checkpoints(folder, earlier, lambda parts: f"rng_state_{self.number}.pth" in parts)
        found: list[set[int]] = [set()] * self.world
        self.torch.distributed.all_gather_object(found, set(mine))
        return mine.get(max(set.intersection(*found), default=-1))

    def _note_loads(self) -> None:
        """What another rung of the ladder has saved is loaded too, and the parent hears of every load."""
        from deepspeed.runtime.engine import DeepSpeedEngine

        def load_checkpoint(original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
            load = functools.partial(load_any, original, convert=self.spec["convert"], say=self._tell)
            found = load(engine, *args, **kwargs)
            if found and found[0]:
                self.channel.send("resumed", path=str(found[0]))
            return found

        self.hooks.context.patches.wrap(DeepSpeedEngine, "load_checkpoint", load_checkpoint)

    def _tell(self, text: str) -> None:
        self.channel.send("note", text=text)

    # -- what the hooks see ------------------------------------------------------------------------------------------

    def configured(self, config: dict[str, Any]) -> None:
        pass

    def planned(self, micro_batch: int, accumulation: int) -> None:
        pass

    def built(self, engine: Any, facts: dict[str, Any]) -> None:
        self.enter(Phase.FORWARD)

    def entered(self, phase: Phase) -> None:
        self.phase = phase
        if phase is Phase.INIT:
            self.enter(phase)

    def forward(self, sizes: Sizes) -> None:
        pass

    def stepped(self) -> None:
        self.steps += 1
        self.progress(0.0 if self.steps <= _FIRST_STEPS else _PROGRESS_SECONDS)

    def beside(self, number: int, rows: int) -> None:
        pass

    def failed(self, error: BaseException) -> None:
        self.leave_if_out_of_memory(error)

    def strayed(self) -> None:
        self.channel.send("strayed")


def deepspeed_timeout() -> datetime.timedelta:
    """DeepSpeed's own variable for it, in minutes; nothing where it is no number."""
    minutes = os.environ.get("DEEPSPEED_TIMEOUT", "")
    return datetime.timedelta(minutes=int(minutes) if minutes.isdigit() else 0)


def checkpoints(folder: Path) -> dict[str, int]:
    """Trainer's checkpoints in a folder, by their states' paths: when each was written, by the file server's clock in ns.
    Clocks differ and jump, so that of a launch's checkpoints only this is known: they are others than those."""
    found = {}
    for state in folder.glob("checkpoint-*/trainer_state.json"):
        with suppress(OSError):
            found[str(state)] = state.stat().st_mtime_ns
    return found


def newest_checkpoint(folder: Path, earlier: dict[str, int], ranks: int) -> Path | None:
    """Trainer's checkpoint of the most steps that is none of the `earlier` ones and is whole: it has its state, which is
    written last, DeepSpeed's part, and the state of every rank's random generators."""
    whole = whole_checkpoints(folder, earlier, lambda parts: len(parts) >= ranks)
    return whole[max(whole)] if whole else None


def whole_checkpoints(folder: Path, earlier: dict[str, int], has_parts: Callable[[list[str]], bool]) -> dict[int, Path]:
    """Trainer's checkpoints that are none of the `earlier` ones and have their state and DeepSpeed's part, by steps.

    Args:
        has_parts: whether these files of random generators' states are enough.
    """
    whole: dict[int, Path] = {}
    for path, written_ns in checkpoints(folder).items():
        checkpoint = Path(path).parent
        if earlier.get(path) == written_ns:
            continue
        try:
            step = int(json.loads(Path(path).read_text())["global_step"])
        except (OSError, ValueError, KeyError):
            continue
        parts = [part.name for part in checkpoint.glob("rng_state*.pth")]
        if has_parts(parts) and (checkpoint / "latest").exists():
            whole[step] = checkpoint
    return whole


def train(address: str, number: int) -> Any:
    """Trains as rank `number`, and says goodbye at the script's end; returns what the script gave to `sys.exit`. After a
    failure it is reported and the process left with code 1."""
    channel, spec = greet(address, number)
    sys.argv = sys.argv[:1]
    rank = TrainRank(channel, spec)
    code: Any = None
    try:
        rank.run()
    except SystemExit as error:
        code = error.code
    except BaseException as error:
        rank.report(error)
        leave(1)
    channel.send("bye", code=_exit_status(code), steps=rank.steps)
    return code


def _exit_status(code: Any) -> int:
    """As the interpreter counts what `sys.exit` was given."""
    return code if isinstance(code, int) else int(code is not None)


def become(address: str, number: int) -> NoReturn:
    """Turns this process, a forked child, into rank `number` of the group whose parent listens at `address`, a Unix socket.

    It ends as an interpreter does after its script (threads are waited for, what `atexit` holds is run), but by `os._exit`:
    the frames below it are the fork server's. Modules are not torn down, so a file that one of them has left open is not
    flushed; after a cold start it is.
    """
    for caught, handler in (
        (signal.SIGINT, signal.default_int_handler),  # KeyboardInterrupt: a script may save on it
        (signal.SIGTERM, signal.SIG_DFL),
        (signal.SIGCHLD, signal.SIG_DFL),
    ):
        signal.signal(caught, handler)
    code = train(address, number)
    if not isinstance(code, int | None):
        print(code, file=sys.stderr)
    threading._shutdown()  # type: ignore[attr-defined]  # waits for the script's threads, as multiprocessing does
    atexit._run_exitfuncs()
    leave(_exit_status(code))


def main() -> None:
    """A cold start ends as the script alone would: the interpreter's own end, with the process group closed before."""
    die_with_parent()
    sys.exit(train(sys.argv[1], int(sys.argv[2])))


if __name__ == "__main__":
    main()
