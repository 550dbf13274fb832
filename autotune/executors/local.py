"""Run trials in rank processes, on this machine or on the nodes of a cluster."""

from __future__ import annotations

import dataclasses
import os
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from autotune.entry_points import MODEL_RANK, SCRIPT_RANK
from autotune.errors import MachineTrouble, Stopped
from autotune.executors.base import Effort, Ground
from autotune.executors.deadlines import SCRIPT_DEADLINES, Deadlines
from autotune.executors.measurement import (
    inside_bytes,
    interrupted,
    judged,
    machines_fault,
    measurement_of,
    out_of_time,
    unusable,
)
from autotune.executors.ops import Ops
from autotune.executors.scratch import clear, trial_sandbox
from autotune.executors.selftest import check_group
from autotune.executors.station import Needs, Station
from autotune.group.gauge import Meter
from autotune.group.gpu_meter import make_meter
from autotune.group.group import Group
from autotune.group.launchers import Launcher
from autotune.group.policy import Policy, Stop
from autotune.group.protocol import Message
from autotune.group.squad import Spread
from autotune.predict.startup import size_seconds
from autotune.problem.candidate import Candidate, trial_environment, under
from autotune.problem.cpus import threads_per_rank
from autotune.problem.hardware import Hardware
from autotune.problem.job import Job
from autotune.problem.outcome import Kind, Outcome, Phase, Source
from autotune.problem.script import heavy_imports
from autotune.rank.config import all_ops, trial_config

CHECKPOINT = "checkpoint"  # name of the checkpoint folder in a trial's folder
WOKEN = "CUDA was woken before the fork"  # message of a forked rank


class LocalExecutor:
    """Real DeepSpeed in rank processes.

    Args:
        job: the job.
        hardware: the machine, or all nodes.
        folder: the study's folder or one below it. Each trial's logs go to a subfolder.
        candidates: first candidates; they determine the DeepSpeed ops that `open` builds.
        isolation: `fork` (from a server that has imported everything) or `spawn` (cold starts).
        deadlines: limits without progress; None: by the type of job.
        seed: random seed of the ranks.
        cancelled: polled several times a second; if True, a running trial ends as interrupted.
        on_phase: receives the ranks' phase.
        fault: returns a fault that tests inject into the named trial.
        count_live_tensors: record live tensor bytes, which slows every operator; used to check predictions.
        ground: where ranks run; None: on this machine.
        variables: environment of ranks on this machine, such as their devices if other jobs use the rest.
        study: the study's folder, if `folder` is another.
        unprotected: run user code without a sandbox on machines that offer none.
    """

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
        ground: Ground | None = None,
        variables: Mapping[str, str] | None = None,
        study: Path | None = None,
        unprotected: bool = False,
    ) -> None:
        self.job, self.hardware, self.folder, self.seed = job, hardware, folder, seed
        self.deadlines = deadlines or (SCRIPT_DEADLINES if job.script else Deadlines())
        self.cancelled, self.on_phase, self.fault = cancelled, on_phase, fault
        self.count_live_tensors = count_live_tensors
        self.isolation, self._variables = isolation, variables or {}
        self.study, self.unprotected = study or folder, unprotected
        self._first, self.tried_ops = list(candidates), dict[str, None]()  # builders, in order
        self.say: Callable[[str], None] = lambda text: None
        self.show: Callable[[str], None] = lambda text: None  # receives the current slow operation
        self.completed: Callable[[Candidate, Outcome], Outcome] = lambda _, found: found  # set for a slice (`slice.py`)
        self.here = ground is None
        self.meter = make_meter(hardware) if ground is None else Meter()  # nodes have their own meters
        ops = Ops(lambda text: self.say(text), lambda text: self.show(text))
        self.ground = ground or Station(folder, ops, lambda: self.cancelled())

    @property
    def entry(self) -> str:
        """Module that a rank of this job runs."""
        return SCRIPT_RANK if self.job.script else MODEL_RANK

    @property
    def launcher(self) -> Launcher | Spread:
        return self.ground.launcher

    @property
    def ops(self) -> Ops:
        return self.ground.ops

    @property
    def threads(self) -> int:
        """CPU threads per rank."""
        return self.hardware.threads or threads_per_rank(self.hardware.processes)

    def begin(self) -> None:
        self.ground.begin(self._needs())

    def open(self, say: Callable[[str], None]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for left in self.folder.glob(f"trials/*/{CHECKPOINT}"):  # left by a killed tuner
            shutil.rmtree(left, ignore_errors=True)
        self.say = say
        self.ground.open(self._needs())
        self.load_ops(self._first)

    def _needs(self) -> Needs:
        modules = [self.entry, *(heavy_imports(self.job.script) if self.job.script else [])]
        model = self.job.model.config.get("model_type")
        return Needs(self.hardware.device, self.threads, self.isolation, modules, model, variables=self._variables)

    def load_ops(self, candidates: list[Candidate], *names: str) -> None:
        """Build missing DeepSpeed ops for trials of these candidates, and ops of these builders."""
        self.tried_ops |= dict.fromkeys([*all_ops(candidates, self.job, self.hardware.device), *names])
        if not self.ground.load_ops(list(self.tried_ops), self._needs()):
            self._start_cold(self.say)

    def check(self, say: Callable[[str], None]) -> None:
        try:
            self._check()
        except MachineTrouble as trouble:
            if self.isolation != "fork" or WOKEN not in str(trouble):
                raise
            self._start_cold(say)
            self._check()

    def _check(self) -> None:
        spec = {
            "job": self.job.order(),
            "device": self.hardware.device,
            "cap_bytes": None,
            "threads": self.threads,
            "env": {"NCCL_DEBUG": os.environ.get("NCCL_DEBUG", "WARN")},
            "fault": self.fault("check"),
        }
        check_group(self.launcher, self.hardware, spec, self.hardware.processes, self.folder / "check", self.cancelled)

    def _start_cold(self, say: Callable[[str], None]) -> None:
        """Start every rank as a new interpreter from now on."""
        say("something woke CUDA before the fork: falling back to cold starts (slower, same results)")
        self.isolation = "spawn"
        self.ground.open(self._needs())

    def ensure_launcher(self) -> None:
        """Restart a killed fork server, and reconnect to lost nodes."""
        if self.ground.broken:
            self.ground.mend()
            if self.here:
                self.open(self.say)

    @property
    def resumes(self) -> bool:
        # a slice saves only its own part of a checkpoint, and no other ranks exist to complete it
        return not self.hardware.sliced and self.ground.all_see(self.folder.resolve())

    def session(self, candidate: Candidate, name: str, patience: float = 1.0) -> LocalSession:
        return LocalSession(self, candidate, name, patience)

    def now(self) -> float:
        return time.monotonic()

    def close(self) -> None:
        self.ground.close()


class LocalSession:
    """One engine of one family, in a group of ranks."""

    def __init__(self, executor: LocalExecutor, candidate: Candidate, name: str, patience: float = 1.0) -> None:
        self._executor, self._candidate, self._patience = executor, candidate, patience
        self._folder = executor.folder / "trials" / name
        self._group: Group | None = None
        self._ended = False
        self._ready, self._answers = set[int](), dict[int, Message]()
        self._results: list[Message] = []  # results of the last measurement, by rank
        self._checkpoint: Path | None = None  # loaded by the next group
        self._beside_peak_bytes = 0  # peak of the worst rank while it loaded, evaluated and saved
        self.facts: dict[str, Any] = {}  # reported by rank 0 of a script
        self.unbuilt = ""  # builder of an op that the probe run needs and no config predicted

    @property
    def alive(self) -> bool:
        return not self._ended

    @property
    def failed_at(self) -> float | None:
        """Monotonic time at which a failure was noticed; None if none was."""
        return self._group.failed_at if self._group is not None else None

    def measure(self, candidate: Candidate, effort: Effort, deadline_seconds: float) -> Outcome:
        if candidate.family != self._candidate.family:
            raise ValueError("a session holds one family")
        began, started = time.monotonic(), self._group is None
        deadline = began + deadline_seconds
        try:
            stop = self._start(deadline) if started else Stop.ARRIVED
            if stop is Stop.ARRIVED:
                stop = self._ask_measure(candidate, effort, deadline, 0.6 * deadline_seconds)
            if stop is Stop.ARRIVED and effort.certify:
                stop = self._ask_certify(candidate, deadline)
            if stop is Stop.ARRIVED and effort.resume:
                outcome = self._resume(candidate, effort, deadline)
            else:
                outcome = self._measured(candidate) if stop is Stop.ARRIVED else self._failed(stop)
        except Stopped:  # during a restart of the fork server
            outcome = interrupted(Phase.START)
        except MachineTrouble as error:  # a lost node did not return
            outcome = machines_fault(Phase.START, error, Source.NODE)
        except OSError as error:  # a full disk or a lack of descriptors is the machine's fault
            phase = self._group.phase if self._group is not None else Phase.START
            outcome = machines_fault(phase, error, Source.EXCEPTION)
        if not outcome.ok or self._executor.job.script:  # a script's data loader holds one batch size
            self.close()
        seconds = time.monotonic() - began
        inside = max(float(answer["measured_seconds"]) for answer in self._results) if outcome.ok else 0.0
        outside, log = seconds - inside, str(self._folder)
        return dataclasses.replace(outcome, log=log, seconds=seconds, outside_seconds=outside, started=started)

    def _ask_measure(self, candidate: Candidate, effort: Effort, deadline: float, most_seconds: float) -> Stop:
        """Have the ranks measure, and store their answers in `_results`."""
        group = self._running()
        group.reset_peaks()
        group.enter(Phase.FORWARD)
        stop = self._ask(
            "measure",
            deadline,
            micro_batch=candidate.micro_batch,
            accumulation=candidate.accumulation,
            full=effort.full,
            min_steps=effort.min_steps,
            max_steps=effort.max_steps,
            min_seconds=effort.min_seconds,
            max_seconds=min(effort.max_seconds, max(1.0, most_seconds)),
            most_seconds=most_seconds,
        )
        self._results = [self._answers[rank] for rank in sorted(self._answers)]
        return stop

    def _ask_certify(self, candidate: Candidate, deadline: float) -> Stop:
        """Have the ranks run the parts of training besides steps: evaluation and save."""
        self._running().enter(Phase.SAVE)
        return self._ask("certify", deadline, micro_batch=candidate.micro_batch)

    def _resume(self, candidate: Candidate, effort: Effort, deadline: float) -> Outcome:
        """Save a checkpoint, end the group, and have a new group resume from it."""
        group, folder = self._running(), self._folder.resolve() / CHECKPOINT
        group.enter(Phase.SAVE)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            stop = self._ask("checkpoint", deadline, folder=str(folder))
            if stop is not Stop.ARRIVED:
                return self._failed(stop)
            if not all(answer["checkpointed"] for answer in self._answers.values()):
                why, said = f"{folder.parent} has no room for a checkpoint", "disk's free bytes"
                return Outcome(Kind.INTERRUPTED, Phase.SAVE, reason=why, evidence=said, source=Source.LIMIT)
            group.end()
            self._checkpoint = folder
            self._ready.clear()
            stop = self._start(deadline)
            if stop is Stop.ARRIVED:
                self._beside_peak_bytes = max(self._beside_peak_bytes, *self._running().peaks().used)
                stop = self._ask_measure(candidate, effort, deadline, deadline - time.monotonic())
            return self._measured(candidate) if stop is Stop.ARRIVED else self._failed(stop)
        finally:
            self.close()
            shutil.rmtree(folder, ignore_errors=True)

    def _measured(self, candidate: Candidate) -> Outcome:
        """Return the outcome of everything since `_ask_measure`, including the peaks of a certification."""
        group = self._running()
        self.facts.update(self._results[0].get("facts", {}))
        job, hardware = self._executor.job, self._executor.hardware
        seen = (self._results, group.peaks(), group.seconds_by_phase())
        measurement = measurement_of(*seen, candidate=candidate, job=job, hardware=hardware, facts=self.facts)
        if self._beside_peak_bytes > measurement.peak_bytes:
            measurement = dataclasses.replace(measurement, peak_bytes=self._beside_peak_bytes)
        found = Outcome(Kind.OK, Phase.STEP, measurement, peak_bytes=measurement.peak_bytes)
        return self._executor.completed(candidate, found)

    # -- the group ---------------------------------------------------------------------------------------------------

    def _running(self) -> Group:
        assert self._group is not None
        return self._group

    def _start(self, deadline: float) -> Stop:
        """Launch the ranks and wait until their engine, or the script's first batch, is ready."""
        executor = self._executor
        deadlines = executor.deadlines
        silence = deadlines.allowing(size_seconds(executor.job, self._candidate), self._patience)
        policy = Policy(self._patience * deadlines.hello, silence, settle_seconds=0.25, may_leave=False)
        executor.ensure_launcher()
        self._folder.mkdir(parents=True, exist_ok=True)
        group = self._group = Group(
            executor.launcher,
            executor.hardware,
            executor.meter,
            policy,
            cancelled=lambda: executor.cancelled(),
            on_message=self._take,
            on_phase=lambda phase: executor.on_phase(phase),
            say=lambda text: executor.say(text),
        )
        ranks = executor.hardware.processes
        stop = group.start(executor.entry, ranks, self._spec(), deadline=deadline, logs=self._folder)
        return group.watch(lambda: len(self._ready) == ranks, deadline) if stop is Stop.ARRIVED else stop

    def _spec(self) -> dict[str, Any]:
        executor, candidate = self._executor, self._candidate
        job = executor.job
        what: dict[str, Any] = {"config": trial_config(candidate, job), "checkpointing": candidate.checkpointing}
        if job.script:
            what = {"candidate": candidate.as_dict}
        if job.script or job.workload:
            kept = [str((self._folder / CHECKPOINT).resolve())] if executor.resumes else []
            how: dict[str, Any] = {"unprotected": executor.unprotected, "kept": kept}
            what |= {**how, "sandbox": None}  # a node creates its own sandbox
            if executor.here:
                what["sandbox"] = trial_sandbox(executor.folder, job, candidate, executor.study, **how).to_json()
        return {
            **what,
            "job": under(job, candidate).order(),
            "device": executor.hardware.device,
            "cap_bytes": executor.hardware.memory_cap_bytes,
            "seed": executor.seed,
            "threads": executor.threads,
            "env": trial_environment(candidate, job, os.environ),
            "fault": executor.fault(self._folder.name),
            "live": executor.count_live_tensors,
            "ops": list(executor.tried_ops),
            "resume": str(self._checkpoint) if self._checkpoint else None,
            "slice_of": job.ranks if executor.hardware.sliced else None,
        }

    def _take(self, rank: int, message: Message) -> None:
        if (kind := message["type"]) == "phase" and message["phase"] == "ready":
            self._ready.add(rank)
        elif kind == "facts" and rank == 0:
            self.facts = message
        elif kind == "unbuilt":
            self.unbuilt = message["op"]
        elif kind in ("loaded", "measured"):
            if kind == "loaded" or message.get("certified"):
                self._beside_peak_bytes = max(self._beside_peak_bytes, inside_bytes(message))
            if kind == "measured":
                self._answers[rank] = message

    def _ask(self, kind: str, deadline: float, **request: Any) -> Stop:
        """Send a request to every rank and wait for all answers."""
        group, world = self._running(), self._executor.hardware.processes
        self._answers = {}
        group.tell(kind, **request)
        return group.watch(lambda: len(self._answers) == world, deadline)

    def _failed(self, stop: Stop) -> Outcome:
        """Collect the evidence, end the whole group at once, and return the outcome.

        Raises:
            Unusable: the script cannot be tuned with any candidate. For a script with a profile, which has been
                measured before, this is raised only if it resumed from a checkpoint.
        """
        group = self._running()
        if stop is Stop.CANCELLED:
            return interrupted(group.phase)
        if stop is Stop.DEADLINE:
            return out_of_time(group.phase, group.waited_seconds)
        evidence = group.evidence()
        self.close()
        if self._executor.cancelled():  # `scancel` ends tuner and ranks together, so the ranks may die first
            return interrupted(group.phase)
        script = self._executor.job.script
        known = script is not None and bool(script.profile) and self._checkpoint is None
        server_lives = not self._executor.here or not self._executor.ground.broken
        found = unusable(evidence, group.phase, known=known)
        return found or judged(evidence, greeted=group.greeted, server_lives=server_lives)

    def close(self) -> None:
        """End all ranks and wait until none is left."""
        ended, self._ended = self._ended, True
        if not ended and self._group is not None:
            self._group.end()
            clear(self._executor.folder)
            with suppress(OSError):  # the folder is not empty during a resume trial
                (self._folder / CHECKPOINT).rmdir()
