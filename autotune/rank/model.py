"""What one rank of a trial does: build the engine once, then measure what the tuner asks for.

Run as `python -m autotune.rank.model SOCKET RANK` (a cold start), or called in a child of the fork server. Either way
it connects to the tuner, says which rank it is, and gets its spec.
"""

from __future__ import annotations

import math
import os
import shutil
import signal
import socket
import statistics
import sys
import tempfile
import time
import traceback
from typing import Any, NoReturn

from autotune.errors import Unusable
from autotune.group.ending import die_with_parent
from autotune.group.protocol import Channel, Message

SETTLED = 0.05  # warm-up ends when two step times in a row differ by less
MAX_WARMUP_STEPS = 6
EXIT_REPORTED = 13  # the failure was reported over the channel


def greet(address: str, number: int) -> tuple[Channel, Message]:
    """The line home, and the spec that came over it; leaves where none did."""
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(address)
    channel = Channel(sock)
    channel.send("hello", rank=number, pid=os.getpid())
    spec = channel.receive()
    if spec is None:
        leave(1)
    return channel, spec


def leave(code: int) -> NoReturn:
    """Ends this process at once: a peer may sit in a collective for ever, and nothing may wait for it."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def become(address: str, number: int) -> None:
    """Never returns: runs the rank, reports how it ended, leaves without waiting for its peers."""
    channel, spec = greet(address, number)
    for caught in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        signal.signal(caught, signal.SIG_DFL)
    _redirect_output(spec["log"])
    rank = Rank(channel, spec)
    if spec["job"].get("script"):
        from autotune.rank.script import ScriptRank

        rank = ScriptRank(channel, spec)
    code = 0
    try:
        rank.run()
        channel.send("bye")
    except BaseException as error:
        rank.report(error)
        code = EXIT_REPORTED
    leave(code)


def _redirect_output(path: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)


class Rank:
    """One rank, from its start to its end."""

    def __init__(self, channel: Channel, spec: Message) -> None:
        self.channel, self.spec = channel, spec
        self.phase = "start"
        self.device: Any = None

    def enter(self, phase: str) -> None:
        self.phase = phase
        self.channel.send("phase", phase=phase)

    def _begin(self) -> None:
        """What every kind of rank does first: the job, the device with its cap, the process group."""
        from autotune.problem.job import Job

        self.enter("start")
        self.job = Job.from_json(self.spec["job"])
        self._environment()
        import torch

        from autotune.rank.devices import make_device

        self.torch = torch
        self.device = make_device(self.spec["device"])
        self._fault("start")
        self.device.setup(self.spec["rank"], self.spec["cap_bytes"], self.spec["threads"])
        self._join_group()

    def run(self) -> None:
        self._begin()
        self.torch.manual_seed(self.spec["seed"])
        self.live: Any = None
        self.live_peaks: dict[str, int] = {}
        if self.spec.get("live"):
            from autotune.rank.live import LiveTensors

            self.live = LiveTensors()
            self.live.__enter__()
        self.enter("init")
        self._fault("init")
        self._build()
        self.channel.send("phase", phase="ready")
        while (message := self.channel.receive()) is not None:
            if message["type"] == "measure":
                self._measure(message)
            elif message["type"] == "certify":
                self._certify(message)
            elif message["type"] == "stop":
                return

    def _environment(self) -> None:
        rank, world = str(self.spec["rank"]), str(self.spec["world"])
        os.environ.update(
            RANK=rank,
            LOCAL_RANK=rank,
            WORLD_SIZE=world,
            LOCAL_WORLD_SIZE=world,
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(self.spec.get("port", 29500)),
            DS_ACCELERATOR=self.spec["device"],
            OMP_NUM_THREADS=str(self.spec["threads"]),
            TOKENIZERS_PARALLELISM="false",
        )
        os.environ.update(self.spec.get("env", {}))

    def _join_group(self) -> None:
        # A file instead of a port: two studies on a machine cannot meet on it.
        import datetime

        torch = self.torch
        store = torch.distributed.FileStore(self.spec["store"], self.spec["world"])
        torch.distributed.init_process_group(
            self.device.backend,
            store=store,
            rank=self.spec["rank"],
            world_size=self.spec["world"],
            timeout=datetime.timedelta(hours=1),
        )
        import deepspeed

        deepspeed.init_distributed(dist_backend=self.device.backend, verbose=False)

    def _build(self) -> None:
        import deepspeed

        from autotune.rank import workload

        model, self.source = workload.build(self.job, self.device.torch_device(), self.spec["config"])
        self.loss = workload.forward
        if self.spec["checkpointing"]:
            workload.enable_checkpointing(model)
        parameters = [p for p in model.parameters() if p.requires_grad]
        self.engine, *_ = deepspeed.initialize(model=model, model_parameters=parameters, config=self.spec["config"])
        if self.job.compiled:
            self.engine.compile()
        self.device.note()

    def _fault(self, where: str) -> None:
        """Faults that the tests plant: hang, die, or raise, on one rank at one point of its life."""
        fault = self.spec.get("fault")
        if not fault or fault["rank"] != self.spec["rank"] or fault["where"] != where:
            return
        if fault["what"] == "hang":
            time.sleep(3600)
        elif fault["what"] == "oom":
            raise self.torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. (planted)")
        elif fault["what"] == "raise":
            raise RuntimeError(fault.get("text", "planted"))
        else:
            os.kill(os.getpid(), getattr(signal, fault["what"]))

    def _measure(self, message: Message) -> None:
        micro_batch, accumulation = message["micro_batch"], message["accumulation"]
        full = message.get("full", False)
        self._set_batch(micro_batch, accumulation)
        self.device.reset_peaks()
        data = _data(self, micro_batch)
        began = time.perf_counter()
        micros = accumulation if full or accumulation <= 3 else 3
        whole = micros == accumulation
        warm: list[float] = []
        while len(warm) < MAX_WARMUP_STEPS:
            warm.append(self._agree(sum(self._step(data, micros, whole))))
            # The first step makes the optimizer's states and compiles kernels: never a pair with the second.
            if len(warm) >= 3 and abs(warm[-1] - warm[-2]) <= SETTLED * warm[-2]:
                break
            if len(warm) >= 2 and sum(warm) > min(3 * message["min_seconds"], 0.4 * message["max_seconds"]):
                break
        warm_seconds = time.perf_counter() - began
        times: list[list[float]] = []
        self.live_peaks = {}
        skipped = getattr(self.engine, "skipped_steps", 0)
        elapsed, pace = 0.0, warm[-1]
        measuring = time.perf_counter()
        while not enough(message, elapsed, len(times)):
            for _ in range(stretch(message, elapsed, len(times), pace)):
                times.append(self._step(data, micros, whole))
            elapsed = self._agree(time.perf_counter() - measuring)
            pace = elapsed / len(times)
        steps = self._average([_extrapolate(parts, accumulation) for parts in times])
        self.device.synchronize()
        self.channel.send(
            "measured",
            step_seconds=steps,
            warmup_steps=len(warm),
            warmup_seconds=warm_seconds,
            measured_seconds=time.perf_counter() - measuring,
            micro_seconds=statistics.median(p for t in times for p in t[1:-1] or t[:1]) if not whole else None,
            boundary_seconds=statistics.median(t[-1] for t in times) if not whole else None,
            extrapolated=not whole,
            skipped_steps=getattr(self.engine, "skipped_steps", 0) - skipped,
            live_bytes=self.live_peaks,
            **self.device.peaks(),
        )

    def _set_batch(self, micro_batch: int, accumulation: int) -> None:
        engine, world = self.engine, self.spec["world"]
        engine.set_train_micro_batch_size(micro_batch)
        engine.set_train_batch_size(micro_batch * accumulation * world)
        if hasattr(engine.optimizer, "gradient_accumulation_steps"):
            engine.optimizer.gradient_accumulation_steps = accumulation
        engine.micro_steps = 0

    def _step(self, data: Any, micros: int, whole: bool) -> list[float]:
        """One optimizer step of `micros` micro-batches: seconds of the whole, or of each micro-batch."""
        parts = []
        self.device.synchronize()
        begin = time.perf_counter()
        for at in range(micros):
            self.engine.set_gradient_accumulation_boundary(at == micros - 1)
            self.phase = "forward"
            batch = next(data)
            self._fault("forward")
            loss = self.loss(self.engine, batch)
            self._note()
            self.phase = "backward"
            self._fault("backward")
            self.engine.backward(loss)
            self._note()
            self.phase = "step"
            self._fault("step")
            self.engine.step()
            self._note()
            del loss, batch
            if not whole or at == micros - 1:
                self.device.synchronize()
                now = time.perf_counter()
                parts.append(now - begin)
                begin = now
        self.channel.send("progress")
        return parts

    def _note(self) -> None:
        """Memory at the end of a phase."""
        self.device.note()
        if self.live is not None:
            self.live_peaks[self.phase] = max(self.live_peaks.get(self.phase, 0), self.live.peak)
            self.live.reset_peak()
            self.live_peaks["rest"] = min(self.live_peaks.get("rest", self.live.bytes), self.live.bytes)

    def _agree(self, seconds: float) -> float:
        """The slowest rank's time, so that all ranks take the same decisions."""
        if self.spec["world"] == 1:
            return seconds
        return self._reduced([seconds], self.torch.distributed.ReduceOp.MAX)[0]

    def _average(self, seconds: list[float]) -> list[float]:
        """Each step's mean over the ranks: they wait for each other within a step, so none is slower for long."""
        if self.spec["world"] == 1:
            return seconds
        return [one / self.spec["world"] for one in self._reduced(seconds, self.torch.distributed.ReduceOp.SUM)]

    def _reduced(self, seconds: list[float], op: Any) -> list[float]:
        value = self.torch.tensor(seconds, dtype=self.torch.float64 if self.device.name == "cpu" else None)
        value = value.to(self.device.torch_device())
        self.torch.distributed.all_reduce(value, op=op)
        return [float(one) for one in value.tolist()]

    def _certify(self, message: Message) -> None:
        """What training does besides steps: an evaluation forward, and a save of the gathered weights."""
        torch = self.torch
        data = _data(self, message["micro_batch"])
        self.phase = "forward"
        self.engine.eval()
        with torch.no_grad():
            self.loss(self.engine, next(data))
        self.engine.train()
        self.device.note()
        self.phase = "save"
        saved = False
        free = shutil.disk_usage(message["folder"]).free
        count = sum(getattr(p, "ds_numel", p.numel()) for p in self.engine.module.parameters())
        if free > 2 * 4 * count:
            with tempfile.TemporaryDirectory(dir=message["folder"]) as folder:
                saved = bool(self.engine.save_16bit_model(folder))
                if self.spec["world"] > 1:
                    torch.distributed.barrier()
        self.device.synchronize()
        self.channel.send("measured", certified=True, saved=saved, **self.device.peaks())

    def report(self, error: BaseException) -> None:
        """Says what happened, the moment it is caught."""
        if self.device is not None:
            self.device.lift_cap()
        kinds = [f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__]
        trace = traceback.extract_tb(error.__traceback__)
        text = "".join(traceback.format_exception(error))
        self.channel.send(
            "error",
            phase=self.phase if self.phase != "ready" else "init",
            kinds=kinds,
            text=str(error)[:8000],
            traceback=text[-16000:],
            file=trace[-1].filename if trace else "",
            files=[frame.filename for frame in trace],
            rank=self.spec["rank"],
            cause=str(error.cause) if isinstance(error, Unusable) else None,
        )
        print(text, file=sys.stderr, flush=True)


def _data(rank: Rank, micro_batch: int) -> Any:
    return rank.source(micro_batch, rank.device.torch_device(), rank.spec["seed"] + rank.spec["rank"])


def enough(request: Message, elapsed: float, steps: int) -> bool:
    """Whether so many measured steps in so many seconds are what was asked for."""
    if steps >= request["max_steps"] or elapsed > request["max_seconds"]:
        return True
    return bool(steps >= request["min_steps"] and elapsed > request["min_seconds"])


def stretch(request: Message, elapsed: float, steps: int, pace: float) -> int:
    """How many steps of `pace` seconds to go on before the ranks compare their clocks again: they do not after every
    step, since training does not wait for its slowest rank there either."""
    wanted: int = max(request["min_steps"] - steps, math.ceil((request["min_seconds"] - elapsed) / pace))
    affordable = int((request["max_seconds"] - elapsed) / pace)
    return max(1, min(wanted, affordable, int(request["max_steps"]) - steps))


def _extrapolate(parts: list[float], accumulation: int) -> float:
    """Seconds of a whole step from [first, middle, boundary] micro-batches; the first accumulates into nothing."""
    if len(parts) < 2:
        return parts[0]
    return parts[0] + (accumulation - 2) * parts[1] + parts[-1]


def main() -> None:
    die_with_parent()
    become(sys.argv[1], int(sys.argv[2]))


if __name__ == "__main__":
    main()
