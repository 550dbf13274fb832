"""Check that an entry's figures are possible: no card computes faster than its peak or holds more than its memory, and
figures of one trial agree."""

from __future__ import annotations

from autotune.errors import UserError
from autotune.gallery.entry import Entry, Tried
from autotune.predict.flops import matmul_parameters, model_flops_per_token
from autotune.problem.candidate import under
from autotune.problem.hardware import gpu_table
from autotune.problem.outcome import Kind
from autotune.problem.tasks import CAUSAL

# relative difference allowed between figures of one trial: a step is a median, speeds may be means
COUNTED_ALIKE = 0.05
OTHER_LENGTHS = 3.0  # factor by which a script's batches of a few steps may be longer than average
ABOVE_MEMORY = 1.02  # drivers differ slightly in the GiB they report
CPU_TFLOPS = 200.0  # more than any CPU rank reaches
FORWARD_AND_BACKWARD = 4.0  # least FLOPs per parameter and token, if a model's shape is unknown
ALL_BUT_EMBEDDINGS = 0.3  # least share of the parameters that compute, if a model's shape is unknown
# allowed ratio of parameters in matrix products to a model's own count; tied embeddings count twice
FITTING_SHARES = (0.2, 1.5)


def check(entry: Entry) -> None:
    """Check all figures of an entry.

    Raises:
        UserError: a figure is impossible, or there is no winner; the message names the field.
    """
    if entry.winner is None:
        raise UserError("winner: there is none; the gallery takes what fits and is fastest, beside what was tried")
    _check_memory(entry)
    _check_shape(entry)
    for at, one in enumerate(entry.candidates):
        if why := _trouble(entry, one):
            raise UserError(f"candidates[{at}].{why}")


def _check_memory(entry: Entry) -> None:
    machine = entry.machine
    if machine.capacity_gib > ABOVE_MEMORY * machine.memory_gib:
        raise UserError(
            f"machine.capacity_gib: {machine.capacity_gib:g} GiB are more than the card's {machine.memory_gib:g}"
        )
    if machine.facts is not None and not 0.8 < machine.memory_gib / machine.facts.memory_gib < 1.1:
        raise UserError(
            f"machine.memory_gib: {machine.memory_gib:g} GiB, and a {machine.gpu} has {machine.facts.memory_gib:g}"
        )


def _check_shape(entry: Entry) -> None:
    """Check that the parameter count and the sizes describe one model, as peaks are judged by the sizes."""
    trained, config = entry.job, entry.job.config()
    if trained.parameters is None or trained.task != CAUSAL or any("expert" in key for key in trained.shape):
        return
    multiplied = matmul_parameters(config, trained.task)
    low, high = FITTING_SHARES
    if multiplied is not None and not low < multiplied / trained.parameters < high:
        raise UserError(
            f"job.shape: multiplies by {multiplied:.3g} weights, and job.parameters says {trained.parameters:.3g}: one of them "
            "is of another model"
        )


def _trouble(entry: Entry, one: Tried) -> str | None:
    """Return the impossible field and the reason, or None."""
    if one.peak_gib is not None and one.outcome == Kind.OK and one.peak_gib > ABOVE_MEMORY * entry.machine.memory_gib:
        return f"peak_gib: {one.peak_gib:g} GiB are more than the card's {entry.machine.memory_gib:g}, and it ran"
    if one.step_seconds is None or one.tokens_per_second is None or one.samples_per_second is None:
        return None
    if why := _counted_otherwise(entry, one):
        return why
    job = under(entry.job.job(entry.machine.count), one.candidate)
    flops = model_flops_per_token(job) or _least_flops(entry)
    if flops is None:
        return None
    # Padding counts as work, but not in tokens per second.
    tokens = one.tokens_per_second / (job.ranks * 1e12)
    used, peak = flops * tokens, _peak_tflops(entry)
    if used > peak:
        return (
            f"tokens_per_second: {one.tokens_per_second:g} tokens a second are {used:.3g} TFLOP/s a device, and "
            f"{_card(entry)} computes at most {peak:g}"
        )
    return None


def _counted_otherwise(entry: Entry, one: Tried) -> str | None:
    assert one.step_seconds is not None
    assert one.samples_per_second is not None
    assert one.tokens_per_second is not None
    candidate = one.candidate
    sequences = candidate.micro_batch * candidate.accumulation * entry.machine.count
    packs = entry.job.packed or bool(candidate.get("packing", False))
    if not packs and abs(one.samples_per_second * one.step_seconds / sequences - 1) > COUNTED_ALIKE:
        return (
            f"samples_per_second: {one.samples_per_second:g} times a step of {one.step_seconds:g} s is not the "
            f"{sequences} samples of its step"
        )
    tokens = one.tokens_per_second / one.samples_per_second
    if not 1 / OTHER_LENGTHS < tokens / entry.job.tokens_per_sample < OTHER_LENGTHS:
        return (
            f"tokens_per_second: {tokens:.4g} tokens a sample, and job.tokens_per_sample says "
            f"{entry.job.tokens_per_sample:g}"
        )
    return None


def _least_flops(entry: Entry) -> float | None:
    if entry.job.parameters is None or any("expert" in key for key in entry.job.shape):
        return None
    return FORWARD_AND_BACKWARD * ALL_BUT_EMBEDDINGS * entry.job.parameters


def _peak_tflops(entry: Entry) -> float:
    """Return the peak of 16-bit arithmetic, which 32-bit matrices may use too (TF32). An unknown card gets the peak of the
    fastest known one."""
    if entry.machine.device == "cpu":
        return CPU_TFLOPS
    facts = entry.machine.facts
    return facts.tflops if facts is not None else max(row.tflops for row in gpu_table().values())


def _card(entry: Entry) -> str:
    if entry.machine.device == "cpu":
        return "a rank on a processor"
    return f"a {entry.machine.gpu}" if entry.machine.gpu else "the fastest card known"
