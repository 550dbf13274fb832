"""A rank whose work is the user's own script: it runs until enough steps are measured, watched from outside."""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from autotune.errors import Cause, Unusable
from autotune.group.verdict import is_memory_error
from autotune.problem.candidate import Candidate
from autotune.rank.hooks import QUIET_ENVIRONMENT, Hooks, run_script
from autotune.rank.model import EXIT_REPORTED, Rank, enough, leave, stretch

WARMUP_STEPS = 2  # batches of a script differ in length: its step times never settle as synthetic ones do
_PROGRESS_SECONDS = 0.5


class ScriptRank(Rank):
    """Runs `spec["job"]["script"]` under `spec["candidate"]`, or as it is where that is None."""

    def run(self) -> None:
        os.environ.update(QUIET_ENVIRONMENT)
        self._begin()
        assert self.job.script is not None
        self.script = self.job.script
        self.engine: Any = None
        self.config: dict[str, Any] = {}
        self.facts: dict[str, Any] = {}
        self.request: dict[str, Any] | None = None
        knobs = self.spec["candidate"]
        self.candidate = Candidate.of(knobs) if knobs else None
        scratch = Path(self.spec["scratch"])
        os.chdir(scratch)
        self.hooks = Hooks(self.job, self.candidate, self, self.spec["device"], scratch, quiet=True)
        self.hooks.install()
        self._last_progress = 0.0
        self._reset_counts()
        try:
            run_script(self.job, self.hooks.arguments())
        except SystemExit as error:
            if error.code not in (None, 0):
                raise RuntimeError(f"{self.script.name} exited with {error.code}") from None
        if len(self._times) >= 2:
            self._finish()
        raise Unusable(self._why_ended())

    def _why_ended(self) -> str:
        name = self.script.target
        if self.engine is None:
            return (
                f"{name} ended without calling deepspeed.initialize: give it its DeepSpeed config (for Hugging "
                "Face's Trainer: --deepspeed ds.json) or make it use DeepSpeed"
            )
        return (
            f"{name} ended after {self._steps} optimizer steps: a measurement needs at least "
            f"{WARMUP_STEPS + 3}; give it more data or steps"
        )

    # -- what the hooks see ------------------------------------------------------------------------------------------

    def configured(self, config: dict[str, Any]) -> None:
        self.config = config

    def planned(self, micro_batch: int, accumulation: int) -> None:
        if self.candidate is None and self.engine is None:
            self.channel.send("facts", config=self.config, micro_batch=micro_batch, accumulation=accumulation)

    def built(self, engine: Any, facts: dict[str, Any]) -> None:
        self.engine = engine
        self.facts = facts
        self.device.note()

    def _reset_counts(self) -> None:
        self._steps = 0
        self._micros = self._rows = self._tokens = 0
        self._widest = 0
        self._times: list[float] = []
        self._sizes: list[tuple[int, int, int]] = []  # micro-batches, rows and tokens of each measured step

    def _await_request(self) -> None:
        """Before the first batch: what is known so far is told, and what to measure heard."""
        if self.request is not None:
            return
        self.channel.send("facts", config=self.config, **self.facts)
        self.channel.send("phase", phase="ready")
        message = self.channel.receive()
        if message is None or message["type"] != "measure":
            os._exit(0)
        self.request = message
        self.device.reset_peaks()
        self._began = self._measuring = time.perf_counter()
        self._saved = _SavedTensors(self.engine) if self.candidate is None else None

    def forward(self, rows: int, tokens: int) -> None:
        self._await_request()
        self._rows += rows
        self._tokens += tokens
        self._widest = max(self._widest, tokens // rows if rows else 0)

    def entered(self, name: str) -> None:
        if name == "init":
            self.enter("init")
            self._fault("init")
            return
        self._await_request()  # a loop may call the module and not the engine
        # of forwards a micro-batch may have several (TRL's KTO); accelerate calls the engine's step at boundaries alone
        self._micros += name == "backward"
        self.phase = name
        self.device.note()
        if name == "backward" and self.request is not None and self._saved is not None:
            self._saved.close()
        self._fault(name)
        now = time.monotonic()
        if now - self._last_progress > _PROGRESS_SECONDS:
            self._last_progress = now
            self.channel.send("progress")

    def stepped(self) -> None:
        assert self.request is not None
        self.device.synchronize()
        self.device.note()
        now = time.perf_counter()
        step = now - self._began
        self._steps += 1
        if self._steps == 1:
            self._check_batch()
        if self._steps == WARMUP_STEPS:
            self._stretch = stretch(self.request, 0.0, 0, self._agree(step))
            self._measuring = time.perf_counter()
        elif self._steps > WARMUP_STEPS:
            self._times.append(step)
            self._sizes.append((self._micros, self._rows, self._tokens))
            self._stretch -= 1
            if not self._stretch:
                self._compare_clocks()
        self._micros = self._rows = self._tokens = 0
        self._began = time.perf_counter()

    def _compare_clocks(self) -> None:
        assert self.request is not None
        elapsed, steps = self._agree(time.perf_counter() - self._measuring), len(self._times)
        if enough(self.request, elapsed, steps):
            self._finish()
        self._stretch = stretch(self.request, elapsed, steps, elapsed / steps)

    def _check_batch(self) -> None:
        """What the candidate asks for must be what the script does, or its speed would be taken for another's."""
        if self.candidate is None:
            return
        per_sample = self.script.profile.get("rows_per_sample", 1.0)
        asked = self.candidate.micro_batch * self.candidate.accumulation
        if self._micros and self._rows:
            got = self._rows / per_sample
            if self._micros != self.candidate.accumulation:
                raise Unusable(
                    f"the script accumulated {self._micros} micro-batches where {self.candidate.accumulation} were asked "
                    "for: say which flag sets it, like --map gradient_accumulation_steps=--FLAG",
                    Cause.BATCH,
                )
            if got > asked + 0.5 or got < asked - self.candidate.micro_batch + 0.5:
                raise Unusable(
                    f"the script gave {self._rows} sequences a step where {asked * per_sample:g} were asked for: say which "
                    "flag sets the batch, like --map train_micro_batch_size_per_gpu=--FLAG",
                    Cause.BATCH,
                )

    def _finish(self) -> None:
        self.device.synchronize()
        micros, rows, tokens = (statistics.fmean(column) for column in zip(*self._sizes, strict=True))
        facts: dict[str, Any] = {"micros": micros, "rows": rows, "tokens": tokens, "widest": self._widest}
        if self._saved is not None:
            facts["saved_bytes"] = self._saved.bytes
        self.channel.send(
            "measured",
            step_seconds=self._average(self._times),
            warmup_steps=WARMUP_STEPS,
            measured_seconds=time.perf_counter() - self._measuring,
            tokens=tokens,
            extrapolated=False,
            skipped_steps=getattr(self.engine, "skipped_steps", 0),
            facts=facts,
            live_bytes={},
            **self.device.peaks(),
        )
        while (message := self.channel.receive()) is not None:
            if message["type"] == "certify":
                self._certify(message)
            elif message["type"] == "stop":
                break
        leave(0)

    def _certify(self, message: dict[str, Any]) -> None:
        """A save of the gathered weights, as training would make one."""
        self.phase = "save"
        saved = False
        count = sum(getattr(p, "ds_numel", p.numel()) for p in self.engine.module.parameters())
        gathers = self.engine.zero_optimization_stage() < 3 or self.engine.zero_gather_16bit_weights_on_model_save()
        if gathers and shutil.disk_usage(message["folder"]).free > 2 * 4 * count:
            with tempfile.TemporaryDirectory(dir=message["folder"]) as folder:
                saved = bool(self.engine._autotune_save_16bit_model(folder))
                if self.spec["world"] > 1:
                    self.torch.distributed.barrier()
        self.device.synchronize()
        self.channel.send("measured", certified=True, saved=saved, **self.device.peaks())

    def failed(self, error: BaseException) -> None:
        if is_memory_error(error):  # the script may catch it, and its peers would wait
            self.report(error)
            leave(EXIT_REPORTED)

    def strayed(self) -> None:
        self.report(Unusable(self._why_ended().replace("ended without", "trains without")))
        leave(EXIT_REPORTED)


class _SavedTensors:
    """Bytes that the forwards of one micro-batch leave for its backward, parameters apart; counted by storage."""

    def __init__(self, engine: Any) -> None:
        import torch

        self.bytes = 0
        own = {p.untyped_storage().data_ptr() for p in engine.module.parameters()}
        seen: set[int] = set()

        def pack(tensor: Any) -> Any:
            if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
                where = tensor.untyped_storage().data_ptr()
                if where not in own and where not in seen:
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
