"""Convert the ranks' reports, or their failure, to the trial's outcome."""

from __future__ import annotations

import statistics
from typing import Any

from autotune.errors import Cause, Unusable
from autotune.group.account import Account
from autotune.group.gauge import Peaks
from autotune.group.gpu_meter import clock_limits, clock_mhz
from autotune.group.protocol import Message
from autotune.group.verdict import Evidence, judge
from autotune.predict.flops import model_flops_per_token
from autotune.problem.candidate import Candidate, samples, under
from autotune.problem.hardware import Hardware
from autotune.problem.job import Job
from autotune.problem.outcome import Kind, Measurement, Outcome, Phase, Source
from autotune.rank.recurring import Pace, median_spread, pace_of


def measurement_of(
    results: list[Message],
    peaks: Peaks,
    phase_seconds: dict[str, float],
    *,
    candidate: Candidate,
    job: Job,
    hardware: Hardware,
    facts: dict[str, Any],
) -> Measurement:
    """Return the measurement of one candidate: speed of the whole group, memory of its worst rank.

    Args:
        results: the `measured` message of each rank, by rank.
        peaks: sampled peaks.
        phase_seconds: seconds by phase.
        candidate: the candidate.
        job: the job.
        hardware: the machine.
        facts: report of rank 0 of a script.
    """
    # ranks of a slice are timed separately; other ranks share one time
    leading = max(results, key=lambda one: _pace(one, job).seconds) if hardware.sliced else results[0]
    pace = _pace(leading, job)
    trained = samples(job, candidate)
    if not candidate.knobs:  # a probe run of a script
        trained = facts["micro_batch"] * facts["accumulation"] * job.ranks
    tokens = trained * job.tokens_per_sample
    if "tokens" in results[0]:
        tokens = sum(result["tokens"] for result in results) * job.ranks / len(results)
    tflops, mfu = _rates(job, candidate, hardware, tokens / pace.seconds)
    inside = [inside_bytes(result) for result in results]
    # The growth of a GPU's used memory includes other processes. If NVML does not list the ranks, their own counts are
    # better.
    shown = max(peaks.used, default=0)
    live = [result["live_bytes"] for result in results if "live_bytes" in result]
    return Measurement(
        step_seconds=pace.seconds,
        step_seconds_spread=pace.spread,
        steps=len(leading["step_seconds"]),
        samples_per_second=trained / pace.seconds,
        tokens_per_second=tokens / pace.seconds,
        peak_bytes=max(shown, *inside),
        micro_step_seconds=leading.get("micro_seconds"),
        boundary_seconds=leading.get("boundary_seconds"),
        extrapolated=bool(leading.get("extrapolated")),
        torch_allocated_bytes=worst(results, "allocated_bytes"),
        torch_reserved_bytes=worst(results, "reserved_bytes"),
        nvml_peak_bytes=peaks.worst if hardware.device == "cuda" else None,
        overhead_bytes=worst(results, "overhead_bytes") or None,
        sm_clock_mhz=clock_mhz(peaks),
        clock_limits=clock_limits(peaks),
        live_tensor_bytes=max(live, key=lambda by_phase: max(by_phase.values(), default=0), default={}),
        alloc_retries=worst(results, "retries") or 0,
        host_peak_bytes=worst(results, "host_bytes"),
        pinned_bytes=worst(results, "pinned_bytes"),
        model_tflops_per_gpu=tflops,
        mfu=mfu,
        phase_seconds={phase: round(seconds, 4) for phase, seconds in phase_seconds.items()},
    )


def _pace(result: Message, job: Job) -> Pace:
    """Return the pace of a rank's steps. A script may do additional work in some steps."""
    seconds = result["step_seconds"]
    return pace_of(seconds) if job.script else Pace(statistics.median(seconds), median_spread(seconds))


def inside_bytes(result: Message) -> int:
    """Return the peak that a rank counted itself, in the quantity that is compared with capacity."""
    inside = int(result.get("data_bytes") or result.get("reserved_bytes") or 0)
    return inside + int(result.get("overhead_bytes") or 0)


def worst(results: list[Message], key: str) -> int | None:
    """Return the highest value that any rank reports; None if none does."""
    return max((int(result[key]) for result in results if result.get(key) is not None), default=None)


def _rates(
    job: Job, candidate: Candidate, hardware: Hardware, tokens_per_second: float
) -> tuple[float | None, float | None]:
    """Return model TFLOP/s per GPU and MFU; None if the model's or the card's figures are unknown."""
    flops_per_token = model_flops_per_token(under(job, candidate))
    if not flops_per_token:
        return None, None
    tflops = flops_per_token * tokens_per_second / job.ranks / 1e12
    card = hardware.gpu_facts
    if card is None or card.doubt:  # a share of an estimated peak is not meaningful
        return tflops, None
    return tflops, tflops / (card.fp32_tflops if job.precision == "fp32" else card.tflops)


def judged(evidence: Evidence, *, greeted: bool, server_lives: bool) -> Outcome:
    """Return the outcome of a trial whose ranks have failed.

    Args:
        evidence: the collected evidence.
        greeted: True if all ranks had started; before that, they have received nothing of the candidate.
        server_lives: True if the fork server is alive.
    """
    verdict = judge(evidence)
    kind, reason, said = verdict.kind, verdict.reason, verdict.evidence
    if kind is Kind.FOREIGN and evidence.peaks.neighbours:
        said = f"{said} ({evidence.peaks.neighbours})"
    if kind is Kind.CRASH and not server_lives:
        kind, reason = Kind.INFRASTRUCTURE, "the fork server was killed from outside, and its ranks with it"
    if not greeted:
        kind, reason = Kind.INFRASTRUCTURE, f"the ranks did not come up: {verdict.reason}"
    return Outcome(
        kind,
        verdict.phase,
        reason=reason,
        evidence=said,
        source=verdict.source,
        exceptions=verdict.exceptions,
        rank=verdict.rank,
        missing_bytes=verdict.missing_bytes,
        capacity_bytes=_capacity_of(kind, evidence),
        peak_bytes=_peak_of(evidence),
    )


def _capacity_of(kind: Kind, evidence: Evidence) -> int | None:
    """Return the capacity of the exhausted memory; None without an OOM or if unknown."""
    if kind is Kind.OOM_DEVICE:
        return evidence.capacity_bytes or None
    return (evidence.host_total_bytes or None) if kind is Kind.OOM_HOST else None


def _peak_of(evidence: Evidence) -> int | None:
    """Return the highest peak that was sampled, or that failed ranks counted.

    Sampling misses most of a short trial. CPU ranks report after their memory cap was lifted, so their peak is limited
    to the cap.
    """
    accounts = [Account.of(error.get("text", ""), error.get("numbers")) for error in evidence.errors]
    counted = [size for one in accounts for size in (one.own, one.reserved_peak, one.reserved) if size is not None]
    worst_bytes = max([evidence.peaks.worst, *counted])
    if evidence.device == "cpu":
        worst_bytes = min([worst_bytes, *(one.allowed for one in accounts if one.allowed is not None)])
    return worst_bytes or None


def unusable(evidence: Evidence, phase: Phase, *, known: bool) -> Outcome | None:
    """Return the outcome of a trial whose ranks report an untunable script; None if they do not.

    Args:
        evidence: the collected evidence.
        phase: the ranks' phase.
        known: True if the script has been measured before, so that the candidate is the cause.

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
    return Outcome(Kind.INVALID, phase, reason=text, evidence="its steps", source=source)


def interrupted(phase: Phase) -> Outcome:
    """Return the outcome of a trial that the user stopped."""
    why, said = "the study was stopped", "stop requested"
    return Outcome(Kind.INTERRUPTED, phase, reason=why, evidence=said, source=Source.STOP)


def machines_fault(phase: Phase, error: Exception, source: Source) -> Outcome:
    """Return the outcome of a trial that the machine prevented: a full disk, no free process, a lost node."""
    why = str(error)
    said = f"exception OSError: {why}" if isinstance(error, OSError) else why
    return Outcome(Kind.INFRASTRUCTURE, phase, reason=why, evidence=said, source=source)


def out_of_time(phase: Phase, waited_seconds: float) -> Outcome:
    """Return the outcome of a trial whose share of the budget ended. The candidate may be retried with more time."""
    why, said = f"its share of the budget ended in {phase.value}", "deadline of the budget"
    kind = Kind.INTERRUPTED
    if waited_seconds:  # GPU contention must not count as a slow candidate
        kind, why = Kind.FOREIGN, f"{why}, after {waited_seconds:.0f} s of waiting for the device's memory"
    return Outcome(kind, phase, reason=why, evidence=said, source=Source.BUDGET)
