"""Rank that trains a named model or a user's workload: build one engine, then measure on request of the tuner.

Run as `python -m autotune.rank.model_rank ADDRESS NUMBER` (a cold start), or `become` in a child of the fork server.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

from autotune.problem.outcome import Phase
from autotune.problem.training_trace import MOST_STEPS
from autotune.rank import measure
from autotune.rank.base import BaseRank
from autotune.rank.hooks.base import sizes_of
from autotune.rank.measure import MeasureRequest, StepParts, certify_save, checkpoint, load, measure_as, run_as
from autotune.rank.script_rank import Overflows
from autotune.rank.training_trace import TraceRecorder
from autotune.workers.protocol import Message


class ModelRank(BaseRank):
    """Keep one engine for the whole life of the rank. Only micro-batch and accumulation change."""

    def run(self) -> None:
        """Build the model and its engine, then measure on request of the tuner."""
        self.begin()
        self.torch.manual_seed(self.spec["seed"])
        self.enter(Phase.INIT)
        self.fault(Phase.INIT)
        self._build()
        # No module loads the keys of a 4-bit weight again. Frozen weights are left out, as Trainer does for peft.
        coded = self.job.lora is not None and bool(self.job.lora.quantize)

        def save(folder: str) -> Any:
            return self.engine.save_checkpoint(folder, **({"exclude_frozen_parameters": True} if coded else {}))

        load(self, lambda folder: self.engine.load_checkpoint(folder, load_module_strict=not coded))
        self.channel.send("phase", phase="ready")
        while (message := self.channel.receive()) is not None:
            if message["type"] == "measure":
                self._measure(MeasureRequest.of(message))
            elif message["type"] == "certify":
                self._certify(message)
            elif message["type"] == "checkpoint":
                checkpoint(self, self.engine, save, message)
            elif message["type"] == "stop":
                return

    def _build(self) -> None:
        from autotune.rank import workload

        self.loss = workload.forward
        if self.job.torch_alone:
            from autotune.rank import torch_engine

            how = (self.job, self.own_device.torch_device(), self.spec["config"])
            self.engine: Any = torch_engine.TorchEngine(*how, checkpointing=bool(self.spec["checkpointing"]))
            self.source: workload.Source = partial(workload.synthetic_batches, self.job)
        else:
            self._initialize()
        self.engine_built()
        self.overflows = Overflows(self.engine)
        self.own_device.note()

    def _initialize(self) -> None:
        """Build the model and DeepSpeed's engine."""
        import deepspeed

        from autotune.rank import model_builder, workload

        config = self.spec["config"]
        model, self.source = workload.build(self.job, self.own_device.torch_device(), config)
        model_builder.replace_loss(model, self.job)
        if self.spec["checkpointing"]:
            model_builder.enable_checkpointing(model, self.spec["checkpointing"])
        if blocks := model_builder.expert_blocks(model):
            deepspeed.utils.set_z3_leaf_modules(model, blocks)  # stage 3 reads it
        parameters = [p for p in model.parameters() if p.requires_grad]
        self.engine, *_ = deepspeed.initialize(model=model, model_parameters=parameters, config=config)
        if self.job.compiled:
            self.engine.compile()

    def _batches(self, micro_batch: int) -> Iterator[Any]:
        return self.source(micro_batch, self.own_device.torch_device(), self.spec["seed"] + self.number)

    def _measure(self, request: MeasureRequest) -> None:
        self._set_batch(request)
        # Weights have moved in later rungs of the engine.
        untraced = self.steps or self.spec.get("resume")
        self.trace = TraceRecorder(most_steps=0 if untraced else MOST_STEPS)
        device = self.own_device
        device.reset_peaks()
        batches = self._batches(request.micro_batch)
        measuring = time.perf_counter()
        warm: list[float] = []  # seconds of the slowest rank
        steps: list[StepParts] = []
        while not measure.warmed_up(warm, request):
            measuring = time.perf_counter()
            steps = [self._whole_step(batches, request)]
            warm.append(self.agree(sum(steps[0])))
        request = measure.after_warmup(request, warm)
        if measure.holds_timed_step(request, warm):
            measuring = time.perf_counter()
            steps = self._timed_steps(batches, request, warm[-1])
        step_seconds = self.average([measure.extrapolate(parts, request.accumulation) for parts in steps])
        device.synchronize()
        self.channel.send(
            "measured",
            step_seconds=step_seconds,
            warmup_steps=len(warm),
            measured_seconds=time.perf_counter() - measuring,
            extrapolated=request.extrapolated,
            trace=self.trace.report(),
            **device.peaks(),
        )

    def _timed_steps(self, batches: Iterator[Any], request: MeasureRequest, pace: float) -> list[StepParts]:
        """Run steps until all ranks have enough; `pace` is the expected seconds per step."""
        steps: list[StepParts] = []
        elapsed, began = 0.0, time.perf_counter()
        while not measure.enough(request, elapsed, len(steps)):
            for _ in range(measure.stretch(request, elapsed, len(steps), pace)):
                steps.append(self._whole_step(batches, request))
            elapsed = self.agree(time.perf_counter() - began)
            pace = elapsed / len(steps)
            if request.can_be_beaten:
                whole = self.average([measure.extrapolate(parts, request.accumulation) for parts in steps])
                if measure.beaten(request, whole):
                    break
        return steps

    def _set_batch(self, request: MeasureRequest) -> None:
        engine = self.engine
        engine.set_train_micro_batch_size(request.micro_batch)
        engine.set_train_batch_size(request.micro_batch * request.accumulation * self.world)
        if hasattr(engine.optimizer, "gradient_accumulation_steps"):
            engine.optimizer.gradient_accumulation_steps = request.accumulation
        engine.micro_steps = 0

    def _whole_step(self, batches: Iterator[Any], request: MeasureRequest) -> StepParts:
        """Run a step in which the optimizer runs. Steps that DeepSpeed skips are discarded."""
        while True:
            parts = self._step(batches, request)
            if not self.overflows.skipped():
                return parts
            if self.overflows.endless:
                raise RuntimeError(self.overflows.endless)

    def _step(self, batches: Iterator[Any], request: MeasureRequest) -> StepParts:
        """Run one optimizer step. Return its seconds, or those of each micro-batch if the rest is extrapolated."""
        parts = []
        device = self.own_device
        device.synchronize()
        began = time.perf_counter()
        last = request.micro_batches - 1
        for at in range(request.micro_batches):
            self.engine.set_gradient_accumulation_boundary(at == last)
            self._micro_batch(batches)
            if request.extrapolated or at == last:
                device.synchronize()
                now = time.perf_counter()
                parts.append(max(now - began - self.trace.take_seconds(), 0.0))
                began = now
        self.steps += 1
        self.progress()
        return parts

    def _micro_batch(self, batches: Iterator[Any]) -> None:
        self.phase = Phase.FORWARD
        batch = next(batches)
        self.fault(Phase.FORWARD)
        if self.trace.records:
            sizes = sizes_of((), batch) if isinstance(batch, dict) else sizes_of(tuple(batch), {})
            self.trace.forward(sizes.tensor, sizes.rows)
        loss = self.loss(self.engine, batch)
        self._note_memory()
        self.phase = Phase.BACKWARD
        self.fault(Phase.BACKWARD)
        self.trace.backward(self.engine, loss)
        self.engine.backward(loss)
        self._note_memory()
        self.phase = Phase.STEP
        self.fault(Phase.STEP)
        with self.trace.step(self.engine) if self.engine.is_gradient_accumulation_boundary() else nullcontext():
            self.engine.step()
        self._note_memory()

    def _note_memory(self) -> None:
        """Record memory at the end of a phase."""
        self.own_device.note()

    def _certify(self, message: Message) -> None:
        """Run the other parts of training: an evaluation's forward, and a save of the gathered weights."""
        self.phase = Phase.FORWARD
        self.engine.eval()
        with self.torch.no_grad():
            self.loss(self.engine, next(self._batches(message["micro_batch"])))
        self.engine.train()
        self.own_device.note()
        certify_save(self, self.engine.save_16bit_model)


become = partial(measure_as, ModelRank)  # arguments: address, number


if __name__ == "__main__":
    run_as(ModelRank)
