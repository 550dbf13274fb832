"""A rank of real training under `autotune launch`: the user's script, with the config that is tried and a line home.

Run as `python -m autotune.rank.train SOCKET RANK`.
"""

from __future__ import annotations

import atexit
import functools
import json
import sys
import time
from pathlib import Path
from typing import Any

from autotune.group.ending import die_with_parent
from autotune.group.verdict import is_memory_error
from autotune.problem.candidate import Candidate
from autotune.rank.checkpoints import load_any
from autotune.rank.hooks import Hooks, run_script
from autotune.rank.model import EXIT_REPORTED, Rank, greet, leave

_PROGRESS_SECONDS = 0.2


class TrainRank(Rank):
    """Trains to the script's own end; reports progress, and memory failures the moment they happen."""

    def run(self) -> None:
        # The first to be registered is the last to run: what the script registers may still need the group.
        atexit.register(self._leave_group)
        self._begin()
        self._steps, self._last_progress = 0, 0.0
        hooks = Hooks(
            self.job,
            Candidate.of(self.spec["candidate"]),
            self,
            self.spec["device"],
            Path(self.spec["folder"]),
            quiet=False,
        )
        hooks.install()
        if self.spec["resume_since"] is not None:
            self._resume_trainer(self.spec["resume_since"])
        self._note_loads()
        run_script(self.job, hooks.arguments())

    def _leave_group(self) -> None:
        """The group is ours to close: left open, its threads race the interpreter's end, and abort it now and then."""
        if self.torch.distributed.is_initialized():
            self.torch.distributed.destroy_process_group()

    # -- restarting --------------------------------------------------------------------------------------------------

    def _resume_trainer(self, since: float) -> None:
        """Trainer goes on from the newest whole checkpoint of this launch, unless the script names one."""
        from transformers import Trainer

        original = Trainer.train

        @functools.wraps(original)
        def train(trainer: Any, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
            newest = newest_checkpoint(Path(trainer.args.output_dir), since, self.spec["world"])
            if newest is not None:
                resume_from_checkpoint = str(newest)
                self.channel.send("resumed", path=resume_from_checkpoint)
            return original(trainer, resume_from_checkpoint, *args, **kwargs)

        setattr(Trainer, original.__name__, train)

    def _note_loads(self) -> None:
        from deepspeed.runtime.engine import DeepSpeedEngine

        original = DeepSpeedEngine.load_checkpoint
        load = functools.partial(load_any, original, convert=self.spec["convert"], say=self._tell)

        @functools.wraps(original)
        def load_checkpoint(engine: Any, *args: Any, **kwargs: Any) -> Any:
            found = load(engine, *args, **kwargs)
            if found and found[0]:
                self.channel.send("resumed", path=str(found[0]))
            return found

        setattr(DeepSpeedEngine, original.__name__, load_checkpoint)

    def _tell(self, text: str) -> None:
        self.channel.send("note", text=text)

    # -- what the hooks see ------------------------------------------------------------------------------------------

    def configured(self, config: dict[str, Any]) -> None:
        pass

    def planned(self, micro_batch: int, accumulation: int) -> None:
        pass

    def built(self, engine: Any, facts: dict[str, Any]) -> None:
        self.enter("forward")

    def entered(self, name: str) -> None:
        self.phase = name
        if name == "init":
            self.enter(name)

    def forward(self, rows: int, tokens: int) -> None:
        pass

    def stepped(self) -> None:
        self._steps += 1
        now = time.monotonic()
        if now - self._last_progress > _PROGRESS_SECONDS or self._steps <= 3:
            self._last_progress = now
            self.channel.send("progress", steps=self._steps)

    def failed(self, error: BaseException) -> None:
        if is_memory_error(error):  # the script may catch it, and its peers would wait for ever
            self.channel.send("progress", steps=self._steps)
            self.report(error)
            leave(EXIT_REPORTED)

    def strayed(self) -> None:
        self.channel.send("strayed")


def newest_checkpoint(folder: Path, since: float, ranks: int) -> Path | None:
    """Trainer's newest checkpoint that was begun after `since` (seconds since the epoch) and is whole: its state, which
    is written last, and every rank's part."""
    whole: list[tuple[int, Path]] = []
    for state in folder.glob("checkpoint-*/trainer_state.json"):
        checkpoint = state.parent
        try:
            step = int(json.loads(state.read_text())["global_step"])
            if state.stat().st_mtime < since:
                continue
        except (OSError, ValueError, KeyError):
            continue
        parts = list(checkpoint.glob("rng_state*.pth"))
        if len(parts) >= ranks and (checkpoint / "latest").exists():
            whole.append((step, checkpoint))
    return max(whole, default=(0, None))[1]


def main() -> None:
    die_with_parent()
    channel, spec = greet(sys.argv[1], int(sys.argv[2]))
    sys.argv = sys.argv[:1]
    rank = TrainRank(channel, spec)
    try:
        rank.run()
    except SystemExit as error:
        code = error.code
        channel.send("bye", code=code if isinstance(code, int) else int(code is not None), steps=rank._steps)
        raise
    except BaseException as error:
        rank.report(error)
        leave(1)
    channel.send("bye", code=0, steps=rank._steps)


if __name__ == "__main__":
    main()
