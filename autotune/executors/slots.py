"""Divide one machine between parallel jobs, by GPUs or CPUs."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass

from autotune.errors import UserError
from autotune.problem.cpus import threads_per_rank, usable_cpus
from autotune.problem.gpus import visible_gpus
from autotune.problem.hardware import Hardware, detect

CPUS = "AUTOTUNE_CPUS"  # environment variable with the CPUs of a rank's job


@dataclass(frozen=True)
class Slot:
    """Devices of one job."""

    hardware: Hardware
    variables: Mapping[str, str]  # environment of its ranks


def slots(
    parallel: int,
    device: str,
    ranks: int | None,
    *,
    memory_cap_bytes: int | None = None,
    headroom: float = 0.05,
    offload_beside: bool = False,
) -> tuple[Slot, ...]:
    """Return equal slots for `parallel` jobs.

    Args:
        parallel: number of jobs.
        device: `auto`, `cuda` or `cpu`.
        ranks: ranks per job.
        memory_cap_bytes: limit per rank.
        headroom: share of capacity left free.
        offload_beside: offloading candidates run in parallel and get a share of main memory; otherwise they run alone
            with all of it.

    Raises:
        UserError: there are too few devices, or they differ.
    """
    if parallel < 1:
        raise UserError(f"--parallel {parallel}: expected at least 1")
    if ranks is None:
        raise UserError(f"--parallel {parallel}: say with --gpus how many devices each of the {parallel} jobs has")
    gpus = visible_gpus() if device != "cpu" else []
    if not gpus:
        return _on_cpus(parallel, detect(device, ranks, headroom=headroom), memory_cap_bytes)
    if len(gpus) < parallel * ranks:
        raise _too_many(parallel, f"{len(gpus)} GPUs", ranks, len(gpus) // ranks)
    whole = detect(device, parallel * ranks, memory_cap_bytes=memory_cap_bytes, headroom=headroom)
    if " + " in whole.name:
        raise UserError(
            f"--parallel {parallel}: these GPUs are unlike ({whole.name}), and so would be what they measure; choose alike ones "
            "with CUDA_VISIBLE_DEVICES"
        )
    if offload_beside:
        whole = dataclasses.replace(whole, host_memory_bytes=whole.host_memory_bytes // parallel)
    places = [whole.gpus[at : at + ranks] for at in range(0, parallel * ranks, ranks)]
    return tuple(
        Slot(dataclasses.replace(whole, count=ranks, gpus=place), {"CUDA_VISIBLE_DEVICES": ",".join(place)})
        for place in places
    )


def _on_cpus(parallel: int, machine: Hardware, memory_cap_bytes: int | None) -> tuple[Slot, ...]:
    """Divide CPUs and main memory equally. Ranks keep the smaller number of threads also in verification."""
    ranks, cpus = machine.count, usable_cpus()
    threads = threads_per_rank(ranks * parallel)
    if cpus < parallel * ranks * threads:
        raise _too_many(parallel, f"{cpus} CPUs", ranks, cpus // (ranks * threads), threads)
    share = dataclasses.replace(machine, memory_bytes=machine.memory_bytes // parallel, threads=threads)
    share, ours, each = share.capped(memory_cap_bytes), sorted(os.sched_getaffinity(0)), ranks * threads
    places = [ours[at : at + each] for at in range(0, parallel * each, each)]
    return tuple(Slot(share, {CPUS: ",".join(map(str, place))}) for place in places)


def _too_many(parallel: int, there: str, ranks: int, most: int, threads: int = 1) -> UserError:
    what = f"{ranks} rank{'s' * (ranks > 1)}" + (f" with {threads} threads each" if threads > 1 else "")
    hold = f"hold {most} job{'s' * (most > 1)} of {what}; try --parallel {most}" if most else f"hold no job of {what}"
    return UserError(f"--parallel {parallel}: {there} {hold}")
