"""Local executor: run a candidate in rank processes, build its Outcome."""

from __future__ import annotations

import copy
import dataclasses
import os
import re
import shutil
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.errors import Cause, MachineError, Stopped, Unusable, one_line
from autotune.executors.base import LaunchTarget, MeasureSpec, too_slow_outcome
from autotune.executors.machine import LocalMachine, Ops, RankRequirements, remove_scratch, trial_sandbox
from autotune.predict.step_time import model_flops_per_token, size_seconds
from autotune.problem.candidate import Candidate, job_with_candidate, rank_variables, samples
from autotune.problem.hardware import Hardware, threads_per_rank
from autotune.problem.job import Job
from autotune.problem.outcome import Measurement, Outcome, OutcomeKind, Phase, Source
from autotune.problem.training_trace import TrainingTrace
from autotune.rank.ds_config import all_ops, trial_config
from autotune.rank.step_statistics import Pace, median_spread, pace_of
from autotune.script.profile import RAN
from autotune.script.recorded import runs_user_code
from autotune.script.script import heavy_imports
from autotune.util.entry_points import MODEL_RANK, SCRIPT_RANK, SELFTEST_RANK
from autotune.workers.failure_classifier import FailureEvidence, MemorySnapshot, classify_failure, suspected_limits
from autotune.workers.gpu_memory import make_meter
from autotune.workers.group import GroupPolicy, WatchEnd, WorkerGroup
from autotune.workers.host_workers import MultiHostLaunch
from autotune.workers.launchers import IMPORT_SECONDS, Launcher
from autotune.workers.memory_monitor import Meter
from autotune.workers.memory_peaks import MemoryPeaks
from autotune.workers.protocol import Message

# -- local -------------------------------------------------------------------------------------------------------------
#
# Run trials in rank processes, on this machine or on the nodes of a cluster.

CHECKPOINT = "checkpoint"  # name of the checkpoint folder in a trial's folder
CUDA_INITIALIZED_BEFORE_FORK = "CUDA was woken before the fork"  # message of a forked rank


class LocalExecutor:
    """Real DeepSpeed in rank processes.

    Args:
        hardware: the machine, or all nodes.
        folder: the study's folder or one below it. Each trial's logs go to a subfolder.
        candidates: first candidates; they determine the DeepSpeed ops that `open` builds.
        cancelled: polled several times a second; if True, a running trial ends as interrupted.
        show: receives the current slow operation; empty when it is done.
        fault: returns a fault that tests inject into the named trial.
        target: where ranks run; None: on this machine.
        variables: environment of ranks on this machine, such as their devices if other jobs use the rest.
        study: the study's folder, if `folder` is another.
    """

    def __init__(
        self,
        job: Job,
        hardware: Hardware,
        folder: Path,
        candidates: list[Candidate],
        *,
        seed: int = 0,
        cancelled: Callable[[], bool] = lambda: False,
        show: Callable[[str], None] = lambda text: None,
        fault: Callable[[str], dict[str, Any] | None] = lambda name: None,
        target: LaunchTarget | None = None,
        variables: Mapping[str, str] | None = None,
        study: Path | None = None,
    ) -> None:
        self.job, self.hardware, self.folder, self.seed = job, hardware, folder, seed
        self.deadlines = SCRIPT_DEADLINES if job.script else Deadlines()
        self.cancelled, self.fault = cancelled, fault
        self.on_phase: Callable[[str], None] = lambda phase: None
        self.isolation, self._variables = "fork", variables or {}  # see `RankRequirements`
        self.study = study or folder
        self._first_candidates, self.tried_ops = list(candidates), dict[str, None]()  # builders, in order
        self.print_line: Callable[[str], None] = lambda text: None
        self.is_local = target is None
        self.meter = make_meter(hardware) if target is None else Meter()  # nodes have their own meters
        ops = Ops(lambda text: self.print_line(text), show)
        self.target = target or LocalMachine(folder, ops, lambda: self.cancelled())

    @property
    def rank_module(self) -> str:
        """Module that a rank of this job runs."""
        return SCRIPT_RANK if self.job.script else MODEL_RANK

    @property
    def launcher(self) -> Launcher | MultiHostLaunch:
        """Return the launcher of the ranks."""
        return self.target.launcher

    @property
    def ops(self) -> Ops:
        """Return the DeepSpeed ops that were built or failed."""
        return self.target.ops

    @property
    def threads(self) -> int:
        """CPU threads per rank."""
        return self.hardware.threads or threads_per_rank(self.hardware.count)

    def begin(self) -> None:
        """Start slow preparations in the background."""
        self.target.begin(self._needs())

    def open(self, print_line: Callable[[str], None]) -> None:
        """Remove checkpoints of killed tuners, connect the machines and load the first ops."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for left in self.folder.glob(f"trials/*/{CHECKPOINT}"):  # left by a killed tuner
            shutil.rmtree(left, ignore_errors=True)
        self.print_line = print_line
        self.target.open(self._needs())
        self.load_ops(self._first_candidates)

    def _needs(self) -> RankRequirements:
        modules = [self.rank_module, *(heavy_imports(self.job.script) if self.job.script else [])]
        ranks = (self.hardware.device, self.threads, self.isolation, modules, self.job.model.config.get("model_type"))
        return RankRequirements(*ranks, variables=self._variables, interpreter=self.job.interpreter)

    def load_ops(self, candidates: list[Candidate], *names: str, job: Job | None = None) -> None:
        """Build missing DeepSpeed ops for trials of these candidates, and ops of these builders."""
        self.tried_ops |= dict.fromkeys([*all_ops(candidates, job or self.job, self.hardware.device), *names])
        if not self.target.load_ops(list(self.tried_ops)):
            self._switch_to_spawn(self.print_line)

    def check(self, print_line: Callable[[str], None]) -> None:
        """Run the self-test of the ranks: cold if forked ranks find CUDA already initialized, and without P2P if they hang."""
        try:
            self._check(print_line)
        except MachineError as trouble:
            if self.isolation != "fork" or CUDA_INITIALIZED_BEFORE_FORK not in str(trouble):
                raise
            self._switch_to_spawn(print_line)
            self._check(print_line)

    def _check(self, print_line: Callable[[str], None]) -> None:
        spec = {
            "job": self.job.order(),
            "device": self.hardware.device,
            "cap_bytes": None,
            "threads": self.threads,
            "fault": self.fault("check"),
        }
        tries = _TRIES[-1:]
        if self.hardware.device == "cuda" and P2P_OFF.keys().isdisjoint(os.environ):
            tries = _TRIES
        for env, seconds in tries:
            folder, tried = self.folder / "check", {**spec, "env": env}
            rate = check_group(self.launcher, self.hardware, tried, folder, self.cancelled, seconds)
            if rate is not None:
                break
        if env:
            print_line("ranks hang unless P2P between the GPUs is off: trials and trainings have NCCL_P2P_DISABLE=1")
            self.hardware = dataclasses.replace(self.hardware, environment={**self.hardware.environment, **env})
        if rate:
            self.hardware = self.hardware.with_rates(ring_gb_per_s=rate)

    def _switch_to_spawn(self, print_line: Callable[[str], None]) -> None:
        """Start every rank as a new interpreter from now on."""
        print_line("something woke CUDA before the fork: falling back to cold starts (slower, same results)")
        self.isolation = "spawn"
        self.target.open(self._needs())

    def ensure_launcher(self) -> None:
        """Restart a killed fork server, and reconnect to lost nodes."""
        if self.target.broken:
            self.target.reconnect()
            if self.is_local:
                self.open(self.print_line)

    @property
    def resumes(self) -> bool:
        """Return True if trials can resume from a checkpoint: all ranks see the folder, and none is missing."""
        return self.target.is_shared_path(self.folder.resolve())

    @property
    def runs_torch_alone(self) -> bool:
        """Return True: torch alone trains with the same ranks."""
        return True

    def for_search(self, job: Job, on_phase: Callable[[str], None]) -> LocalExecutor:
        """Return the executor of a search on this one's open machine; either of the two is closed."""
        found = copy.copy(self)
        found.job, found.on_phase = job, on_phase
        return found

    def session(
        self, candidate: Candidate, name: str, patience: float = 1.0, *, job: Job | None = None
    ) -> LocalSession:
        """Return a session for the candidate's family."""
        return LocalSession(self, candidate, name, patience, job or self.job)

    def now(self) -> float:
        """Return the clock in seconds."""
        return time.monotonic()

    def close(self) -> None:
        """End all processes and release the machines."""
        self.target.close()


class LocalSession:
    """One engine of one family, in a group of ranks."""

    def __init__(self, executor: LocalExecutor, candidate: Candidate, name: str, patience: float, job: Job) -> None:
        self._executor, self._candidate, self._patience, self._job = executor, candidate, patience, job
        self._folder = executor.folder / "trials" / name
        self._group: WorkerGroup | None = None
        self.alive = True
        self._ready, self._answers = set[int](), dict[int, Message]()
        self._results: list[Message] = []  # results of the last measurement, by rank
        self._checkpoint: Path | None = None  # loaded by the next group
        self._peak_bytes_outside_steps = 0  # peak of the worst rank while it loaded, evaluated and saved
        self._steps = 0.0  # optimizer steps of a script so far
        self.facts: dict[str, Any] = {}  # reported by rank 0 of a script
        self.missing_op = ""  # builder of an op that the probe run needs and no config predicted

    @property
    def failed_at(self) -> float | None:
        """Monotonic time at which a failure was noticed; None if none was."""
        return self._group.failed_at if self._group is not None else None

    def measure(self, candidate: Candidate, measure_spec: MeasureSpec, deadline_seconds: float) -> Outcome:
        """Start the ranks if needed, measure the candidate, and return its outcome.

        Raises:
            ValueError: The candidate belongs to another family.
        """
        if candidate.family != self._candidate.family:
            raise ValueError("a session holds one family")
        began, started = time.monotonic(), self._group is None
        ready, deadline = began, began + deadline_seconds
        try:
            stop = self._start(deadline) if started else WatchEnd.ARRIVED
            ready = time.monotonic()
            if stop is WatchEnd.ARRIVED:
                stop = self._ask_measure(candidate, measure_spec, deadline, 0.6 * deadline_seconds, ready - began)
            if stop is WatchEnd.ARRIVED and measure_spec.certify:
                self._running().enter(Phase.SAVE)
                stop = self._request("certify", deadline, micro_batch=candidate.micro_batch)
            if stop is WatchEnd.ARRIVED and measure_spec.resume:
                outcome = self._resume(candidate, measure_spec, deadline)
            else:
                outcome = self._measured(candidate) if stop is WatchEnd.ARRIVED else self._failed(stop)
            ended = time.monotonic()
            if stop is WatchEnd.DEADLINE and outcome.kind is OutcomeKind.INTERRUPTED and ended < deadline:
                scripted = self._job.script is not None
                outcome = too_slow_outcome(outcome.phase, candidate, ended - ready, scripted=scripted)
        except Stopped:  # during a restart of the fork server
            outcome = interrupted_outcome(Phase.START)
        except MachineError as error:  # a lost node did not return
            outcome = infrastructure_outcome(Phase.START, error, Source.NODE)
        except OSError as error:  # a full disk or a lack of descriptors is the machine's fault
            phase = self._group.phase if self._group is not None else Phase.START
            outcome = infrastructure_outcome(phase, error, Source.EXCEPTION)
        if self._steps and not outcome.ok:
            self.facts[RAN] = {"start_seconds": ready - began, "step_seconds": (time.monotonic() - ready) / self._steps}
        if not outcome.ok or self._job.script:  # a script's data loader holds one batch size
            self.close()
        seconds = time.monotonic() - began
        inside = max(float(answer.get("measured_seconds") or 0.0) for answer in self._results) if outcome.ok else 0.0
        outside, log = seconds - inside, str(self._folder)
        return dataclasses.replace(outcome, log=log, seconds=seconds, outside_seconds=outside, started=started)

    def _ask_measure(
        self,
        candidate: Candidate,
        measure_spec: MeasureSpec,
        deadline: float,
        most_seconds: float,
        start_seconds: float = 0.0,
    ) -> WatchEnd:
        """Have the ranks measure, and store their answers in `_results`.

        Args:
            deadline: of the trial.
            most_seconds: of the measurement.
            start_seconds: time that the trial took so far.
        """
        group = self._running()
        group.reset_peaks()
        group.enter(Phase.FORWARD)
        stop = self._request(
            "measure",
            min(deadline, time.monotonic() + measure_spec.most_first_seconds(start_seconds)),
            micro_batch=candidate.micro_batch,
            accumulation=candidate.accumulation,
            full=measure_spec.full,
            reseed=measure_spec.reseed,
            min_steps=measure_spec.min_steps,
            max_steps=measure_spec.max_steps,
            min_seconds=measure_spec.min_seconds,
            max_seconds=min(measure_spec.max_seconds, max(1.0, most_seconds)),
            most_seconds=most_seconds,
            beaten_step_seconds=measure_spec.beaten_step_seconds,
            share_seconds=measure_spec.measuring_seconds(start_seconds),
        )
        if stop is WatchEnd.DEADLINE and group.compiles:  # only the first step compiles
            stop = self._await_answers(deadline)
        self._results = [self._answers[rank] for rank in sorted(self._answers)]
        return stop

    def _resume(self, candidate: Candidate, measure_spec: MeasureSpec, deadline: float) -> Outcome:
        """Save a checkpoint, end the group, and have a new group resume from it."""
        group, folder = self._running(), self._folder.resolve() / CHECKPOINT
        group.enter(Phase.SAVE)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            stop = self._request("checkpoint", deadline, folder=str(folder))
            if stop is not WatchEnd.ARRIVED:
                return self._failed(stop)
            if not all(answer.get("checkpointed") for answer in self._answers.values()):
                return no_space_outcome(folder.parent)
            group.end()
            self._checkpoint = folder
            self._ready.clear()
            stop = self._start(deadline)
            if stop is WatchEnd.ARRIVED:
                self._peak_bytes_outside_steps = max(self._peak_bytes_outside_steps, *self._running().peaks().used)
                stop = self._ask_measure(candidate, measure_spec, deadline, deadline - time.monotonic())
            return self._measured(candidate) if stop is WatchEnd.ARRIVED else self._failed(stop)
        finally:
            self.close()
            shutil.rmtree(folder, ignore_errors=True)

    def _measured(self, candidate: Candidate) -> Outcome:
        """Return the outcome of everything since `_ask_measure`, including the peaks of a certification."""
        try:
            return self._outcome_of_results(candidate)
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
            # A script's own code may write to the socket of its rank.
            why = f"{type(error).__name__}: {one_line(error)}"
            reason = f"the ranks sent results that cannot be read ({why})"
            self.close()
            return Outcome(OutcomeKind.CRASH, Phase.STEP, reason=reason, evidence=why, source=Source.EXCEPTION)

    def _outcome_of_results(self, candidate: Candidate) -> Outcome:
        group = self._running()
        self.facts.update(self._results[0].get("facts", {}))
        if any(result.get("seeds") for result in self._results):
            self.facts["seeds"] = [result["seeds"] for result in self._results]
        if any(result.get("repeats_seeds") for result in self._results):
            self.facts["repeats_seeds"] = True
        hardware = self._executor.hardware
        measurement = measurement_of(
            self._results, group.peaks(), candidate=candidate, job=self._job, hardware=hardware, facts=self.facts
        )
        peak_bytes = max(measurement.peak_bytes, self._peak_bytes_outside_steps)
        measurement = dataclasses.replace(measurement, peak_bytes=peak_bytes)
        trace = TrainingTrace.merged([one.get("trace") for one in self._results])
        return Outcome(OutcomeKind.OK, Phase.STEP, measurement, peak_bytes=measurement.peak_bytes, trace=trace)

    # -- the group ---------------------------------------------------------------------------------------------------

    def _running(self) -> WorkerGroup:
        assert self._group is not None
        return self._group

    def _start(self, deadline: float) -> WatchEnd:
        """Launch the ranks and wait until their engine, or the script's first batch, is ready."""
        executor = self._executor
        deadlines = executor.deadlines
        silence = deadlines.allowing(size_seconds(self._job, self._candidate), self._patience)
        policy = GroupPolicy(self._patience * deadlines.hello, silence, settle_seconds=0.25, may_exit=False)
        executor.ensure_launcher()
        self._folder.mkdir(parents=True, exist_ok=True)
        group = self._group = WorkerGroup(
            executor.launcher,
            executor.hardware,
            executor.meter,
            policy,
            cancelled=executor.cancelled,
            on_message=self._process,
            on_phase=executor.on_phase,
            print_line=executor.print_line,
        )
        ranks = executor.hardware.count
        stop = group.start(executor.rank_module, ranks, self._spec(), deadline=deadline, logs=self._folder)
        return group.watch(lambda: len(self._ready) == ranks, deadline) if stop is WatchEnd.ARRIVED else stop

    def _spec(self) -> dict[str, Any]:
        executor, candidate, job = self._executor, self._candidate, self._job
        what: dict[str, Any] = {"config": trial_config(candidate, job), "checkpointing": candidate.checkpointed_share}
        if job.script:
            what = {"candidate": candidate.as_dict}
        if runs_user_code(job):
            kept = [str((self._folder / CHECKPOINT).resolve())] if executor.resumes else []
            how: dict[str, Any] = {"unprotected": job.unprotected, "kept": kept}
            what |= {**how, "sandbox": None}  # a node creates its own sandbox
            if executor.is_local:
                what["sandbox"] = trial_sandbox(executor.folder, job, candidate, executor.study, **how).to_json()
        return {
            **what,
            "job": job_with_candidate(job, candidate).order(),
            "device": executor.hardware.device,
            "cap_bytes": executor.hardware.limit_bytes,
            "seed": executor.seed,
            "threads": executor.threads,
            "silence_seconds": {"cuda": self._patience * executor.deadlines.step}.get(executor.hardware.device),
            "env": {**executor.hardware.environment, **rank_variables(candidate, job, os.environ)},
            "fault": executor.fault(self._folder.name),
            "ops": list(executor.tried_ops),
            "resume": str(self._checkpoint) if self._checkpoint else None,
        }

    def _process(self, rank: int, message: Message) -> None:
        if (verb := message["type"]) == "phase" and message["phase"] == "ready":
            self._ready.add(rank)
        elif verb == "facts" and rank == 0:
            self.facts = message
        elif verb == "progress" and rank == 0 and "micro_batches" in message:
            self._steps = message["steps"] + message["micro_batches"] / self.facts.get("accumulation", 1)
        elif verb == "unbuilt":
            self.missing_op = message["op"]
        elif verb == "measured":
            self._answers[rank] = message
        if verb == "loaded" or (verb == "measured" and message.get("certified")):
            self._peak_bytes_outside_steps = max(self._peak_bytes_outside_steps, counted_peak_bytes(message))

    def _request(self, verb: str, deadline: float, **request: Any) -> WatchEnd:
        """Send a request to every rank and wait for all answers."""
        self._answers = {}
        self._running().send(verb, **request)
        return self._await_answers(deadline)

    def _await_answers(self, deadline: float) -> WatchEnd:
        world = self._executor.hardware.count
        return self._running().watch(lambda: len(self._answers) == world, deadline)

    def _failed(self, stop: WatchEnd) -> Outcome:
        """Collect the evidence, end the whole group at once, and return the outcome.

        Raises:
            Unusable: the script cannot be tuned with any candidate. For a script with a profile, which has been
                measured before, this is raised only if it resumed from a checkpoint.
        """
        group = self._running()
        if stop is WatchEnd.CANCELLED:
            return interrupted_outcome(group.phase)
        if stop is WatchEnd.DEADLINE:
            return budget_outcome(group.phase, group.waited_seconds, compiles=group.compiles)
        evidence = group.evidence()
        self.close()
        if self._executor.cancelled():  # `scancel` ends tuner and ranks together, so the ranks may die first
            return interrupted_outcome(group.phase)
        script = self._job.script
        known = script is not None and script.profile.is_known and self._checkpoint is None
        server_lives = not (self._executor.is_local and self._executor.target.broken)
        found = untunable_outcome(evidence, group.phase, known=known)
        return found or failed_outcome(evidence, greeted=group.greeted, server_lives=server_lives)

    def close(self) -> None:
        """End all ranks and wait until none is left."""
        was_alive, self.alive = self.alive, False
        if was_alive and self._group is not None:
            self._group.end()
            remove_scratch(self._executor.folder)
            with suppress(OSError):  # the folder is not empty during a resume trial
                (self._folder / CHECKPOINT).rmdir()


# -- measurement -------------------------------------------------------------------------------------------------------


def measurement_of(
    results: list[Message],
    peaks: MemoryPeaks,
    *,
    candidate: Candidate,
    job: Job,
    hardware: Hardware,
    facts: dict[str, Any],
) -> Measurement:
    """Return the measurement of one candidate: speed of the whole group, memory of its worst rank.

    Args:
        results: the `measured` message of each rank, by rank.
        facts: report of rank 0 of a script.
    """
    leading = results[0]  # all ranks have agreed on the times
    pace = _pace(leading, job)
    trained = samples(job, candidate)
    if not candidate.knobs:  # a probe run of a script
        trained = facts["micro_batch"] * facts["accumulation"] * (job.ranks // facts.get("sequence_ranks", 1))
    tokens = trained * job.tokens_per_sample
    if "tokens" in results[0]:
        tokens = sum(result.get("tokens", 0.0) for result in results) * job.ranks / len(results)
    tflops, mfu = _rates(job, candidate, hardware, tokens / pace.seconds)
    inside = [counted_peak_bytes(result) for result in results]
    # The growth of a GPU's used memory includes other processes. If NVML does not list the ranks, their own counts are
    # better.
    shown = max(peaks.used, default=0)
    return Measurement(
        step_seconds=pace.seconds,
        step_seconds_spread=pace.spread,
        steps=len(leading["step_seconds"]),
        samples_per_second=trained / pace.seconds,
        tokens_per_second=tokens / pace.seconds,
        peak_bytes=max(shown, *inside),
        extrapolated=bool(leading.get("extrapolated")),
        torch_allocated_bytes=max_reported(results, "allocated_bytes"),
        torch_reserved_bytes=max_reported(results, "reserved_bytes"),
        nvml_peak_bytes=peaks.worst if hardware.device == "cuda" else None,
        overhead_bytes=max_reported(results, "overhead_bytes") or None,
        alloc_retries=max_reported(results, "retries") or 0,
        host_peak_bytes=max_reported(results, "host_bytes"),
        pinned_bytes=max_reported(results, "pinned_bytes"),
        model_tflops_per_gpu=tflops,
        mfu=mfu,
    )


def _pace(result: Message, job: Job) -> Pace:
    """Return the pace of a rank's steps. A script may do additional work in some steps."""
    seconds = result["step_seconds"]
    return pace_of(seconds) if job.script else Pace(statistics.median(seconds), median_spread(seconds))


def counted_peak_bytes(result: Message) -> int:
    """Return the peak that a rank counted itself, in the quantity that is compared with capacity."""
    inside = int(result.get("data_bytes") or result.get("reserved_bytes") or 0)
    return inside + int(result.get("overhead_bytes") or 0)


def max_reported(results: list[Message], key: str) -> int | None:
    """Return the highest value that any rank reports; None if none does."""
    return max((int(result[key]) for result in results if result.get(key) is not None), default=None)


def _rates(
    job: Job, candidate: Candidate, hardware: Hardware, tokens_per_second: float
) -> tuple[float | None, float | None]:
    """Return model TFLOP/s per GPU and MFU; None if the model's or the card's figures are unknown."""
    flops_per_token = model_flops_per_token(job_with_candidate(job, candidate))
    if not flops_per_token:
        return None, None
    tflops = flops_per_token * tokens_per_second / job.ranks / 1e12
    peak = hardware.peak_tflops(job.precision)
    return tflops, peak and tflops / peak


def failed_outcome(evidence: FailureEvidence, *, greeted: bool, server_lives: bool) -> Outcome:
    """Return the outcome of a trial whose ranks have failed.

    Args:
        greeted: True if all ranks had started; before that, they have received nothing of the candidate.
    """
    verdict = classify_failure(evidence)
    kind, reason, said = verdict.kind, verdict.reason, verdict.evidence
    if kind is OutcomeKind.GPU_CONTENTION and evidence.peaks.neighbours:
        said = f"{said} ({evidence.peaks.neighbours})"
    if kind is OutcomeKind.CRASH and not server_lives:
        kind, reason = OutcomeKind.INFRASTRUCTURE, "the fork server was killed from outside, and its ranks with it"
    if not greeted:
        kind, reason = OutcomeKind.INFRASTRUCTURE, f"the ranks did not come up: {verdict.reason}"
    capacities = {OutcomeKind.OOM_DEVICE: evidence.capacity_bytes, OutcomeKind.OOM_HOST: evidence.host_total_bytes}
    return dataclasses.replace(
        verdict,
        kind=kind,
        reason=reason,
        evidence=said,
        limits=suspected_limits(evidence),
        capacity_bytes=capacities.get(kind) or None,
        peak_bytes=_peak_of(evidence),
    )


def _peak_of(evidence: FailureEvidence) -> int | None:
    """Return the highest peak that was sampled, or that failed ranks counted.

    Sampling misses most of a short trial. CPU ranks report after their memory cap was lifted, so their peak is limited
    to the cap.
    """
    accounts = [MemorySnapshot.of(error.get("text", ""), error.get("numbers")) for error in evidence.errors]
    counted = [size for one in accounts for size in (one.own, one.reserved_peak, one.reserved) if size is not None]
    worst_bytes = max([evidence.peaks.worst, *counted])
    if evidence.device == "cpu":
        worst_bytes = min([worst_bytes, *(one.allowed for one in accounts if one.allowed is not None)])
    return worst_bytes or None


def untunable_outcome(evidence: FailureEvidence, phase: Phase, *, known: bool) -> Outcome | None:
    """Return the outcome of a trial whose ranks report an untunable script; None if they do not.

    The candidate is the cause if the script is `known`: measured before.

    Raises:
        Unusable: the script cannot be tuned with any candidate.
    """
    said = next((error for error in evidence.errors if error.get("cause")), None)
    if said is None:
        return None
    text, cause = said["text"], Cause(said["cause"])
    if cause in (Cause.SCRIPT, Cause.STEPS) and not known:
        raise Unusable(text, cause)
    source = Source.EXCEPTION if cause is Cause.SCRIPT else Source(cause.value)
    return Outcome(OutcomeKind.INVALID, phase, reason=text, evidence="its steps", source=source)


def interrupted_outcome(phase: Phase) -> Outcome:
    """Return the outcome of a trial that the user stopped."""
    return Outcome(
        OutcomeKind.INTERRUPTED, phase, reason="the study was stopped", evidence="stop requested", source=Source.STOP
    )


def no_space_outcome(folder: Path) -> Outcome:
    """Return the outcome of a trial whose checkpoint does not fit on the disk of a folder."""
    return Outcome(
        OutcomeKind.INTERRUPTED,
        Phase.SAVE,
        reason=f"{folder} has no room for a checkpoint",
        evidence="disk's free bytes",
        source=Source.DISK,
    )


def infrastructure_outcome(phase: Phase, error: Exception, source: Source) -> Outcome:
    """Return the outcome of a trial that the machine prevented: a full disk, no free process, a lost node."""
    why = str(error)
    said = f"exception OSError: {why}" if isinstance(error, OSError) else why
    return Outcome(OutcomeKind.INFRASTRUCTURE, phase, reason=why, evidence=said, source=source)


def budget_outcome(phase: Phase, waited_seconds: float, *, compiles: bool) -> Outcome:
    """Return the outcome of a trial whose share of the budget ended. The candidate may be retried with more time.

    Args:
        waited_seconds: time that it waited for the device's memory.
        compiles: torch.compile was at work in a rank.
    """
    why, kind = "its share of the budget ended", OutcomeKind.INTERRUPTED
    if compiles:
        why += ", while torch.compile compiled the model"
    if waited_seconds:  # GPU contention must not count as a slow candidate
        kind = OutcomeKind.GPU_CONTENTION
        why += f", after {waited_seconds:.0f} s of waiting for the device's memory"
    return Outcome(kind, phase, reason=why, evidence="deadline of the budget", source=Source.BUDGET)


# -- deadlines ---------------------------------------------------------------------------------------------------------
#
# Time limits for ranks without a sign of progress.


@dataclass(frozen=True)
class Deadlines:
    """Seconds that ranks may show no progress in a phase.

    Progress is a message, a step of a thread, computation, or I/O. Large models get additional seconds from
    `size_seconds`.
    """

    hello: float = 90.0  # an interpreter starts and connects, before it receives the candidate
    start: float = 90.0
    init: float = 120.0
    step: float = 60.0

    def allowing(self, seconds: float, patience: float) -> Callable[[Phase], float]:
        """Return the limit of each phase: `seconds` more in heavy phases, all times `patience`.

        Heavy phases create or move weights and optimizer states.
        """
        own = {Phase.START: self.start, Phase.INIT: self.init}
        heavy = (Phase.INIT, Phase.LOAD, Phase.SAVE)
        return lambda phase: patience * (own.get(phase, self.step) + (seconds if phase in heavy else 0.0))


# Scripts may wait for the network, or for another process that prepares their data.
SCRIPT_DEADLINES = Deadlines(start=300.0, init=300.0, step=120.0)


# -- selftest ----------------------------------------------------------------------------------------------------------
#
# Self-test of the machine: ranks rendezvous and add numbers, so that faults are not attributed to a candidate.

_POLICY = GroupPolicy(90.0, lambda phase: 90.0, settle_seconds=1.0, may_exit=False)
P2P_OFF = {"NCCL_P2P_DISABLE": "1"}
# Variables of each try, and seconds after all imports: ranks that wait on GPUs spin and look alive. Where peer access is broken,
# the usual fault of consumer boxes, the first try hangs and the second does not. On a slow machine both may be too short.
_TRIES: tuple[tuple[dict[str, str], float], ...] = (({}, 20.0), (P2P_OFF, 20.0), ({}, 240.0))
_NCCL_SAID = re.compile(r"NCCL WARN\s+(.*)")
# Remedies for the most common errors; the first match is shown.
_REMEDIES = (
    (r"Duplicate GPU", "every rank needs a GPU of its own; of MIG slices a process sees one: --gpus 1"),
    (r"no kernel image|not compatible with the current PyTorch", "install a torch that is built for this GPU"),
    (r"No CUDA GPUs|driver version is insufficient|libcuda", "`autotune doctor` says what is seen; check the driver"),
    (
        r"no socket interface|[Cc]onnection refused|No route to host",
        "set NCCL_SOCKET_IFNAME to an interface that is up",
    ),
    (r"/dev/shm|Bus error|SIGBUS|No space left", "docker run --shm-size=8g (or --ipc=host)"),
    (
        r"Read-only file system|Permission denied",
        "make this path writable, or set HOME or the cache's variable to a folder that is",
    ),
    (r"out of memory", "other processes hold the devices' memory: end them, or hide those GPUs"),
)
_HANG = r"no sign of life|hang|deadline"
_REMEDY_OF_A_HANG = "the network or peer access may be broken: check the interface, IOMMU and ACS"
_REMEDY_OF_IMPORTS = (
    "the disk that Python's packages lie on may be slow or away: `python -X importtime -c 'import torch'` tells"
)


def check_group(
    launcher: Launcher | MultiHostLaunch,
    hardware: Hardware,
    spec: dict[str, Any],
    folder: Path,
    cancelled: Callable[[], bool],
    seconds: float,
) -> float | None:
    """Start a group of ranks that add numbers, and return the GB/s of their all-reduce; 0 if cancelled.

    None stands for no end within `seconds` after all imports, in a try that is not the last.

    Raises:
        MachineError: the test failed; one line with NCCL's last message and a remedy.
    """
    ranks, heard = hardware.count, defaultdict[str, dict[int, Message]](dict)

    def take(rank: int, message: Message) -> None:
        heard[message["type"]][rank] = message

    folder.mkdir(parents=True, exist_ok=True)
    group = WorkerGroup(launcher, hardware, None, _POLICY, cancelled=cancelled, on_message=take)
    deadline = time.monotonic() + IMPORT_SECONDS
    try:
        stop = group.start(SELFTEST_RANK, ranks, spec, deadline=deadline, logs=folder)
        if stop is WatchEnd.ARRIVED:
            stop = group.watch(lambda: len(heard["imported"]) == ranks, deadline)
        if stop is WatchEnd.ARRIVED:
            stop = group.watch(lambda: len(heard["measured"]) == ranks, time.monotonic() + seconds)
            if stop is WatchEnd.DEADLINE and seconds < _TRIES[-1][1]:
                return None
        if stop in (WatchEnd.ARRIVED, WatchEnd.CANCELLED):
            rates = [float(message["gb_per_s"]) for message in heard["measured"].values()]
            return max(rates, default=0.0)  # of the rank that joined last, which waited for none
        raise MachineError(_complaint(stop, group, folder, importing=len(heard["imported"]) < ranks))
    except OSError as error:
        raise MachineError(f"ranks cannot be started on this machine: {error}") from None
    finally:
        group.end()


def _complaint(stop: WatchEnd, group: WorkerGroup, folder: Path, importing: bool) -> str:
    """Return the failure in one line; `importing`: the ranks had not yet communicated."""
    if stop is WatchEnd.DEADLINE:
        reason = f"no end within {_TRIES[-1][1]:.0f} s, in {group.phase.value}: the ranks hang"
        if importing:
            reason = f"no torch and deepspeed imported by the deadline of {IMPORT_SECONDS} s"
        logs = ""
    else:
        evidence = group.evidence()
        reason = classify_failure(evidence).reason
        logs = "\n".join(evidence.logs.values()) + "\n".join(str(error.get("text")) for error in evidence.errors)
    said = _NCCL_SAID.findall(logs)
    text = f"{reason}; NCCL: {said[-1].strip()[:200]}" if said else reason
    remedies = (*_REMEDIES, (_HANG, _REMEDY_OF_IMPORTS if importing else _REMEDY_OF_A_HANG))
    found = f"{text}\n{logs}"
    remedy = next(
        (what for pattern, what in remedies if re.search(pattern, found)), "`autotune doctor` looks at the machine"
    )
    return (
        f"the ranks do not work together on this machine, before any config is tried: {text}; {remedy} (logs: {folder})"
    )
