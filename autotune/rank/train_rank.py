"""Rank of real training under `autotune launch`: run the user's script to its end under the candidate.

Run as `python -m autotune.rank.train_rank ADDRESS NUMBER`, or `become` in a child of the fork server. `autotune launch`
uses cold starts only.

This process is the user's training. `TrainRank.run` installs the hooks (`rank/hooks/`), then runs the script. A
training that the user starts without `launch` contains only code of this package that the script itself calls.
`StudyCallback` (`recovery/trainer_callback.py`) imports the search and its packages. A winner with a chunked loss needs
`use_chunked_loss` (`rank/model_builder.py`).
"""

from __future__ import annotations

import atexit
import datetime
import os
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from autotune.problem.candidate import Candidate
from autotune.problem.outcome import Phase
from autotune.problem.training_trace import LEAST_STEPS
from autotune.rank import hooks
from autotune.rank.base import BaseRank, connect_to_parent, error_chain, exit_process
from autotune.rank.checkpoints import (
    CheckpointLedger,
    CheckpointShare,
    OutputFolderView,
    checkpoint_to_resume,
    instead_of_latest,
    load_any,
    tag_of,
    tags_in,
)
from autotune.rank.hooks.base import Context, TrainingObserver
from autotune.rank.hooks.config import merged_arguments
from autotune.rank.measure import run_script
from autotune.rank.patches import Call
from autotune.rank.training_trace import TraceRecorder
from autotune.rank.versions import import_or_none
from autotune.util.linux import ignore_user_signals
from autotune.workers.protocol import Message

T = TypeVar("T")
_PROGRESS_SECONDS = 0.2
_FIRST_STEPS = 3  # each of these steps is reported at once


class TrainRank(BaseRank, TrainingObserver):
    """Train until the script ends; report progress, and an OOM at once."""

    _unloaded: tuple[Exception, str] | None = None  # error of a checkpoint that could not be loaded, and its folder

    def run(self) -> None:
        """Run the user's script to its end under the candidate."""
        # The first function registered runs last: functions that the script registers may still need the group.
        atexit.register(self._leave_group)
        self.begin(joins=False)
        assert self.job.script is not None
        os.chdir(self.job.script.cwd)
        candidate, folder = Candidate.of(self.spec["candidate"]), Path(self.spec["folder"])
        self.context = context = Context(self.job, candidate, self, self.spec["device"], folder, quiet=False)
        # The longest default timeout of the libraries (accelerate and gloo: 30 minutes). `hooks.process_group` raises it to what
        # the script asks for.
        minutes = os.environ.get("DEEPSPEED_TIMEOUT", "")
        timeout = datetime.timedelta(minutes=max(30, int(minutes) if minutes.isdigit() else 0))
        self.collective_timeout = context.collective_timeout = timeout
        context.trace = TraceRecorder(looks_ahead=False)
        context.join = self.join
        hooks.install(context)
        self._ledgers: dict[str, CheckpointLedger] = {}  # by output folder
        self._begin_again()
        self._resume_trainer()
        self._note_checkpoints()
        run_script(self.job.script, merged_arguments(context))

    def _leave_group(self) -> None:
        """Destroy the process group, whose threads sometimes abort the interpreter's exit if it stays open."""
        self.heartbeat.stop()
        if self.torch.distributed.is_initialized():
            self.torch.distributed.destroy_process_group()

    @property
    def step_timeout(self) -> datetime.timedelta:
        """Timeout of all groups of a training, which the script may have raised."""
        return self.context.collective_timeout

    # -- restarting --------------------------------------------------------------------------------------------------

    def _begin_again(self) -> None:
        """Let a retry use an output folder that an attempt without a checkpoint left behind.

        Hugging Face's scripts refuse an output folder that has files and no checkpoint. They still refuse files of
        another launch. From checkpoints they resume.
        """
        arguments_class = import_or_none("transformers", "TrainingArguments")
        if arguments_class is None:
            return

        def post_init(call: Call) -> None:
            arguments = call.owner
            if isinstance(arguments.output_dir, str):
                folder = Path(os.path.expanduser(arguments.output_dir)).resolve()
                if self.number == 0:
                    self.channel.send("output", folder=str(folder))
                unsaved = str(folder) in self.spec["begun"] and not any(folder.glob("checkpoint-*"))
                if unsaved and hasattr(arguments, "overwrite_output_dir"):  # transformers < 5, other libraries
                    arguments.overwrite_output_dir = True
            call()

        self.context.patches.wrap(arguments_class, "__post_init__", post_init)

    def _resume_trainer(self) -> None:
        """Make Trainer resume from the newest whole checkpoint of the same `train` call in this launch.

        If there is none, Trainer resumes from the checkpoint that the script names.
        """
        trainer_class = import_or_none("transformers", "Trainer")
        if trainer_class is None:  # then the script has no Trainer either
            return

        def train(call: Call) -> Any:
            folder = Path(call.owner.args.output_dir).resolve()
            call.change(resume_from_checkpoint=self._resumed(folder, call.given["resume_from_checkpoint"]))
            return call()

        self.context.patches.wrap(trainer_class, "train", train)

    def _resumed(self, folder: Path, given: Any) -> Any:
        """Return the checkpoint from which a call of `train` resumes. Every rank must call this.

        Args:
            given: the script's `resume_from_checkpoint`.
        """
        self.written.append(str(folder))
        told = self.spec["earlier"].get(str(folder))
        ledger = self._ledgers.setdefault(str(folder), CheckpointLedger.of(folder, told))
        ledger.begin()
        if self.number == 0:
            self.channel.send("checkpoints", folder=str(folder), ledger=ledger.to_json())
        seen = self._of_all(ledger.seen(self._part, given, self.spec["bad"]))
        choice = checkpoint_to_resume(seen, ledger.call)
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
        """Report a resume with the checkpoint's time, because some checkpoints are rewritten under one name."""
        written = None
        with suppress(OSError):
            written = os.stat(path).st_mtime_ns
        self.channel.send("resumed", path=path, written=written)

    def _tell_of_earlier(self, ledger: CheckpointLedger, seen: OutputFolderView) -> None:
        """Report that a restarted script does not resume from an earlier launch's checkpoint.

        The script decides this itself, but the user must see it.
        """
        step = seen.newest_before
        if step is not None and self.number == 0:
            self._tell(
                f"{ledger.path(step)} is of an earlier launch, and the script does not resume by itself: training begins anew "
                "(with `trainer.train(resume_from_checkpoint=True)` it would go on from there)"
            )

    @property
    def _part(self) -> CheckpointShare:
        return CheckpointShare(self.number, self.world, self.local)

    def _of_all(self, mine: T) -> list[T]:
        """Gather every rank's value, the first rank's first. Every rank must call this."""
        found = [mine]
        if self.world > 1:
            found *= self.world
            self.torch.distributed.all_gather_object(found, mine)
        return found

    def _note_checkpoints(self) -> None:
        """Convert and load checkpoints of other rungs, report each load, and record the folders of saves."""
        from deepspeed.runtime.engine import DeepSpeedEngine

        def load_checkpoint(call: Call) -> Any:
            folder, tag = Path(call.given["load_dir"]), call.given["tag"]
            tag = self._sound_tag(folder) if tag is None else tag
            call.change(tag=tag)
            try:
                found = load_any(
                    call.original, *call.args, convert=self.spec["convert"], print_line=self._tell, **call.kwargs
                )
            except Exception as error:
                if name := tag or tag_of(folder):
                    self._unloaded = error, str(folder / str(name))
                raise
            if found and found[0]:
                self._tell_resumed(str(found[0]))
            return found

        def save_checkpoint(call: Call) -> Any:
            folder = str(call.given["save_dir"])
            if folder not in self.written:
                self.written.append(folder)
            return call()

        self.context.patches.wrap(DeepSpeedEngine, "load_checkpoint", load_checkpoint)
        self.context.patches.wrap(DeepSpeedEngine, "save_checkpoint", save_checkpoint)

    def _sound_tag(self, folder: Path) -> str | None:
        """Return the tag to load instead of a latest one that is damaged or failed to load; None keeps the latest."""
        bad = {path.name for path in map(Path, self.spec["bad"]) if path.parent == folder}
        seen = self._of_all(tags_in(folder, self._part))
        tag = instead_of_latest(seen, bad)
        if tag is not None and self.number == 0 and seen[0].latest not in bad:  # the parent has reported bad ones
            self._tell(f"{folder / str(seen[0].latest)} is not whole: {tag}, the newest that is whole, is taken")
        return tag

    def _described(self, error: BaseException) -> Message:
        """Add the checkpoint whose load raised the error."""
        described = super()._described(error)
        if self._unloaded is not None and self._unloaded[0] in (error, *error_chain(error)):
            described["unloaded"] = self._unloaded[1]
        return described

    def _tell(self, text: str) -> None:
        self.channel.send("note", text=text)

    # -- callbacks of the hooks --------------------------------------------------------------------------------------

    def built(self, engine: Any, facts: dict[str, Any]) -> None:
        """Report the end of the initialization."""
        self.enter(Phase.FORWARD)

    def entered(self, phase: Phase) -> None:
        """Store the phase, and report the initialization."""
        self.phase = phase
        if phase is Phase.INIT:
            self.enter(phase)

    def stepped(self) -> None:
        """Count a step and report progress."""
        self.steps += 1
        self.progress(0.0 if self.steps <= _FIRST_STEPS else _PROGRESS_SECONDS)
        if self.steps in (1, LEAST_STEPS):
            self.channel.send("traced", trace=self.context.trace.report())
        if self.steps == LEAST_STEPS:
            self.context.trace = TraceRecorder(most_steps=0)

    def failed(self, error: BaseException) -> None:
        """Report an OOM and end the rank."""
        self.leave_if_out_of_memory(error)

    def no_engine_found(self) -> None:
        """Report that the script trains without DeepSpeed."""
        self.channel.send("strayed")


def train(address: str, number: int) -> Any:
    """Train as rank `number`, and send `bye` at the script's end.

    A failure is reported, and the process leaves with code 1.

    Returns:
        The value that the script passed to `sys.exit`.
    """
    channel, spec = connect_to_parent(address, number)
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
        exit_process(1)
    channel.send("bye", code=_exit_status(code), steps=rank.steps)
    return code


def _exit_status(code: Any) -> int:
    """Return the exit status that the interpreter derives from the argument of `sys.exit`."""
    return code if isinstance(code, int) else int(code is not None)


def become(address: str, number: int) -> NoReturn:
    """Turn this forked child into rank `number` of the group of the parent at `address`, a Unix socket.

    The end resembles that of an interpreter: threads are joined and `atexit` functions run. The process ends by
    `os._exit`, because the frames below belong to the fork server. Modules are not torn down, so files that they left
    open are not flushed. After a cold start they are.
    """
    for caught, handler in (
        (signal.SIGINT, signal.default_int_handler),  # KeyboardInterrupt, on which a script may save
        (signal.SIGTERM, signal.SIG_DFL),
        (signal.SIGCHLD, signal.SIG_DFL),
    ):
        signal.signal(caught, handler)
    ignore_user_signals()
    code = train(address, number)
    if not isinstance(code, int | None):
        print(code, file=sys.stderr)
    threading._shutdown()  # type: ignore[attr-defined]  # waits for the script's threads, as multiprocessing does
    atexit._run_exitfuncs()
    exit_process(_exit_status(code))


def main() -> None:
    """Run a cold start, which ends like the script alone, with the process group closed before."""
    ignore_user_signals()
    sys.exit(train(sys.argv[1], int(sys.argv[2])))


if __name__ == "__main__":
    main()
