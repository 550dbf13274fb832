"""Rank that measures a user's script (`python -m autotune.rank.script_rank`) and checks its batch."""

from __future__ import annotations

import functools
import math
import os
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn

from autotune.errors import Cause, Unusable
from autotune.problem.candidate import ACCUMULATION, CHECKPOINTING, MICRO_BATCH, Candidate
from autotune.problem.import_time_env import of_the_device, set_late, settings_in, too_late
from autotune.problem.job import ScriptProfile, script_text
from autotune.problem.outcome import Phase
from autotune.rank import hooks, measure
from autotune.rank.base import EXIT_REPORTED, BaseRank, exit_process
from autotune.rank.hooks import environment, source_files
from autotune.rank.hooks.base import Context, Sizes, TrainingObserver
from autotune.rank.hooks.config import merged_arguments
from autotune.rank.hooks.deepspeed import late_facts, unhooked
from autotune.rank.measure import (
    MeasureRequest,
    certify_save,
    checkpoint,
    finish_rank,
    load,
    measure_as,
    run_as,
    run_script,
)
from autotune.rank.patches import Patches
from autotune.rank.random_state import RandomState
from autotune.rank.sandbox import Sandbox
from autotune.rank.training_trace import TraceRecorder
from autotune.script.environment import READ, READ_INTEGERS
from autotune.script.profile import TOKENS, UNCOUNTED
from autotune.script.source_digests import SOURCES
from autotune.workers.protocol import Channel, Message

# -- script ------------------------------------------------------------------------------------------------------------
#
# Rank that measures a user's script: hooks watch the running script until enough steps are timed.
#
# Run as `python -m autotune.rank.script_rank ADDRESS NUMBER` (a cold start), or `become` in a child of the fork server.

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
# Names of a run that the user's shell continues: a trial's tracker must not write into it. Ids of experiments are those of
# the user's server; MLflow ends with an error if its folder has no experiment of that id.
_RUNS = (
    "WANDB_RUN_ID",
    "WANDB_RESUME",
    "MLFLOW_RUN_ID",
    "MLFLOW_EXPERIMENT_ID",
    "COMET_EXPERIMENT_KEY",
    "NEPTUNE_CUSTOM_RUN_ID",
    "CLEARML_TASK_ID",
    "SWANLAB_RUN_ID",
)


def quiet_trackers(folder: str) -> None:
    """Disable trackers and uploads of this process, and forget the runs that the user's shell names.

    MLflow has no switch for a script's own calls: they write into `folder` in place of the user's server.
    """
    os.environ.update(_QUIET_ENVIRONMENT)
    os.environ["MLFLOW_TRACKING_URI"] = os.environ["MLFLOW_REGISTRY_URI"] = f"file://{folder}/mlruns"
    for name in _RUNS:
        os.environ.pop(name, None)


class ScriptRank(BaseRank, TrainingObserver):
    """Run `spec["job"]["script"]` under `spec["candidate"]`, or unmodified (a probe run) if that is None."""

    def __init__(self, channel: Channel, spec: Message) -> None:
        super().__init__(channel, spec)
        self.candidate = Candidate.of(spec["candidate"]) if spec["candidate"] else None
        self.config: dict[str, Any] = {}  # the script's own
        self.engine: Any = None
        self.facts: dict[str, Any] = {}  # facts of the engine
        self.request: MeasureRequest | None = None  # measurement request, received before the first batch
        self.overflows = Overflows(None)
        self.saved_tensors: SavedTensors | None = None
        self._reset()
        self.random_state = RandomState(self.number)
        self._failure: tuple[int, Message] | None = None  # id and description of the last failure since a step
        self._failures = 0  # since the last step
        self._variables: dict[str, str] | None = None  # environment before the script ran
        self._steps_left = 0  # steps until the ranks compare their clocks
        self._step_began = self._measuring_began = 0.0

    def _reset(self) -> None:
        """Start counting, again if the watched engine was not the one that trains."""
        self.steps = 0
        self.batch = Batch()  # batch of the running step
        self.warmup: list[float] = []  # seconds of warm-up steps without skipped ones
        self.timed: list[float] = []  # seconds of every measured step
        self.batches: list[Batch] = []  # of every measured step
        self.short_steps = 0  # number of steps that ended their data
        self.lengths: list[set[int]] = []  # tokens of a row, in the forwards of every step
        self.rows_beside: dict[str, list[int]] = {}  # rows of every step, by number of the auxiliary engine
        self._evaluating = False  # True if the model was in evaluation mode in the last step

    def run(self) -> None:
        """Run the script under hooks and measure its steps on request of the tuner."""
        sandbox = Sandbox.from_json(self.spec["sandbox"])
        quiet_trackers(f"{sandbox.files}/rank{self.number}")  # ranks that create one experiment refuse each other's
        self.begin(joins=False)
        assert self.job.script is not None
        self.script = self.job.script
        if seeds := self.script.profile.seeds[self.number : self.number + 1]:
            self.random_state = RandomState(self.number, *seeds)
        self.context = context = Context(
            self.job, self.candidate, self, self.spec["device"], sandbox.files, quiet=True, sandbox=sandbox
        )
        context.trace = TraceRecorder(self.random_state)
        context.join = self.join
        hooks.install(context)
        self._variables = dict(os.environ)
        self.random_state.install(context.patches)
        self.random_state.seed(self.spec["seed"])
        try:
            run_script(self.script, merged_arguments(context))
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
            exit_process(EXIT_REPORTED)

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
        skipped = f", of which DeepSpeed skipped {self.steps - counted} (overflow)" if self.steps > counted else ""
        others = max(map(len, self.rows_beside.values()), default=0)
        of = f" of the engine that is tuned ({others} of another, which it trains beside)" if others else ""
        return Unusable(
            f"{self.script.target} ended after {self.steps} optimizer steps{of}{skipped}: a measurement needs at least "
            f"{WARMUP_STEPS + 3}; give it more data or steps",
            Cause.STEPS,
        )

    # -- callbacks of the hooks --------------------------------------------------------------------------------------

    def configured(self, config: dict[str, Any]) -> None:
        """Store the DeepSpeed config that the script passes."""
        self.config = config

    def planned(self, micro_batch: int, accumulation: int, optimizer: str = "") -> None:
        """Report the script's own batch and optimizer to the tuner, before an engine is built."""
        if self.candidate is None and self.engine is None:
            own: dict[str, Any] = {"micro_batch": micro_batch, "accumulation": accumulation}
            own |= {"optimizer": optimizer} if optimizer else {}
            self.channel.send("facts", config=self.config, said=self.context.said, **own)

    def built(self, engine: Any, facts: dict[str, Any]) -> None:
        """Store the engine and load the checkpoint. A second engine restarts the measurement."""
        another = self.engine is not None
        self.engine, self.facts = engine, facts
        self.own_device.note()
        if not another:
            load(self, functools.partial(unhooked, self.context, "load_checkpoint"))
            return
        self._reset()
        if self.saved_tensors is not None:
            self.saved_tensors.close()
        if self.request is not None:
            self._tell_facts()
            self._begin_measuring()

    def forward(self, sizes: Sizes) -> None:
        """Count the samples and tokens of a forward."""
        self._await_request()
        self.batch.add(sizes)
        if sizes.rows:
            self.batch.lengths.add(sizes.tokens // sizes.rows)

    def entered(self, phase: Phase) -> None:
        """Process the start of a phase; count micro-batches at their first backward."""
        if phase is Phase.INIT:
            self.random_state.note_engine()
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
        self.progress(_PROGRESS_SECONDS, micro_batches=self.batch.micro_batches)

    def stepped(self) -> None:
        """Record the time of an optimizer step."""
        assert self.request is not None
        device = self.own_device
        device.synchronize()
        device.note()
        recording = sum(trace.take_seconds() for _, trace in self.context.traces)
        seconds = max(time.perf_counter() - self._step_began - recording, 0.0)
        self.steps += 1
        self._failure, self._failures = None, 0
        self._evaluating = not self.engine.module.training
        self.lengths.append(self.batch.lengths)
        if self.candidate is not None:
            self._check(self.candidate)
        if not self.overflows.skipped():
            self._count(seconds, self.request)
        elif self.overflows.endless:
            raise Unusable(self.overflows.endless)
        self.batch = Batch()
        self._step_began = time.perf_counter()

    def _count(self, seconds: float, request: MeasureRequest) -> None:
        """Count a step in which the optimizer ran."""
        if len(self.warmup) < WARMUP_STEPS:
            self.warmup.append(seconds)
            if len(self.warmup) == WARMUP_STEPS:
                self.warmup = self.average(self.warmup)
                self.request = request = measure.after_warmup(request, self.warmup)
                self._go_on(measure.stretch(request, 0.0, 0, max(self.warmup)))
                self._measuring_began = time.perf_counter()
            return
        self.timed.append(seconds)
        self.batches.append(self.batch)
        self._steps_left -= 1
        if not self._steps_left:
            self._compare_clocks(request)

    def auxiliary_stepped(self, number: int, rows: int) -> None:
        """Record the rows of an auxiliary engine's optimizer step."""
        self.rows_beside.setdefault(str(number), []).append(rows)

    def _check(self, candidate: Candidate) -> None:
        """Check that the last step trained on the candidate's batch.

        Raises:
            Unusable: the batch differs, or too many steps were smaller.
        """
        profile = self.script.profile
        for number, rows in self.rows_beside.items() if profile.is_known else ():
            check_auxiliary_engine(rows, number, candidate, profile)
        short = check_batch(self.batch, candidate, profile)
        self.short_steps += bool(short)
        if self.short_steps > max(1, MOST_SHORT * self.steps):
            if self.short_steps == self.steps:  # every step deviates
                raise Unusable(short, Cause.BATCH)
            raise Unusable(f"too many steps are the last of their data ({short})", Cause.SHORT)

    def resized(self) -> None:
        """End the measurement before the script trains another batch, if it has measured steps."""
        if len(self.timed) >= _MIN_STEPS:
            self._finish()

    def failed(self, error: BaseException) -> None:
        """Process an exception that the script may catch. OOMs and repeated failures end the rank."""
        described = self.leave_if_out_of_memory(error)
        self._failure, self._failures = (id(error), described), self._failures + 1
        if isinstance(error, Unusable) or self._failures == _MOST_FAILURES:
            self._leave_if_failed()

    def op_missing(self, builder: str) -> None:
        """Report a DeepSpeed op that must be built first, and end the rank."""
        if self.candidate is None and builder not in self.spec["ops"]:
            self.channel.send("unbuilt", op=builder)  # the parent builds it first, outside the budget
            self.report(RuntimeError(f"DeepSpeed's {builder} is not built yet"))
            exit_process(EXIT_REPORTED)

    def no_engine_found(self) -> None:
        """Report that the script trains without DeepSpeed, and end the rank."""
        self.report(Unusable(f"{self.script.target} trains without {_MISSING_DEEPSPEED}"))
        exit_process(EXIT_REPORTED)

    # -- measurement -------------------------------------------------------------------------------------------------

    def _await_request(self) -> None:
        """Before the first batch, send the engine's facts and wait for the measurement request."""
        if self.request is not None:
            return
        self._tell_facts()
        self.channel.send("phase", phase="ready")
        message = self.channel.receive()
        if message is None or message["type"] != "measure":
            finish_rank(self)
        self.request = MeasureRequest.of(message)
        if message.get("reseed"):
            self.random_state.reseed(self.spec["seed"] + 1)
        self._begin_measuring()

    def _tell_facts(self) -> None:
        self.facts |= late_facts(self.context)
        if self.candidate is not None and self.script.profile.is_known:
            check_checkpointing(self.facts, self.candidate)
        self.channel.send("facts", config=self.config, said=self.context.said, **self.facts)

    def _begin_measuring(self) -> None:
        self.own_device.reset_peaks()
        self.overflows = Overflows(self.engine)
        self._step_began = self._measuring_began = time.perf_counter()
        if self.candidate is None:
            self.saved_tensors = SavedTensors(self.engine)

    def _compare_clocks(self, request: MeasureRequest) -> None:
        """End the measurement on all ranks at once, or schedule the next comparison."""
        elapsed, steps = self.agree(time.perf_counter() - self._measuring_began), len(self.timed)
        if not measure.holds_another(request, elapsed, elapsed / steps) or (
            request.can_be_beaten and measure.beaten(request, self.average(self.timed))
        ):
            self._finish()
        elif not measure.enough(request, elapsed, steps):
            self._go_on(measure.stretch(request, elapsed, steps, elapsed / steps))
        elif measure.settled(request, elapsed, self.average(self.timed), self.warmup):
            self._finish()
        else:
            self._go_on(1 + steps // 4)

    def _go_on(self, steps: int) -> None:
        """Run up to `steps` steps before the next comparison; the first stretch is shorter, since steps may differ."""
        self._steps_left = min(steps, max(MOST_AT_ONCE, len(self.timed)))

    def _finish(self) -> NoReturn:
        device = self.own_device
        device.synchronize()
        batches, tokens = self.batches, {}
        if any(batch.tokens > batch.rows for batch in batches):  # otherwise they have no tokens: images, audio frames
            tokens = {"tokens": statistics.fmean(batch.tokens for batch in batches)}
        widest_tokens = max(set[int]().union(*self.lengths), default=0)
        facts: dict[str, Any] = {**tokens, "widest": widest_tokens, "evaluating": self._evaluating}
        if self.candidate is not None and self.script.profile.is_known:
            check_tokens(batches, self.candidate, self.script.profile)
        else:
            by_hand = getattr(self.engine, "_is_gradient_accumulation_boundary", None) is not None  # set by the script
            facts |= own_steps(batches, self.facts["micro_batch"], self.facts["accumulation"])
            facts |= {"boundary_by_hand": by_hand, "unsynced": self.context.unsynced}
            facts["grad_changed_by_hand"] = self.context.trace.changes_gradients
            facts[SOURCES] = source_files.found(self.context)
            facts[READ], facts[READ_INTEGERS] = environment.found(self.context, facts[SOURCES])
        if grows := growth(self.lengths):
            facts["grows"] = [*grows, self.context.loader_tokens]
        if self.saved_tensors is not None:
            facts["saved_bytes"] = self.saved_tensors.bytes
        if late := self._late():
            facts["variables"] = {name: os.environ[name] for name in of_the_device(late) if name in os.environ}
            facts["late"] = too_late([name for name in late if name not in facts["variables"]])
        if self.rows_beside:
            facts["beside"] = {number: typical_rows(rows) for number, rows in self.rows_beside.items()}
        self.channel.send(
            "measured",
            seeds=self.random_state.named if self.candidate is None else [],
            repeats_seeds=self.random_state.repeats,
            step_seconds=self.average(self.timed),
            warmup_steps=WARMUP_STEPS,
            measured_seconds=time.perf_counter() - self._measuring_began,
            facts=facts,
            trace=self.context.report(),
            **tokens,
            **device.peaks(),
        )
        self._serve_certificates()
        finish_rank(self)

    def _serve_certificates(self) -> None:
        message: Message | None
        while (message := self.channel.receive()) is not None and message["type"] != "stop":
            if message["type"] == "certify":
                certify_save(self, functools.partial(unhooked, self.context, "save_16bit_model"))
            elif message["type"] == "checkpoint":
                save = functools.partial(unhooked, self.context, "save_checkpoint")
                checkpoint(self, self.engine, save, message)


_MISSING_DEEPSPEED = (
    "calling deepspeed.initialize: give it its DeepSpeed config (for Hugging Face's Trainer: --deepspeed ds.json) or make "
    "it use DeepSpeed"
)


become = functools.partial(measure_as, ScriptRank)  # arguments: address, number


# -- observed training -------------------------------------------------------------------------------------------------
#
# Record the batches that a script's steps trained on, and check them against the candidate.

MOST_SHORT = 0.25  # share of steps that may have a smaller batch
_NEAR = 0.1  # relative deviation from the tokens of full rows, because packing leaves a few percent free
_SURE = 0.03  # largest relative standard error of the mean tokens
_VARYING = "the rows of the script's batches change from step to step, so its micro-batch cannot be checked"


@dataclass
class Batch:
    """Contents of one rank's batch in one optimizer step."""

    micro_batches: int = 0  # forwards that a backward follows
    rows: int = 0
    sequences: int = 0  # more than rows if rows are packed
    tokens: int = 0
    packed: int = 0  # rows that fill a forward alone with concatenated, separable sequences
    rows_by_name: Counter[str] = field(default_factory=Counter)  # rows of each tensor
    lengths: set[int] = field(default_factory=set)  # tokens of a row, in each forward

    def add(self, sizes: Sizes) -> None:
        """Add the counts of a forward."""
        self.rows += sizes.rows
        self.sequences += sizes.sequences
        self.tokens += sizes.tokens
        self.packed += sizes.packed
        self.rows_by_name.update(sizes.rows_by_name)

    @property
    def flat(self) -> bool:
        """True if every forward had one row of several sequences."""
        return self.packed == self.rows > 0


def own_steps(batches: Sequence[Batch], micro_batch: int, accumulation: int) -> dict[str, Any]:
    """Return the counts per step of a probe run, in the terms of `script.profile.batch_seen`.

    Args:
        micro_batch: micro-batch of the script's config.
        accumulation: accumulation of the script's config.
    """
    # the most frequent counts, since a data set's last step may be smaller
    found: dict[str, Any] = {
        "micros": statistics.mode(batch.micro_batches for batch in batches),
        "rows": statistics.mode(batch.rows for batch in batches),
        "sequences": statistics.mode(batch.sequences for batch in batches),
    }
    rows = [batch.rows for batch in batches]
    if not any(rows) or typical_rows(rows):
        flat = all(batch.flat for batch in batches) and not typical_rows([batch.sequences for batch in batches])
        return {**found, "packed_tokens": _steady_tokens(batches, accumulation)} if flat else found
    samples = micro_batch * (found["micros"] or accumulation)
    each = {name: [batch.rows_by_name[name] for batch in batches] for name in batches[0].rows_by_name}
    steady = {name: one for name, of in each.items() if all(of) and (one := typical_rows(of)) and one % samples == 0}
    if steady:
        name = min(steady, key=lambda name: steady[name])
        return {**found, "rows": steady[name], "sequences": steady[name], "counted_by": name}
    return {**found, "rows": 0, "sequences": 0, "uncounted": _VARYING}


def _steady_tokens(batches: Sequence[Batch], accumulation: int) -> float:
    """Return the mean tokens of a micro-batch, or 0 if steps differ too much."""
    each = [batch.tokens / (batch.micro_batches or accumulation) for batch in batches]
    mean = statistics.fmean(each)
    error = statistics.stdev(each) / math.sqrt(len(each)) if len(each) > 1 else mean
    return mean if error <= _SURE * mean else 0.0


def growth(lengths: Sequence[set[int]]) -> list[int]:
    """Return the tokens of a row in the first and in the last step if rows grow step by step; empty otherwise.

    All rows of a step then have one length, unlike rows of random lengths.

    Args:
        lengths: of each step, in its forwards.
    """
    each = [max(one) for one in lengths if len(one) == 1]
    grows = len(each) == len(lengths) and each == sorted(each) and each[:1] < each[-1:]
    return [each[0], each[-1]] if grows else []


def check_checkpointing(facts: dict[str, Any], candidate: Candidate) -> None:
    """Check that activation checkpointing is as the candidate sets it, if the candidate sets it.

    Raises:
        Unusable: the script's code has changed it since.
    """
    told = candidate.get(CHECKPOINTING)
    if told is not None and facts["checkpointing"] and facts["checkpointed"] != bool(told):
        words = {True: "on", False: "off"}
        raise Unusable(
            f"the script switches activation checkpointing {words[not told]} where it was told {words[bool(told)]}"
        )


def check_batch(batch: Batch, candidate: Candidate, profile: ScriptProfile) -> str:
    """Check one rank's batch of one step against the candidate, whose speed must not come from another batch.

    Args:
        profile: findings of the probe run.

    Returns:
        A text about a smaller batch, if the step may be a data set's last; empty for a full batch.

    Raises:
        Unusable: the numbers of micro-batches or sequences differ.
    """
    if profile.batch_note or not profile.counted:
        if (profile.micro_batch, profile.accumulation) != (candidate.micro_batch, candidate.accumulation):
            raise Unusable(profile.batch_note or UNCOUNTED, Cause.BATCH)
        if not profile.held:  # only the settings with the least memory ran
            return ""
        unit, micros, asked = "rows", float(profile.held["micros"]), float(profile.held["rows"])
    else:
        unit, micros = profile.counted, candidate.accumulation * profile.micros_per_accumulation
        asked = candidate.rows_per_rank * profile.rows_per_sample
        if unit == TOKENS:  # tokens are checked by their mean, see `check_tokens`
            unit, asked = "rows", 0 if batch.flat else candidate.micro_batch * micros
        elif candidate.micro_batch > 1 and batch.rows == batch.micro_batches:
            unit = "sequences"  # one row per forward with concatenated samples
    seen, got = batch.micro_batches or micros, getattr(batch, unit)
    whole = asked * seen / micros
    gave = f"the script gave {got} {unit} a step where {asked:g} were asked for"
    sets = f"sets the batch, like --map {MICRO_BATCH}"
    if abs(seen - micros) > 0.5:
        gave = f"the script accumulated {seen} micro-batches where {micros:g} were asked for"
        sets = f"sets it, like --map {ACCUMULATION}"
    text = f"{gave}: say which flag {sets}=--FLAG"
    # the last step of an epoch may have fewer micro-batches, and its last micro-batch fewer sequences
    fits = not asked or whole - asked / candidate.accumulation + 0.5 <= got <= whole + 0.5
    if seen > micros + 0.5 or not fits:
        raise Unusable(text, Cause.BATCH)
    return text if seen < micros - 0.5 or got < asked - 0.5 else ""


def check_tokens(batches: Sequence[Batch], candidate: Candidate, profile: ScriptProfile) -> None:
    """Check the mean tokens of packed rows, which are full except for a few percent.

    The mean must be closer to that of the candidate's micro-batch than to that of any other.

    Raises:
        Unusable: the number of concatenated rows differs.
    """
    if profile.batch_note or profile.counted != TOKENS:
        return
    flat = [batch for batch in batches if batch.flat]  # rows of other batches are counted
    if not flat:
        return
    told = candidate.accumulation * profile.micros_per_accumulation
    got = sum(batch.tokens for batch in flat) / sum(batch.micro_batches or told for batch in flat)
    asked = candidate.micro_batch * profile.rows_per_sample
    if abs(got / asked - 1) > min(_NEAR, 0.5 / candidate.micro_batch):
        raise Unusable(
            f"the script gave {got:.0f} tokens a micro-batch where about {asked:.0f} were asked for: say which flag sets the "
            f"batch, like --map {MICRO_BATCH}=--FLAG",
            Cause.BATCH,
        )


def typical_rows(rows: Sequence[int]) -> int:
    """Return the rows of most steps, or 0 if more steps differ than an occasional last batch."""
    most = statistics.mode(rows)
    smaller = sum(one < most for one in rows)
    return 0 if max(rows) > most or smaller > max(1, MOST_SHORT * len(rows)) else most


def check_auxiliary_engine(rows: Sequence[int], number: str, candidate: Candidate, profile: ScriptProfile) -> None:
    """Check the steps of an auxiliary engine: unchanged, or scaled like those of the first engine.

    Raises:
        Unusable: they are neither, or the engine made no step in the probe run.
    """
    if not profile.beside:  # no auxiliary engine was seen
        return
    known = profile.beside.get(number, 0)
    if not known and number in profile.beside:  # its batch does not depend on the candidate
        return
    times = candidate.rows_per_rank / (profile.micro_batch * profile.accumulation)
    other = [one for one in rows if abs(one - known) > 0.5 and abs(one - known * times) > 0.5]
    if other and (max(other) > known * max(1, times) or len(other) > max(1, MOST_SHORT * len(rows))):
        raise Unusable(
            f"an engine beside the first trained on {other[-1]} rows a step, and in the script's own steps on {known}",
            Cause.BATCH,
        )


# -- saved tensors -----------------------------------------------------------------------------------------------------
#
# Measure the activations that forwards save for backward in a probe run.


class SavedTensors:
    """Count the bytes that forwards save for backward, from construction until `close`.

    Parameters of the model are not counted, and each storage is counted once.

    Autograd returns what its hooks have seen as other tensors, which lack a parameter's attributes. A function of the script
    may read them in its backward (ZeRO-3's `ds_status` in TRL, Megatron's `main_grad`), so it saves its tensors without hooks,
    and they are counted afterwards.
    """

    def __init__(self, engine: Any) -> None:
        import torch

        self.bytes = 0
        seen = {p.untyped_storage().data_ptr() for p in engine.module.parameters()}

        def pack(tensor: Any) -> Any:
            if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
                where = tensor.untyped_storage().data_ptr()
                if where not in seen:
                    seen.add(where)
                    self.bytes += tensor.untyped_storage().nbytes()
            return tensor

        self._hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        self._inside, self._installed, patches = False, ExitStack(), Patches()
        original: Any = vars(torch.autograd.Function)["apply"]  # a method of C since torch 2.14

        @functools.wraps(torch.autograd.Function.apply)
        def unhooked(kind: Any, *args: Any, **kwargs: Any) -> Any:
            apply = original.__get__(None, kind)
            if self._inside:  # a function within a function, whose graph is not kept
                return apply(*args, **kwargs)
            self._inside = True
            self._hooks.__exit__(None, None, None)
            try:
                found = apply(*args, **kwargs)
            finally:
                self._hooks.__enter__()
                self._inside = False
            results = found if isinstance(found, tuple) else (found,)
            node = next((one.grad_fn for one in results if getattr(one, "grad_fn", None) is not None), None)
            with suppress(RuntimeError):  # a saved tensor was changed since
                for tensor in getattr(node, "saved_tensors", ()):
                    pack(tensor)
            return found

        self._installed.enter_context(self._hooks)
        self._installed.callback(patches.close)
        patches.replace(torch.autograd.Function, "apply", classmethod(unhooked))

    def close(self) -> None:
        """Remove the hooks of saved tensors, once."""
        self._installed.close()


# -- overflow ----------------------------------------------------------------------------------------------------------
#
# Detect steps that DeepSpeed skips because gradients overflow, in any precision. They run no optimizer and do not count.

# Limit of skipped steps in a row. DeepSpeed starts at a loss scale of 2^16 (2^32 in old configs), and halves it at
# every overflow except the first.
MOST_SKIPPED = 40


class Overflows:
    """Watch an engine from construction on. All its ranks skip the same steps, because an overflow is shared."""

    def __init__(self, engine: Any) -> None:
        self.in_a_row = 0
        self._engine, self._known = engine, _count(engine)  # a loaded checkpoint brings a count

    def skipped(self) -> bool:
        """Return True if the last step was skipped."""
        before, self._known = self._known, _count(self._engine)
        skipped = self._known > before
        self.in_a_row = self.in_a_row + 1 if skipped else 0
        return skipped

    @property
    def endless(self) -> str:
        """Reason why no step will ever count; empty while one still may."""
        if self.in_a_row < MOST_SKIPPED:
            return ""
        why, remedy = "since gradients are infinite or NaN", "Look at the loss and at the data"
        if self._engine.fp16_enabled():
            why = "since gradients overflow in fp16"
            remedy = (
                "Train in bf16, or look at the loss and at the config's fp16 section (a static loss_scale stays as it is; "
                "initial_scale_power may be too high)"
            )
        return (
            f"DeepSpeed skipped {self.in_a_row} steps in a row, {why}, and the optimizer has not run: "
            f"the time of such steps says nothing of a training. {remedy}"
        )


def _count(engine: Any) -> int:
    return int(getattr(engine, "skipped_steps", 0))


if __name__ == "__main__":
    run_as(ScriptRank)
