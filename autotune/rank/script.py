"""Rank that measures a user's script: hooks watch the running script until enough steps are timed.

Run as `python -m autotune.rank.script ADDRESS NUMBER` (a cold start), or `become` in a child of the fork server.
"""

from __future__ import annotations

import os
import statistics
import time
from functools import partial
from typing import Any, NoReturn

from autotune.errors import Cause, Unusable
from autotune.group.protocol import Channel, Message
from autotune.problem.candidate import Candidate
from autotune.problem.early_variables import of_the_device, set_late, settings_in, too_late
from autotune.problem.outcome import Phase
from autotune.problem.script_text import script_text
from autotune.problem.sources import SOURCES
from autotune.rank import timing
from autotune.rank.base import EXIT_REPORTED, BaseRank, leave
from autotune.rank.execution import run_script
from autotune.rank.hooks import Hooks
from autotune.rank.hooks.batches import Sizes
from autotune.rank.hooks.context import Context
from autotune.rank.measuring import certify_save, checkpoint, load, measure_as, run_as, say_goodbye
from autotune.rank.overflow import Overflows
from autotune.rank.sandbox import Sandbox
from autotune.rank.saved_tensors import SavedTensors
from autotune.rank.timing import Request
from autotune.rank.trained import (
    MOST_SHORT,
    Batch,
    check_batch,
    check_beside,
    check_checkpointing,
    check_tokens,
    own_steps,
    usual,
    usual_step,
)

WARMUP_STEPS = 2  # a script's batches differ in length, so its step times never settle like synthetic ones
MOST_AT_ONCE = 4  # measured steps before the ranks first compare their clocks
_MIN_STEPS = 2  # measured steps that a script needs before it ends
_PROGRESS_SECONDS = 2.0  # rare, because a message wakes the tuner and takes a core from training threads
_MOST_FAILURES = 10  # engine failures in a row that a script may catch and continue after

# Disable trackers and uploads, each by its documented variable.
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
    """Run `spec["job"]["script"]` under `spec["candidate"]`, or unmodified (a probe run) if that is None.

    The class is the `Watcher` of its hooks.
    """

    def __init__(self, channel: Channel, spec: Message) -> None:
        super().__init__(channel, spec)
        self.candidate = Candidate.of(spec["candidate"]) if spec["candidate"] else None
        self.config: dict[str, Any] = {}  # the script's own
        self.engine: Any = None
        self.facts: dict[str, Any] = {}  # facts of the engine
        self.request: Request | None = None  # measurement request, received before the first batch
        self.batch = Batch()  # batch of the running step
        self.overflows = Overflows(None)
        self.warmup: list[float] = []  # seconds of warm-up steps without skipped ones
        self.timed: list[tuple[float, Batch]] = []  # seconds and batch of every measured step
        self.widest_tokens = self.short_steps = 0  # tokens of the longest row; number of steps that ended their data
        self.rows_beside: dict[str, list[int]] = {}  # rows of every step, by number of the auxiliary engine
        self.saved_tensors: SavedTensors | None = None
        self._failure: tuple[int, Message] | None = None  # id and description of the last failure since a step
        self._failures = 0  # since the last step
        self._evaluating = False  # True if the model was in evaluation mode in the last step
        self._variables: dict[str, str] | None = None  # environment before the script ran
        self._steps_left = 0  # steps until the ranks compare their clocks
        self._step_began = self._measuring_began = 0.0
        self._pid = os.getpid()

    def run(self) -> None:
        os.environ.update(_QUIET_ENVIRONMENT)
        self.begin()
        assert self.job.script is not None
        self.script = self.job.script
        sandbox = Sandbox.from_json(self.spec["sandbox"])
        context = Context(
            self.job, self.candidate, self, self.spec["device"], sandbox.files, quiet=True, sandbox=sandbox
        )
        self.hooks = Hooks(context)
        self.hooks.install()
        self._variables = dict(os.environ)
        try:
            run_script(self.script, self.hooks.arguments())
        except SystemExit as error:
            self.leave_if_memory_ended(error)
            self._leave_if_failed()
            if error.code not in (None, 0):
                raise RuntimeError(f"{self.script.name} exited with {error.code}") from None
        except Exception as error:
            if self._failure is not None and self._failure[0] != id(error):
                self._leave_if_failed()  # reports the engine's error instead of its consequence
            raise
        self._leave_if_failed()
        if len(self.timed) >= _MIN_STEPS:
            self._finish()
        raise self._why_ended()

    def _leave_if_failed(self) -> None:
        """Report the engine's last error and leave, because a script may catch it and end by itself."""
        if self._failure is not None:
            self.send_error(self._failure[1])
            leave(EXIT_REPORTED)

    def send_error(self, described: Message) -> None:
        """Send an error, with a variable that was set too late as a possible cause."""
        if why := too_late(self._late()):
            first, newline, rest = described["text"].partition("\n")
            described = {**described, "text": f"{first[:160]} ({why}){newline}{rest}"}
        super().send_error(described)

    def _late(self) -> list[str]:
        """Return the variables that a probe run set too late, without those in the script's text, which were set at once."""
        late = set_late(self._variables) if self.candidate is None and self._variables is not None else []
        known = {one.name for one in settings_in(script_text(self.script) or "")} if late else set()
        return [name for name in late if name not in known]

    def _why_ended(self) -> Unusable:
        if self.engine is None:
            return Unusable(f"{self.script.target} ended without {_MISSING_DEEPSPEED}")
        counted = len(self.warmup) + len(self.timed)
        skipped = f", of which DeepSpeed skipped {self.steps - counted} (fp16 overflow)" if self.steps > counted else ""
        others = max(map(len, self.rows_beside.values()), default=0)
        of = f" of the engine that is tuned ({others} of another, which it trains beside)" if others else ""
        return Unusable(
            f"{self.script.target} ended after {self.steps} optimizer steps{of}{skipped}: a measurement needs at least "
            f"{WARMUP_STEPS + 3}; give it more data or steps",
            Cause.STEPS,
        )

    # -- callbacks of the hooks --------------------------------------------------------------------------------------

    def configured(self, config: dict[str, Any]) -> None:
        self.config = config

    def planned(self, micro_batch: int, accumulation: int, optimizer: str = "") -> None:
        if self.candidate is None and self.engine is None:
            own: dict[str, Any] = {"micro_batch": micro_batch, "accumulation": accumulation}
            own |= {"optimizer": optimizer} if optimizer else {}
            self.channel.send("facts", config=self.config, said=self.hooks.context.said, **own)

    def built(self, engine: Any, facts: dict[str, Any]) -> None:
        another = self.engine is not None
        self.engine, self.facts = engine, facts
        self.own_device.note()
        if another:
            self._begin_anew()
            return
        load(self, self.hooks.load_checkpoint)

    def _begin_anew(self) -> None:
        """Restart counting, because the watched engine was not the one that trains."""
        self.steps = self.short_steps = self.widest_tokens = 0
        self.batch, self.warmup, self.timed, self.rows_beside = Batch(), [], [], {}
        self._evaluating = False
        if self.saved_tensors is not None:
            self.saved_tensors.close()
        self.saved_tensors = None
        if self.request is not None:
            self._tell_facts()
            self._begin_measuring()

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
        self._await_request()  # a loop may call the module instead of the engine
        if phase is Phase.BACKWARD and self.phase is not Phase.BACKWARD:
            # A micro-batch may have several forwards (TRL's KTO), several losses, and a backward without a call of the
            # engine. accelerate calls the engine's step only at boundaries.
            self.batch.micro_batches += 1
            if self.saved_tensors is not None:
                self.saved_tensors.close()
        self.phase = phase
        if phase is Phase.BACKWARD:  # memory peaks here; `stepped` samples too
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
        if not self.overflows.skipped():
            self._count(seconds, self.request)
        elif self.overflows.endless:
            raise Unusable(self.overflows.endless)
        self.batch = Batch()
        self._step_began = time.perf_counter()

    def _count(self, seconds: float, request: Request) -> None:
        """Count a step in which the optimizer ran."""
        if len(self.warmup) < WARMUP_STEPS:
            self.warmup.append(seconds)
            if len(self.warmup) == WARMUP_STEPS:
                self.warmup = self.average(self.warmup)
                self._go_on(timing.stretch(request, 0.0, 0, max(self.warmup)))
                self._measuring_began = time.perf_counter()
            return
        self.timed.append((seconds, self.batch))
        self._steps_left -= 1
        if not self._steps_left:
            self._compare_clocks(request)

    def beside(self, number: int, rows: int) -> None:
        self.rows_beside.setdefault(str(number), []).append(rows)

    def _check(self, candidate: Candidate) -> None:
        """Check that the last step trained on the candidate's batch.

        Raises:
            Unusable: the batch differs, or too many steps were smaller.
        """
        profile = self.script.profile
        for number, rows in self.rows_beside.items() if profile else ():
            check_beside(rows, number, candidate, profile)
        short = check_batch(self.batch, candidate, profile)
        self.short_steps += bool(short)
        if self.short_steps > max(1, MOST_SHORT * self.steps):
            if self.short_steps == self.steps:  # every step deviates
                raise Unusable(short, Cause.BATCH)
            raise Unusable(f"too many steps are the last of their data ({short})", Cause.SHORT)

    def failed(self, error: BaseException) -> None:
        described = self.leave_if_out_of_memory(error)
        self._failure, self._failures = (id(error), described), self._failures + 1
        if isinstance(error, Unusable) or self._failures == _MOST_FAILURES:
            self._leave_if_failed()

    def unbuilt(self, builder: str) -> None:
        if self.candidate is None and builder not in self.spec["ops"]:
            self.channel.send("unbuilt", op=builder)  # the parent builds it first, outside the budget
            self.report(RuntimeError(f"DeepSpeed's {builder} is not built yet"))
            leave(EXIT_REPORTED)

    def strayed(self) -> None:
        self.report(Unusable(f"{self.script.target} trains without {_MISSING_DEEPSPEED}"))
        leave(EXIT_REPORTED)

    # -- measurement -------------------------------------------------------------------------------------------------

    def _await_request(self) -> None:
        """Before the first batch, send the engine's facts and wait for the measurement request."""
        if self.request is not None:
            return
        self._tell_facts()
        self.channel.send("phase", phase="ready")
        message = self.channel.receive()
        if message is None or message["type"] != "measure":
            say_goodbye(self)
        self.request = Request.of(message)
        self._begin_measuring()

    def _tell_facts(self) -> None:
        self.facts |= self.hooks.late_facts()
        if self.candidate is not None and self.script.profile:
            check_checkpointing(self.facts, self.candidate)
        self.channel.send("facts", config=self.config, said=self.hooks.context.said, **self.facts)

    def _begin_measuring(self) -> None:
        self.own_device.reset_peaks()
        self.overflows = Overflows(self.engine)
        self._step_began = self._measuring_began = time.perf_counter()
        if self.candidate is None:
            self.saved_tensors = SavedTensors(self.engine)

    def _compare_clocks(self, request: Request) -> None:
        """End the measurement on all ranks at once, or schedule the next comparison."""
        elapsed, steps = self.agree(time.perf_counter() - self._measuring_began), len(self.timed)
        if not timing.enough(request, elapsed, steps):
            self._go_on(timing.stretch(request, elapsed, steps, elapsed / steps))
        elif timing.settled(request, elapsed, self.average([seconds for seconds, _ in self.timed]), self.warmup):
            self._finish()
        else:
            self._go_on(1 + steps // 4)

    def _go_on(self, steps: int) -> None:
        """Run up to `steps` steps before the next comparison; the first stretch is shorter, since steps may differ."""
        self._steps_left = min(steps, max(MOST_AT_ONCE, len(self.timed)))

    def _finish(self) -> NoReturn:
        device = self.own_device
        device.synchronize()
        batches = [batch for _, batch in self.timed]
        tokens = statistics.fmean(batch.tokens for batch in batches)
        facts = {**self._trained(batches), "tokens": tokens, "widest": self.widest_tokens}
        if self._evaluating:
            facts["evaluating"] = True
        if not self.script.profile:
            facts[SOURCES] = self.hooks.sources()
        if self.saved_tensors is not None:
            facts["saved_bytes"] = self.saved_tensors.bytes
        if late := self._late():
            facts["variables"] = {name: os.environ[name] for name in of_the_device(late) if name in os.environ}
            facts["late"] = too_late([name for name in late if name not in facts["variables"]])
        if self.rows_beside:
            facts["beside"] = {number: usual(rows) for number, rows in self.rows_beside.items()}
        self.channel.send(
            "measured",
            step_seconds=self.average([seconds for seconds, _ in self.timed]),
            warmup_steps=WARMUP_STEPS,
            measured_seconds=time.perf_counter() - self._measuring_began,
            tokens=tokens,
            extrapolated=False,
            facts=facts,
            live_bytes={},
            **device.peaks(),
        )
        self._serve_certificates()
        say_goodbye(self)

    def _trained(self, batches: list[Batch]) -> dict[str, Any]:
        """Return facts about the measured steps.

        Raises:
            Unusable: the steps do not match the candidate, or vary in a probe run.
        """
        if self.candidate is not None and self.script.profile:
            check_tokens(batches, self.candidate, self.script.profile)
            return {**usual_step(batches)}
        loader = getattr(self.engine, "training_dataloader", None)
        fed = any(getattr(loader, name, None) is not None for name in ("data", "data_iterator"))  # set by a read
        return own_steps(batches, self.facts["micro_batch"], self.facts["accumulation"], fed=fed)

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


become = partial(measure_as, ScriptRank)  # arguments: address, number


if __name__ == "__main__":
    run_as(ScriptRank)
