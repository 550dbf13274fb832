"""Rank processes on this machine: started, watched, and ended as a whole group."""

from __future__ import annotations

import dataclasses
import os
import select
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from autotune.errors import Cause, Unusable, UserError
from autotune.executors.base import Effort
from autotune.group.ending import end_ranks
from autotune.group.fork_server import prepare_environment
from autotune.group.gauge import Gauge, Peaks, make_meter
from autotune.group.protocol import Channel, Message
from autotune.group.verdict import Evidence, is_secondary, judge, log_tail
from autotune.predict.flops import model_flops_per_token
from autotune.problem.candidate import Candidate, samples, under
from autotune.problem.hardware import Hardware
from autotune.problem.job import Job, Script
from autotune.problem.outcome import Kind, Measurement, Outcome, Phase, Source
from autotune.problem.script import heavy_imports
from autotune.rank.config import needed_ops, trial_config

_LOADING_SECONDS = 20.0  # ops that took longer were built, not loaded
_BUILDING_SECONDS = 1800  # all ops of a slow machine; beyond that a compiler hangs
_SETTLE_SECONDS = 0.25  # after the first failure: a peer's secondary report must not outrun the cause


@dataclass(frozen=True)
class Deadlines:
    """How long a phase may stay silent, in seconds. A big model is allowed more time to be built."""

    start: float = 90.0
    init: float = 180.0
    step: float = 120.0


class Launcher(Protocol):
    """Starts rank processes and knows how they ended."""

    def open(self, say: Callable[[str], None]) -> None: ...
    def launch(self, address: str, rank: int, entry: str) -> None:
        """Starts a rank; `entry` is the module of `autotune.rank` that it becomes."""

    def status(self, pid: int) -> int | None:
        """Exit code, negative for a signal; None while it lives."""

    @property
    def server(self) -> int | None:
        """The process that adopts what dead ranks leave running, if there is one."""

    def close(self) -> None: ...


class SpawnLauncher:
    """A cold start: a new interpreter a rank, seconds of imports."""

    server: int | None = None

    def __init__(self, device: str, folder: Path) -> None:
        self._device, self._folder = device, folder
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def open(self, say: Callable[[str], None]) -> None:
        pass

    def launch(self, address: str, rank: int, entry: str) -> None:
        with (self._folder / "spawn.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", entry, address, str(rank)],
                env=rank_environment(self._device),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._processes[process.pid] = process

    def status(self, pid: int) -> int | None:
        process = self._processes.get(pid)
        return process.poll() if process else None

    def close(self) -> None:
        for process in self._processes.values():
            with suppress(ProcessLookupError):
                process.kill()
            process.wait()


class ForkLauncher:
    """The fork server: imports paid once a study."""

    def __init__(self, device: str, folder: Path, **preload: Any) -> None:
        self._device, self._folder, self._preload = device, folder, preload
        self._statuses: dict[int, int] = {}
        self.ready: Message = {}

    def open(self, say: Callable[[str], None]) -> None:
        channel, theirs = Channel.pair()
        with (self._folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "autotune.group.fork_server", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=rank_environment(self._device),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        theirs.close()
        self._channel = channel
        channel.send("hello", **self._preload)
        waited = 0
        while not (message := channel.receive(5.0)):
            if channel.closed:
                tail = log_tail(self._folder / "server.log").strip().splitlines()
                raise UserError(
                    f"the fork server died: {tail[-1] if tail else 'no output'} (log: {self._folder}/server.log)"
                )
            waited += 5
            if waited > _BUILDING_SECONDS:
                self._process.kill()
                raise UserError(
                    f"DeepSpeed's ops were not built within {_BUILDING_SECONDS} s; `autotune doctor` tries "
                    f"each (log: {self._folder}/server.log)"
                )
            if waited == 15:
                say(
                    "starting takes long: DeepSpeed's ops are built once on this machine, which takes minutes on a slow CPU"
                )
        self.ready = message

    def launch(self, address: str, rank: int, entry: str) -> None:
        self._channel.send("launch", entry=entry, address=address, rank=rank)

    def status(self, pid: int) -> int | None:
        for message in self._channel.drain():
            if message["type"] == "exited":
                self._statuses[message["pid"]] = message["status"]
        if pid not in self._statuses and self._channel.closed:
            return -signal.SIGKILL  # the server is gone, and its children with it
        return self._statuses.get(pid)

    @property
    def server(self) -> int | None:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        self._channel.close()
        try:
            self._process.wait(timeout=3)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def rank_environment(device: str) -> dict[str, str]:
    """A rank's environment; the package's own folder is on the path even where it is not installed."""
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, **prepare_environment(device)}


class LocalExecutor:
    """Real DeepSpeed in rank processes on this machine's GPUs or CPU."""

    def __init__(
        self,
        job: Job,
        hardware: Hardware,
        folder: Path,
        candidates: list[Candidate],
        *,
        isolation: str = "fork",
        deadlines: Deadlines | None = None,
        seed: int = 0,
        cancelled: Callable[[], bool] = lambda: False,
        on_phase: Callable[[str], None] = lambda phase: None,
        fault: Callable[[str], dict[str, Any] | None] = lambda name: None,
        count_live_tensors: bool = False,
    ) -> None:
        self.job, self.hardware, self.folder, self.seed = job, hardware, folder, seed
        # a script reads and tokenizes its data before it builds an engine
        self.deadlines = deadlines or (Deadlines(start=900.0, init=300.0, step=300.0) if job.script else Deadlines())
        self.cancelled, self.on_phase, self.fault = cancelled, on_phase, fault
        self.count_live_tensors = count_live_tensors  # slows every operator: for checking predictions
        self.isolation = isolation
        self._ops = needed_ops(candidates, job, hardware.device)
        self._launcher: Launcher | None = None
        self.build_seconds = 0.0  # spent building DeepSpeed's ops, once a machine
        self.meter = make_meter(hardware)

    @property
    def launcher(self) -> Launcher:
        if self._launcher is None:
            raise RuntimeError("open() comes first")
        return self._launcher

    def open(self, say: Callable[[str], None]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._sockets = Path(tempfile.mkdtemp(prefix="autotune-"))
        self._open_launcher(say)

    def _open_launcher(self, say: Callable[[str], None]) -> None:
        if self.isolation == "fork":
            fork = ForkLauncher(
                self.hardware.device,
                self.folder,
                model_type=self.job.model.config.get("model_type"),
                ops=self._ops,
                modules=heavy_imports(self.job.script) if self.job.script else [],
            )
            fork.open(say)
            seconds = float(fork.ready.get("ops_seconds", 0.0))
            self.build_seconds += seconds if seconds > _LOADING_SECONDS else 0.0
            for op, why in fork.ready.get("failed_ops", {}).items():
                say(f"DeepSpeed's {op} cannot be built ({why}); `autotune doctor` says what that costs")
            if fork.ready.get("fork_safe"):
                self._launcher = fork
                return
            fork.close()
            say("something woke CUDA before the fork: falling back to cold starts (slower, same results)")
            self.isolation = "spawn"
        self._launcher = SpawnLauncher(self.hardware.device, self.folder)

    def ensure_launcher(self) -> None:
        """Restarts a fork server that was killed."""
        if isinstance(self._launcher, ForkLauncher) and not self._launcher.alive:
            self._launcher.close()
            self._open_launcher(lambda text: None)

    def session(self, candidate: Candidate, name: str) -> LocalSession:
        return LocalSession(self, candidate, name)

    def now(self) -> float:
        return time.monotonic()

    def close(self) -> None:
        if self._launcher is not None:
            self._launcher.close()
            self._launcher = None
        with suppress(AttributeError):
            shutil.rmtree(self._sockets, ignore_errors=True)


class LocalSession:
    """The ranks of one engine, from launch to the last of them gone."""

    def __init__(self, executor: LocalExecutor, candidate: Candidate, name: str) -> None:
        self._executor, self._candidate = executor, candidate
        self._folder = executor.folder / "trials" / name
        self._channels: list[Channel] = []
        self._pids: list[int] = []
        self._gauge: Gauge | None = None
        self._started = self._ended = False
        self._phase = Phase.START
        self._phase_seconds: dict[str, float] = {}
        self._phase_began = time.monotonic()
        self._errors: list[dict[str, Any]] = []
        self._timed_out: str | None = None
        self.died_at: float | None = None  # when a failure was noticed
        self.facts: dict[str, Any] = {}  # what rank 0 of a script said of itself

    @property
    def alive(self) -> bool:
        return not self._ended

    def measure(self, candidate: Candidate, effort: Effort, deadline_seconds: float) -> Outcome:
        if candidate.family != self._candidate.family:
            raise ValueError("a session holds one family")
        began = time.monotonic()
        deadline = began + deadline_seconds
        if not self._started:
            self._started = True
            try:
                self._launch()
            except OSError as error:  # disk full, no descriptors left: the machine, not the candidate
                self.close()
                why = f"exception OSError: {error}"
                return Outcome(Kind.INFRASTRUCTURE, Phase.START, reason=str(error), evidence=why)
            if (failed := self._await_ready(deadline)) is not None:
                return self._finish(failed, began)
        if self._gauge is not None:
            self._gauge.reset()
        self._enter(Phase.FORWARD)
        request = {
            "micro_batch": candidate.micro_batch,
            "accumulation": candidate.accumulation,
            "full": effort.full,
            "min_steps": effort.min_steps,
            "max_steps": effort.max_steps,
            "min_seconds": effort.min_seconds,
            "max_seconds": min(effort.max_seconds, max(1.0, 0.6 * deadline_seconds)),
        }
        results = self._ask("measure", request, deadline)
        if isinstance(results, Outcome):
            return self._finish(results, began)
        self.facts.update(results[0].get("facts", {}))
        peaks = self._seen()
        if effort.certify:
            self._enter(Phase.SAVE)
            certificate = self._ask(
                "certify", {"micro_batch": candidate.micro_batch, "folder": str(self._folder.resolve())}, deadline
            )
            if isinstance(certificate, Outcome):
                return self._finish(certificate, began)
            later = self._seen()
            peaks.used = [max(pair) for pair in zip(peaks.used, later.used, strict=True)]
        measurement = self._measurement(candidate, results, peaks)
        if self._executor.job.script:
            self.close()  # its data loader holds one batch size
        seconds = time.monotonic() - began
        outside = seconds - max(float(result["measured_seconds"]) for result in results)
        return Outcome(
            Kind.OK,
            Phase.STEP,
            measurement,
            peak_bytes=measurement.peak_bytes,
            log=str(self._folder),
            seconds=seconds,
            outside_seconds=outside,
        )

    def _launch(self) -> None:
        executor = self._executor
        executor.ensure_launcher()
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / "store").unlink(missing_ok=True)
        job, hardware = executor.job, executor.hardware
        address = str(executor._sockets / f"{time.monotonic_ns()}.sock")
        world = job.ranks
        if job.script:
            what: dict[str, Any] = {
                "candidate": self._candidate.as_dict,
                "scratch": str(_scratch(self._folder, job.script)),
            }
        else:
            what = {"config": trial_config(self._candidate, job), "checkpointing": self._candidate.checkpointing}
        spec = {
            **what,
            "job": under(job, self._candidate).to_json(),
            "world": world,
            "device": hardware.device,
            "cap_bytes": hardware.memory_cap_bytes,
            "seed": executor.seed,
            "store": str(self._folder.resolve() / "store"),
            "threads": threads_per_rank(world),
            "fault": executor.fault(self._folder.name),
            "live": executor.count_live_tensors,
        }
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen(world)
            for rank in range(world):
                executor.launcher.launch(address, rank, "autotune.rank.script" if job.script else "autotune.rank.model")
            hellos: dict[int, tuple[Channel, int]] = {}
            listener.settimeout(executor.deadlines.start)
            while len(hellos) < world:
                try:
                    sock, _ = listener.accept()
                except TimeoutError:
                    break
                channel = Channel(sock)
                hello = channel.receive(10.0)
                if hello and hello["type"] == "hello":
                    hellos[hello["rank"]] = (channel, hello["pid"])
        os.unlink(address)
        for rank in sorted(hellos):
            channel, pid = hellos[rank]
            self._channels.append(channel)
            self._pids.append(pid)
        if len(hellos) < world:
            raise OSError(f"only {len(hellos)} of {world} ranks could be started")
        for rank, channel in enumerate(self._channels):
            log = self._folder.resolve() / f"rank{rank}.log"
            channel.send("spec", **spec, rank=rank, log=str(log))
        self._gauge = Gauge(executor.meter, self._pids)

    def _await_ready(self, deadline: float) -> Outcome | None:
        ready: set[int] = set()

        def arrived(rank: int, message: Message) -> bool:
            if message["type"] == "phase" and message["phase"] == "ready":
                ready.add(rank)
            elif message["type"] == "facts" and rank == 0:
                self.facts = message
            return len(ready) == len(self._channels)

        return self._watch(arrived, deadline)

    def _ask(self, kind: str, request: dict[str, Any], deadline: float) -> list[Message] | Outcome:
        answers: dict[int, Message] = {}

        def arrived(rank: int, message: Message) -> bool:
            if message["type"] == "measured":
                answers[rank] = message
            return len(answers) == len(self._channels)

        for channel in self._channels:
            channel.send(kind, **request)
        failed = self._watch(arrived, deadline)
        return failed or [answers[rank] for rank in sorted(answers)]

    def _watch(self, arrived: Callable[[int, Message], bool], deadline: float) -> Outcome | None:
        """Reads the ranks until `arrived` says that all is here; an Outcome where something went wrong first."""
        deadlines = self._executor.deadlines
        last = time.monotonic()
        while True:
            if self._executor.cancelled():
                return Outcome(
                    Kind.INTERRUPTED,
                    self._phase,
                    reason="the study was stopped",
                    evidence="stop requested",
                    source=Source.STOP,
                )
            now = time.monotonic()
            silence = {Phase.START: deadlines.start, Phase.INIT: deadlines.init}.get(self._phase, deadlines.step)
            if now > deadline:  # says nothing of the candidate: it may be tried again with more time
                why = f"its share of the budget ended in {self._phase.value}"
                return Outcome(
                    Kind.INTERRUPTED, self._phase, reason=why, evidence="deadline of the budget", source=Source.BUDGET
                )
            if now - last > silence:
                self._timed_out = f"{self._phase.value}: nothing heard for {silence:.0f} s"
                return self._fail()
            readable, _, _ = select.select(self._channels, [], [], 0.1)
            done = False
            for channel in readable:
                rank = self._channels.index(channel)
                for message in channel.drain():
                    last = time.monotonic()
                    if message["type"] == "error":
                        self._errors.append(message)
                    elif message["type"] == "phase" and message["phase"] in ("start", "init"):
                        self._enter(Phase(message["phase"]))
                    done = arrived(rank, message) or done
                if channel.closed and not done:
                    return self._fail()
            if self._errors:
                return self._fail()
            if done:
                return None

    def _enter(self, phase: Phase) -> None:
        now = time.monotonic()
        if phase is not self._phase:
            name = self._phase.value
            self._phase_seconds[name] = self._phase_seconds.get(name, 0.0) + now - self._phase_began
            self._phase_began, self._phase = now, phase
            self._executor.on_phase(phase.value)

    def _seen(self) -> Peaks:
        return self._gauge.peaks() if self._gauge else Peaks()

    def _fail(self) -> Outcome:
        """Collects the evidence, ends the whole group at once, and judges."""
        self.died_at = time.monotonic()
        if not self._timed_out:
            settle = time.monotonic() + _SETTLE_SECONDS
            while time.monotonic() < settle:
                for channel in self._channels:
                    self._errors += [m for m in channel.drain() if m["type"] == "error"]
                time.sleep(0.02)
        peaks = self._seen()
        launcher = self._executor.launcher
        statuses: dict[int, int] = {}
        if not self._timed_out:
            unexplained = all(is_secondary(error) for error in self._errors)
            until = time.monotonic() + (1.0 if unexplained else 0.0)
            while True:
                for rank, pid in enumerate(self._pids):
                    if (status := launcher.status(pid)) is not None:
                        statuses.setdefault(rank, status)
                if statuses or time.monotonic() > until:
                    break
                time.sleep(0.02)
        phase = self._phase
        if self._errors and self._errors[0].get("phase") in set(Phase):
            phase = Phase(self._errors[0]["phase"])
        self.close()
        if unusable := [error for error in self._errors if error.get("cause")]:
            raise Unusable(unusable[0]["text"], Cause(unusable[0]["cause"]))
        evidence = Evidence(
            self._executor.hardware.device,
            self._errors,
            statuses,
            self._timed_out,
            phase,
            peaks,
            self._executor.hardware.host_memory_bytes,
            {rank: log_tail(self._folder / f"rank{rank}.log") for rank in range(len(self._pids))},
        )
        verdict = judge(evidence)
        return Outcome(
            verdict.kind,
            verdict.phase,
            reason=verdict.reason,
            evidence=verdict.evidence,
            source=verdict.source,
            rank=verdict.rank,
            missing_bytes=verdict.missing_bytes,
            peak_bytes=peaks.worst or None,
            log=str(self._folder),
        )

    def _finish(self, outcome: Outcome, began: float) -> Outcome:
        self.close()
        seconds = time.monotonic() - began
        return dataclasses.replace(outcome, seconds=seconds, outside_seconds=seconds, log=str(self._folder))

    def _measurement(self, candidate: Candidate, results: list[Message], peaks: Peaks) -> Measurement:
        job, hardware = self._executor.job, self._executor.hardware
        steps = results[0]["step_seconds"]
        median = statistics.median(steps)
        trained = samples(job, candidate)
        if not candidate.knobs:  # a script as it is
            trained = self.facts["micro_batch"] * self.facts["accumulation"] * job.ranks
        tokens = trained * job.tokens_per_sample
        if "tokens" in results[0]:
            tokens = sum(result["tokens"] for result in results)

        def worst(key: str) -> int | None:
            values = [int(result[key]) for result in results if result.get(key) is not None]
            return max(values) if values else None

        inside = worst("data_bytes") or worst("reserved_bytes") or 0
        tflops = mfu = None
        if flops := model_flops_per_token(under(job, candidate)):
            tflops = flops * tokens / median / job.ranks / 1e12
            facts = hardware.gpu_facts
            if facts:
                mfu = tflops / (facts.fp32_tflops if job.precision == "fp32" else facts.tflops)
        now = time.monotonic()
        seconds = {**self._phase_seconds, self._phase.value: now - self._phase_began}
        return Measurement(
            step_seconds=median,
            step_seconds_spread=median_spread(steps),
            steps=len(steps),
            samples_per_second=trained / median,
            tokens_per_second=tokens / median,
            peak_bytes=max(peaks.worst, inside),
            micro_step_seconds=results[0].get("micro_seconds"),
            boundary_seconds=results[0].get("boundary_seconds"),
            extrapolated=bool(results[0].get("extrapolated")),
            torch_allocated_bytes=worst("allocated_bytes"),
            torch_reserved_bytes=worst("reserved_bytes"),
            nvml_peak_bytes=peaks.worst if hardware.device == "cuda" else None,
            live_tensor_bytes=max((r["live_bytes"] for r in results if "live_bytes" in r), key=_highest, default={}),
            alloc_retries=worst("retries") or 0,
            host_peak_bytes=worst("host_bytes"),
            pinned_bytes=worst("pinned_bytes"),
            model_tflops_per_gpu=tflops,
            mfu=mfu,
            phase_seconds={k: round(v, 4) for k, v in seconds.items()},
        )

    def close(self) -> None:
        """Ends every rank and waits until nothing of them is left."""
        if self._ended:
            return
        self._ended = True
        for channel in self._channels:
            channel.send("stop")
        if self._gauge is not None:
            self._gauge.stop()
        launcher = self._executor.launcher
        end_ranks(self._pids, launcher.status, launcher.server)
        for channel in self._channels:
            channel.close()
        with suppress(OSError):
            (self._folder / "store").unlink(missing_ok=True)
        shutil.rmtree(self._folder / "scratch", ignore_errors=True)
        until = time.monotonic() + 10.0
        while self._pids and not self._executor.meter.is_idle() and time.monotonic() < until:
            time.sleep(0.05)


def _scratch(folder: Path, script: Script) -> Path:
    """A folder that shows a script what its own does, and takes what it writes there: links to every entry but the
    one that holds the study, which is a usual place for logs too."""
    scratch = folder.resolve() / "scratch"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    for entry in Path(script.cwd).iterdir():
        if entry.resolve() not in scratch.parents:
            (scratch / entry.name).symlink_to(entry)
    return scratch


def threads_per_rank(ranks: int) -> int:
    return max(1, min(8, (os.cpu_count() or 1) // ranks))


def _highest(by_phase: dict[str, int]) -> int:
    return max(by_phase.values(), default=0)


def median_spread(values: list[float]) -> float:
    """Half the width of a 95 % interval of the median: 1.96 x 1.2533 x s / sqrt(n), s from the interquartile range
    (normal theory of the sample median; robust against a single slow step)."""
    if len(values) < 3:
        return max(values) - min(values)
    ordered = sorted(values)
    low, _, high = statistics.quantiles(ordered, n=4, method="inclusive")
    return float(1.96 * 1.2533 * (high - low) / 1.349 / len(values) ** 0.5)
