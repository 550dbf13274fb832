"""A trial, then true OOMs without a cap in forward, backward, step and init, with a trial after each.

In rehearsal the ranks have CPUs and a cap, and a planted fault takes memory up to it in the same phases: sizes are computed
for a named GPU.
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing

from autotune.executors.base import MeasureSpec
from autotune.predict.predictor import Predictor
from autotune.predict.trace import traced_predictor
from autotune.problem.candidate import Candidate
from autotune.problem.hardware import Hardware, named_hardware
from autotune.problem.outcome import Outcome, OutcomeKind
from autotune.util.units import GIB
from benchmarks.gpu.ground import EXPECTED, Ground, Row
from benchmarks.gpu.rows import as_row, beside, candidate
from benchmarks.trials.ranks import LocalExecutor, opened

MODEL, TOKENS = "smollm2-360m", 2048
QUICK = MeasureSpec(min_steps=5, max_steps=20, min_seconds=1.5, max_seconds=6.0)
REHEARSED = MeasureSpec(min_steps=2, max_steps=2, min_seconds=0.0)
CHECKPOINTED = {"activation_checkpointing": True}
# Parameters of models whose weights and gradients in fp32 fit a card of 80 or 141 GB, and whose AdamW's states do not.
HEAVY = {"qwen2.5-3b": 3.1e9, "qwen2.5-7b": 7.6e9, "qwen2.5-14b": 14.8e9, "qwen2.5-32b": 32.8e9}
_REHEARSAL_CAP_BYTES = 2 * GIB
# Share of the capacity. A checkpointed forward ends with 10 bytes a logit, its backward begins with 12: 19 % lie between.
_WINDOW_SHARE = 1.08
_ATTEMPTS = 3


@dataclasses.dataclass
class Trials:
    """Trials of one executor, as rows."""

    ground: Ground
    executor: LocalExecutor
    predictor: Predictor
    small: Candidate

    def row(self, what: str, one: Candidate, expected: Callable[[Outcome], bool], seconds: float = 60.0) -> Row:
        with closing(self.executor.session(one, uuid.uuid4().hex[:8])) as session:
            outcome = session.measure(one, self.ground.choose(QUICK, REHEARSED), seconds)
        left = self.executor.meter.unreleased_memory_warnings()
        row: Row = {"what": what, "candidate": str(one), "phase": outcome.phase.value, **as_row(outcome)}
        if self.executor.job == self.predictor.job:
            row |= beside(self.predictor.predict(one), outcome)
        row |= {"isolation": self.executor.isolation, "left": left}
        return {**row, EXPECTED: expected(outcome) and self.executor.isolation == "fork" and not left}

    def good(self, what: str) -> Row:
        return self.row(what, self.small, lambda outcome: outcome.ok)

    def out_of_memory(
        self, what: str, one: Candidate, phase: str, seconds: float = 60.0, *, in_any_phase: bool = False
    ) -> Row:
        """A trial that is to run out of memory in a phase; on a GPU it may be another phase if that is said."""
        anywhere = in_any_phase and not self.ground.rehearse
        if self.ground.rehearse:
            self.executor.fault = lambda name: {"rank": 0, "where": phase, "what": "exhaust"}
        try:
            return self.row(
                what,
                one,
                lambda out: out.kind is OutcomeKind.OOM_DEVICE and (anywhere or out.phase.value == phase),
                seconds,
            )
        finally:
            self.executor.fault = lambda name: None


def run(ground: Ground) -> Iterator[Row]:
    hardware = dataclasses.replace(ground.hardware(), memory_cap_bytes=ground.choose(None, _REHEARSAL_CAP_BYTES))
    job, small = ground.job(MODEL, TOKENS), candidate(ground, 2, 4)
    predictor = traced_predictor(job, ground.choose(hardware, named_hardware("h200", 1)))
    with opened(job, hardware, ground.folder, [small]) as executor:
        trials = Trials(ground, executor, predictor, small)
        yield trials.good("a trial")
        yield trials.out_of_memory("forward: 512 sequences", candidate(ground, 2, 512), "forward")
        yield trials.good("a trial after it")
        yield from _in_backward(trials)
        yield trials.good("a trial after it")
        yield from _of_heavy_model(trials)


def _in_backward(trials: Trials) -> Iterator[Row]:
    """The largest micro-batch whose forward fits and whose backward does not is looked for."""
    ground, predictor = trials.ground, trials.predictor
    size = backward_size(predictor)
    for _ in range(_ATTEMPTS):
        one = candidate(ground, 2, size, **CHECKPOINTED)
        row = trials.out_of_memory(f"backward: {size} sequences, checkpointed", one, "backward")
        yield row
        if row[EXPECTED]:
            return
        size = max(1, int(size * (1.06 if row["outcome"] == "ok" else 0.95)))


def backward_size(predictor: Predictor) -> int:
    """Return the sequences at which a checkpointed micro-batch is predicted to run out of memory early in its backward."""
    seen = predictor.predict(Candidate.of({"zero_stage": 2, **_batch(48), **CHECKPOINTED})).memory
    base = sum(float(seen[name]) for name in ("parameters", "gradients", "optimizer", "context and communication"))
    of_batch = float(seen["activations"]) + float(seen["logits and loss"])
    return max(1, int((_WINDOW_SHARE * predictor.hardware.capacity_bytes - base) / (of_batch / 48)))


def heavy_model(hardware: Hardware) -> str | None:
    """Return a model whose fp32 weights and gradients fit the device, and whose optimizer states do not."""
    capacity = hardware.capacity_bytes
    fitting = (name for name, n in HEAVY.items() if 8 * n < 0.9 * capacity and 16 * n > 1.05 * capacity)
    return next(fitting, None)


def _of_heavy_model(trials: Trials) -> Iterator[Row]:
    """OOM at the first step, where AdamW makes its states, and in init, where ZeRO makes them for bf16."""
    ground, executor = trials.ground, trials.executor
    heavy = heavy_model(trials.predictor.hardware)
    if heavy is None:
        yield {"what": "step and init", "why": f"no model of {', '.join(HEAVY)} is right for this GPU"}
        return
    job = executor.job
    try:
        executor.job = dataclasses.replace(ground.job(heavy, 32), precision="fp32")
        yield trials.out_of_memory(f"step: {heavy}, fp32", candidate(ground, 0, 1), "step", 90.0)
        executor.job = ground.job(heavy, 32)
        what = f"init: {heavy}, bf16 with 16 bytes a parameter"
        yield trials.out_of_memory(what, candidate(ground, 1, 1), "init", 90.0, in_any_phase=True)
    finally:
        executor.job = job
    yield trials.good("a trial after it")


def _batch(size: int) -> dict[str, int]:
    return {"train_micro_batch_size_per_gpu": size, "gradient_accumulation_steps": 1}
