"""Estimate an engine's start time from its size alone. Limits use it, so it errs on the generous side; candidates are not
ranked by it."""

from __future__ import annotations

from autotune.predict.flops import dense_shape, matmul_parameters
from autotune.problem.candidate import Candidate
from autotune.problem.job import Job

# Slow ends of the observed rates, not typical values: one core that fills random weights, or a disk that they are
# read from; pages that the kernel zeroes and cudaHostAlloc pins (1 to 3 GB/s per node); a swap file on a slow NVMe
# disk; NCCL's first rendezvous.
INITIALISED_PER_SECOND = 100e6  # parameters
PINNED_BYTES_PER_SECOND = 1e9  # all ranks together
SWAPPED_BYTES_PER_SECOND = 0.5e9
SECONDS_PER_RANK = 0.5
_OPTIMIZER_BYTES = 16  # fp32 weights, gradients and two moments of a parameter
_WEIGHT_BYTES = 2


def parameter_count(job: Job) -> int:
    """Return the parameters of the job's model, frozen ones included; 0 if unknown."""
    profile = job.script.profile if job.script else {}
    if profile.get("trained"):
        return int(sum(profile["trained"]) + profile["frozen"])
    if job.model.parameters:
        return job.model.parameters
    shape, products = dense_shape(job.model.config), matmul_parameters(job.model.config)
    if shape is None or products is None:
        return 0
    text = job.model.config.get("text_config") or job.model.config
    return products + shape[2] * int(text.get("hidden_size", text.get("n_embd", 0)))


def size_seconds(job: Job, candidate: Candidate) -> float:
    """Return the seconds that the candidate's engine needs to start because of its size. Importing and connecting are not
    included."""
    parameters = parameter_count(job)
    seconds = parameters / INITIALISED_PER_SECOND + SECONDS_PER_RANK * job.ranks
    for place, element_bytes in (
        (candidate.offload_optimizer, _OPTIMIZER_BYTES),
        (candidate.offload_param, _WEIGHT_BYTES),
    ):
        rate = {"cpu": PINNED_BYTES_PER_SECOND, "nvme": SWAPPED_BYTES_PER_SECOND}.get(place)
        seconds += parameters * element_bytes / rate if rate else 0.0
    return seconds
