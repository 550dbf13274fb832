"""A rank of real training under `autotune launch`: the user's script to its own end, under the config that is tried.

Run as `python -m autotune.rank.train ADDRESS NUMBER`, or `become` in a child of the fork server.
"""

from __future__ import annotations

import atexit
import datetime
import functools
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from autotune.group.protocol import Message
from autotune.linux import outlive_notices
from autotune.problem.candidate import Candidate
from autotune.problem.outcome import Phase
from autotune.rank.base import BaseRank, greet, handled, leave
from autotune.rank.checkpoints import load_any
from autotune.rank.execution import run_script
from autotune.rank.hooks import Hooks
from autotune.rank.hooks.batches import Sizes
from autotune.rank.hooks.context import Context
from autotune.rank.shards import Part, instead_of_latest, tag_of, tags_in
from autotune.rank.trainer_checkpoints import Ledger, Seen, chosen
from autotune.rank.versions import imported

T = TypeVar("T")
_PROGRESS_SECONDS = 0.2
_FIRST_STEPS = 3  # each is told of at once


class TrainRank(BaseRank):
    """Trains to the script's own end; reports progress, and memory failures the moment they happen. A `Watcher` of its
    hooks."""

    _unloaded: tuple[Exception, str] | None = None  # why a checkpoint could not be loaded, and its folder

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
        self._ledgers: dict[str, Ledger] = {}  # by output folder
        self._begin_again()
        self._resume_trainer()
        self._note_checkpoints()
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

    def _begin_again(self) -> None:
        """Hugging Face's scripts refuse an output folder that holds something and no checkpoint, as an attempt that ends
        before its first save leaves it. What another launch has left in it they refuse still, and checkpoints they go on from."""
        arguments_class = imported("transformers", "TrainingArguments")
        if arguments_class is None:
            return

        def post_init(original: Callable[..., Any], arguments: Any) -> None:
            if isinstance(given := arguments.output_dir, str):
                self._begin(Path(os.path.expanduser(given)).resolve(), arguments)
            original(arguments)

        self.hooks.context.patches.wrap(arguments_class, "__post_init__", post_init)

    def _begin(self, folder: Path, arguments: Any) -> None:
        if self.number == 0:
            self.channel.send("output", folder=str(folder))
        unsaved = str(folder) in self.spec["begun"] and not any(folder.glob("checkpoint-*"))
        if unsaved and hasattr(arguments, "overwrite_output_dir"):  # before transformers 5, and in others' own
            arguments.overwrite_output_dir = True

    def _resume_trainer(self) -> None:
        """Trainer goes on from the newest whole checkpoint that the same call of `train` has written in this launch, or from the
        one that the script names where there is none."""
        trainer_class = imported("transformers", "Trainer")
        if trainer_class is None:  # nor has the script one
            return

        def train(
            original: Callable[..., Any], trainer: Any, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any
        ) -> Any:
            folder = Path(trainer.args.output_dir).resolve()
            return original(trainer, self._resumed(folder, resume_from_checkpoint), *args, **kwargs)

        self.hooks.context.patches.wrap(trainer_class, "train", train)

    def _resumed(self, folder: Path, given: Any) -> Any:
        """What a call of `train` goes on from, where the script says `given`; every rank calls it."""
        self.written.append(str(folder))
        told = self.spec["earlier"].get(str(folder))
        ledger = self._ledgers.setdefault(str(folder), Ledger.of(folder, told))
        ledger.begin()
        if self.number == 0:
            self.channel.send("checkpoints", folder=str(folder), ledger=ledger.told())
        seen = self._of_all(ledger.seen(self._part, given, self.spec["bad"]))
        choice = chosen(seen, ledger.call)
        if choice is None:
            if told is None and not given and ledger.call == 0:
                self._tell_of_earlier(ledger, seen[0])
            return given
        path = str(ledger.path(choice.step)) if choice.step is not None else None
        if choice.not_whole is not None and self.number == 0:
            instead = "the newest that is whole is taken" if path else "training begins anew"
            self._tell(f"{ledger.path(choice.not_whole)} is not whole: {instead}")
        if path is not None:
            self._tell_resumed(path)
        return path

    def _tell_resumed(self, path: str) -> None:
        """With when it was written, since some are written anew under their name."""
        written = None
        with suppress(OSError):
            written = os.stat(path).st_mtime_ns
        self.channel.send("resumed", path=path, written=written)

    def _tell_of_earlier(self, ledger: Ledger, seen: Seen) -> None:
        """A script that is started once more, by a queue or by hand, begins anew beside what it has saved, if it does not say
        otherwise: that is its own to decide, and must not go unseen."""
        step = seen.newest_before
        if step is not None and self.number == 0:
            self._tell(
                f"{ledger.path(step)} is of an earlier launch, and the script does not resume by itself: training begins anew "
                "(with `trainer.train(resume_from_checkpoint=True)` it would go on from there)"
            )

    @property
    def _part(self) -> Part:
        return Part(self.number, self.world, self.local)

    def _of_all(self, mine: T) -> list[T]:
        """What every rank has, the first one's first; every rank calls it."""
        found = [mine]
        if self.world > 1:
            found *= self.world
            self.torch.distributed.all_gather_object(found, mine)
        return found

    def _note_checkpoints(self) -> None:
        """What another rung of the ladder has saved is loaded too, and the parent hears of every load. Where it saves is
        noted."""
        from deepspeed.runtime.engine import DeepSpeedEngine

        def load_checkpoint(
            original: Callable[..., Any], engine: Any, load_dir: Any, tag: Any = None, *args: Any, **kwargs: Any
        ) -> Any:
            folder, latest = Path(load_dir), tag is None
            tag = self._sound_tag(folder) if latest else tag
            load = functools.partial(load_any, original, convert=self.spec["convert"], say=self._tell)
            try:
                found = load(engine, load_dir, tag, *args, **kwargs)
            except Exception as error:
                if name := tag or tag_of(folder):
                    self._unloaded = error, str(folder / str(name))
                raise
            if found and found[0]:
                self._tell_resumed(str(found[0]))
            return found

        def save_checkpoint(original: Callable[..., Any], engine: Any, save_dir: Any, *args: Any, **kwargs: Any) -> Any:
            if str(save_dir) not in self.written:
                self.written.append(str(save_dir))
            return original(engine, save_dir, *args, **kwargs)

        self.hooks.context.patches.wrap(DeepSpeedEngine, "load_checkpoint", load_checkpoint)
        self.hooks.context.patches.wrap(DeepSpeedEngine, "save_checkpoint", save_checkpoint)

    def _sound_tag(self, folder: Path) -> str | None:
        """The tag to load from a folder instead of the latest, which is not whole or could not be loaded; None: the latest."""
        bad = {path.name for path in map(Path, self.spec["bad"]) if path.parent == folder}
        seen = self._of_all(tags_in(folder, self._part))
        tag = instead_of_latest(seen, bad)
        if tag is not None and self.number == 0 and seen[0].latest not in bad:  # of which the parent has told
            self._tell(f"{folder / str(seen[0].latest)} is not whole: {tag}, the newest that is whole, is taken")
        return tag

    def _described(self, error: BaseException) -> Message:
        """With the checkpoint that could not be loaded, where that is the error."""
        described = super()._described(error)
        if self._unloaded is not None and self._unloaded[0] in (error, *handled(error)):
            described["unloaded"] = self._unloaded[1]
        return described

    def _tell(self, text: str) -> None:
        self.channel.send("note", text=text)

    # -- what the hooks see ------------------------------------------------------------------------------------------

    def configured(self, config: dict[str, Any]) -> None:
        pass

    def planned(self, micro_batch: int, accumulation: int, optimizer: str = "") -> None:
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

    def unbuilt(self, builder: str) -> None:
        pass

    def strayed(self) -> None:
        self.channel.send("strayed")


def deepspeed_timeout() -> datetime.timedelta:
    """DeepSpeed's own variable for it, in minutes; nothing where it is no number."""
    minutes = os.environ.get("DEEPSPEED_TIMEOUT", "")
    return datetime.timedelta(minutes=int(minutes) if minutes.isdigit() else 0)


def train(address: str, number: int) -> Any:
    """Trains as rank `number`, and says goodbye at the script's end; returns what the script gave to `sys.exit`. After a
    failure it is reported and the process left with code 1."""
    channel, spec = greet(address, number)
    sys.argv = sys.argv[:1]
    rank = TrainRank(channel, spec)
    code: Any = None
    try:
        rank.run()
    except SystemExit as ended:
        rank.leave_if_memory_ended(ended)
        code = ended.code
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
    outlive_notices()
    code = train(address, number)
    if not isinstance(code, int | None):
        print(code, file=sys.stderr)
    threading._shutdown()  # type: ignore[attr-defined]  # waits for the script's threads, as multiprocessing does
    atexit._run_exitfuncs()
    leave(_exit_status(code))


def main() -> None:
    """A cold start ends as the script alone would: the interpreter's own end, with the process group closed before."""
    outlive_notices()
    sys.exit(train(sys.argv[1], int(sys.argv[2])))


if __name__ == "__main__":
    main()
