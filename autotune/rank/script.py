"""A rank that measures a user's script: the script runs, watched from outside, until enough steps are timed.

Run as `python -m autotune.rank.script ADDRESS NUMBER` (a cold start), or `become` in a child of the fork server.
"""

from __future__ import annotations

import os
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from autotune.errors import Cause, Unusable
from autotune.group.protocol import Channel, Message
from autotune.problem.candidate import Candidate
from autotune.problem.outcome import Phase
from autotune.rank import timing
from autotune.rank.base import EXIT_REPORTED, BaseRank, leave
from autotune.rank.execution import run_script
from autotune.rank.hooks import Hooks
from autotune.rank.hooks.batches import Sizes
from autotune.rank.hooks.context import Context
from autotune.rank.measuring import certify_save, checkpoint, load, measure_as, run_as, say_goodbye
from autotune.rank.timing import Request
from autotune.rank.trained import MOST_SHORT, Batch, check_batch, check_beside, check_checkpointing, check_steady, usual

WARMUP_STEPS = 2  # batches of a script differ in length: its step times never settle as synthetic ones do
_MIN_STEPS = 2  # measured steps without which a script that has ended was not measured
_PROGRESS_SECONDS = 0.5
_MOST_FAILURES = 10  # of the engine, one after another, that a script may catch and go on after

# Trackers and uploads are off, each by the variable that its documentation names.
_QUIET_ENVIRONMENT = {
    "WANDB_MODE": "disabled",
    "COMET_MODE": "disabled",
    "NEPTUNE_MODE": "debug",
    "CLEARML_OFFLINE_MODE": "1",
    "SWANLAB_MODE": "disabled",
    "DISABLE_MLFLOW_INTEGRATION": "TRUE",
    "TRACKIO_DISABLED": "1",
    "DVCLIVE_TEST": "true",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "ACCELERATE_DISABLE_RICH": "1",
}


class ScriptRank(BaseRank):
    """Runs `spec["job"]["script"]` under `spec["candidate"]`, or as it is where that is None; a `Watcher` of its hooks."""

    def __init__(self, channel: Channel, spec: Message) -> None:
        super().__init__(channel, spec)
        self.candidate = Candidate.of(spec["candidate"]) if spec["candidate"] else None
        self.config: dict[str, Any] = {}  # the script's own
        self.engine: Any = None
        self.facts: dict[str, Any] = {}  # of the engine
        self.request: Request | None = None  # what to measure; heard before the first batch
        self.batch = Batch()  # of the step that runs
        self.timed: list[tuple[float, Batch]] = []  # seconds and batch of every measured step
        self.widest_tokens = 0  # of a row
        self.short_steps = 0  # the last of their data
        self.rows_beside: dict[
            str, list[int]
        ] = {}  # by the number of an engine made after the first: of its every step
        self.saved_tensors: SavedTensors | None = None
        self._failure: tuple[int, Message] | None = None  # the engine's last, since the last step: its id, described
        self._failures = 0  # since the last step
        self._evaluating = False  # whether the model was in evaluation mode in the last step
        self._steps_left = 0  # until the ranks compare their clocks
        self._step_began = self._measuring_began = 0.0

    def run(self) -> None:
        os.environ.update(_QUIET_ENVIRONMENT)
        self.begin()
        assert self.job.script is not None
        self.script = self.job.script
        scratch = Path(self.spec["scratch"])
        os.chdir(scratch)
        self.hooks = Hooks(Context(self.job, self.candidate, self, self.spec["device"], scratch, quiet=True))
        self.hooks.install()
        try:
            run_script(self.script, self.hooks.arguments())
        except SystemExit as error:
            self._leave_if_failed()
            if error.code not in (None, 0):
                raise RuntimeError(f"{self.script.name} exited with {error.code}") from None
        except Exception as error:
            if self._failure is not None and self._failure[0] != id(error):
                self._leave_if_failed()  # of what it made of the engine's error
            raise
        self._leave_if_failed()
        if len(self.timed) >= _MIN_STEPS:
            self._finish()
        raise self._why_ended()

    def _leave_if_failed(self) -> None:
        """A script may catch the engine's error, and end by itself: the error is why."""
        if self._failure is not None:
            self.send_error(self._failure[1])
            leave(EXIT_REPORTED)

    def _why_ended(self) -> Unusable:
        if self.engine is None:
            return Unusable(f"{self.script.target} ended without {_MISSING_DEEPSPEED}")
        return Unusable(
            f"{self.script.target} ended after {self.steps} optimizer steps: a measurement needs at least "
            f"{WARMUP_STEPS + 3}; give it more data or steps",
            Cause.STEPS,
        )

    # -- what the hooks see ------------------------------------------------------------------------------------------

    def configured(self, config: dict[str, Any]) -> None:
        self.config = config

    def planned(self, micro_batch: int, accumulation: int) -> None:
        if self.candidate is None and self.engine is None:
            own, said = {"micro_batch": micro_batch, "accumulation": accumulation}, self.hooks.context.said
            self.channel.send("facts", config=self.config, said=said, **own)

    def built(self, engine: Any, facts: dict[str, Any]) -> None:
        self.engine, self.facts = engine, facts
        self.own_device.note()
        load(self, engine)

    def forward(self, sizes: Sizes) -> None:
        self._await_request()
        self.batch.add(sizes)
        if sizes.rows:
            self.widest_tokens = max(self.widest_tokens, sizes.tokens // sizes.rows)

    def entered(self, phase: Phase) -> None:
        if phase is Phase.INIT:
            self.enter(phase)
            self.fault(phase)
            return
        self._await_request()  # a loop may call the module and not the engine
        if phase is Phase.BACKWARD and self.phase is not Phase.BACKWARD:
            # A micro-batch may have several forwards (TRL's KTO), several losses, and a backward that no engine is called for;
            # accelerate calls the engine's step at boundaries alone.
            self.batch.micro_batches += 1
            if self.saved_tensors is not None:
                self.saved_tensors.close()
        self.phase = phase
        self.own_device.note()
        self.fault(phase)
        self.progress(_PROGRESS_SECONDS)

    def stepped(self) -> None:
        assert self.request is not None
        device = self.own_device
        device.synchronize()
        device.note()
        seconds = time.perf_counter() - self._step_began
        self.steps += 1
        self._failure, self._failures = None, 0
        self._evaluating = not self.engine.module.training
        if self.candidate is not None:
            self._check(self.candidate)
        if self.steps == WARMUP_STEPS:
            self._steps_left = timing.stretch(self.request, 0.0, 0, self.agree(seconds))
            self._measuring_began = time.perf_counter()
        elif self.steps > WARMUP_STEPS:
            self.timed.append((seconds, self.batch))
            self._steps_left -= 1
            if not self._steps_left:
                self._compare_clocks(self.request)
        self.batch = Batch()
        self._step_began = time.perf_counter()

    def beside(self, number: int, rows: int) -> None:
        self.rows_beside.setdefault(str(number), []).append(rows)

    def _check(self, candidate: Candidate) -> None:
        """Whether the step that has ended trained on what the candidate asks for.

        Raises:
            Unusable: it did not, or too many were smaller.
        """
        profile = self.script.profile
        for number, rows in self.rows_beside.items() if profile else ():
            check_beside(rows, number, candidate, profile)
        short = check_batch(self.batch, candidate, profile)
        self.short_steps += bool(short)
        if self.short_steps > max(1, MOST_SHORT * self.steps):
            if self.short_steps == self.steps:  # none is as it was told
                raise Unusable(short, Cause.BATCH)
            raise Unusable(f"too many steps are the last of their data ({short})", Cause.SHORT)

    def failed(self, error: BaseException) -> None:
        described = self.leave_if_out_of_memory(error)
        self._failure, self._failures = (id(error), described), self._failures + 1
        if isinstance(error, Unusable) or self._failures == _MOST_FAILURES:
            self._leave_if_failed()

    def strayed(self) -> None:
        self.report(Unusable(f"{self.script.target} trains without {_MISSING_DEEPSPEED}"))
        leave(EXIT_REPORTED)

    # -- the measurement ---------------------------------------------------------------------------------------------

    def _await_request(self) -> None:
        """Before the first batch: tells what is known of the engine, and waits to hear what to measure."""
        if self.request is not None:
            return
        self.facts |= self.hooks.checkpointing()  # the script may have switched it since the engine was made
        if self.candidate is not None and self.script.profile:
            check_checkpointing(self.facts, self.candidate)
        self.channel.send("facts", config=self.config, said=self.hooks.context.said, **self.facts)
        self.channel.send("phase", phase="ready")
        message = self.channel.receive()
        if message is None or message["type"] != "measure":
            say_goodbye(self)
        self.request = Request.of(message)
        self.own_device.reset_peaks()
        self._step_began = self._measuring_began = time.perf_counter()
        if self.candidate is None:
            self.saved_tensors = SavedTensors(self.engine)

    def _compare_clocks(self, request: Request) -> None:
        """Ends the measurement, on all ranks at once, or says when to compare again."""
        elapsed, steps = self.agree(time.perf_counter() - self._measuring_began), len(self.timed)
        if timing.enough(request, elapsed, steps):
            self._finish()
        self._steps_left = timing.stretch(request, elapsed, steps, elapsed / steps)

    def _finish(self) -> NoReturn:
        device = self.own_device
        device.synchronize()
        batches = [batch for _, batch in self.timed]
        if self.candidate is None:
            check_steady([batch.rows for batch in batches])
        tokens = statistics.fmean(batch.tokens for batch in batches)
        # of a step, as most are: the last one of a data set may be smaller
        facts: dict[str, Any] = {
            "micros": statistics.mode(batch.micro_batches for batch in batches),
            "rows": statistics.mode(batch.rows for batch in batches),
            "sequences": statistics.mode(batch.sequences for batch in batches),
            "tokens": tokens,
            "widest": self.widest_tokens,
        }
        if self._evaluating:
            facts["evaluating"] = True
        if self.saved_tensors is not None:
            facts["saved_bytes"] = self.saved_tensors.bytes
        if self.rows_beside:
            facts["beside"] = {number: usual(rows) for number, rows in self.rows_beside.items()}
        self.channel.send(
            "measured",
            step_seconds=self.average([seconds for seconds, _ in self.timed]),
            warmup_steps=WARMUP_STEPS,
            measured_seconds=time.perf_counter() - self._measuring_began,
            tokens=tokens,
            extrapolated=False,
            skipped_steps=getattr(self.engine, "skipped_steps", 0),
            facts=facts,
            live_bytes={},
            **device.peaks(),
        )
        self._serve_certificates()
        say_goodbye(self)

    def _serve_certificates(self) -> None:
        message: Message | None
        while (message := self.channel.receive()) is not None and message["type"] != "stop":
            if message["type"] == "certify":
                certify_save(self, self.hooks.save_weights)
            elif message["type"] == "checkpoint":
                checkpoint(self, self.engine, self.hooks.save_checkpoint, message)


_MISSING_DEEPSPEED = (
    "calling deepspeed.initialize: give it its DeepSpeed config (for Hugging Face's Trainer: --deepspeed ds.json) or make "
    "it use DeepSpeed"
)


class SavedTensors:
    """Counts the bytes that forwards keep for their backward, from its making until `close`; the model's parameters are
    not counted, and a storage is counted once."""

    def __init__(self, engine: Any) -> None:
        import torch

        self.bytes = 0
        parameters = {p.untyped_storage().data_ptr() for p in engine.module.parameters()}
        seen: set[int] = set()

        def pack(tensor: Any) -> Any:
            if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
                where = tensor.untyped_storage().data_ptr()
                if where not in parameters and where not in seen:
                    seen.add(where)
                    self.bytes += tensor.untyped_storage().nbytes()
            return tensor

        self._hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        self._hooks.__enter__()
        self._open = True

    def close(self) -> None:
        if self._open:
            self._open = False
            self._hooks.__exit__(None, None, None)


become = partial(measure_as, ScriptRank)  # address, number


if __name__ == "__main__":
    run_as(ScriptRank)
