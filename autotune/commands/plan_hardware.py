"""Machines of a plan: named ones, or several like this one."""

from __future__ import annotations

import dataclasses

from autotune.errors import UserError
from autotune.predict.constants import overhead_prior
from autotune.problem.hardware import Hardware, detect, named_hardware
from autotune.units import GIB, format_bytes

MOST_GPUS = 4096  # over all nodes; two link rates describe larger clusters too poorly


def planned_hardware(
    name: str | None,
    gpus_per_node: int,
    nodes: int,
    headroom: float,
    host_memory_bytes: int | None = None,
    memory_cap_bytes: int | None = None,
) -> Hardware:
    """Return `gpus_per_node` of the named GPU, or of the machine's own, in each of `nodes` machines.

    Args:
        host_memory_bytes: of each machine; None: as measured, or 32 GiB a GPU.
        memory_cap_bytes: limit for one rank on its GPU.

    Raises:
        UserError: impossible counts, or no such GPU.
    """
    if not 1 <= gpus_per_node <= 100_000:
        raise UserError(f"--gpus {gpus_per_node}: expected between 1 and 100000")
    if nodes < 1:
        raise UserError(f"--nodes {nodes}: expected at least 1")
    count = gpus_per_node * nodes
    if nodes > 1 and count > MOST_GPUS:
        raise UserError(
            f"--nodes {nodes}: with --gpus {gpus_per_node} in each that is {count} GPUs, expected at most {MOST_GPUS}"
        )
    if name is None:
        found = detect("auto", gpus_per_node, headroom=headroom)
        hardware = dataclasses.replace(found, count=count, nodes=nodes)
    else:
        hardware = named_hardware(name.strip(), count, headroom=headroom, nodes=nodes)
    host = host_memory_bytes or hardware.host_memory_bytes
    return roomy(dataclasses.replace(hardware, host_memory_bytes=host).capped(memory_cap_bytes))


def slice_of(nodes: int | None, here: Hardware) -> Hardware:
    """Return this many machines like this one, which stands for all of them; None: this one itself.

    Raises:
        UserError: impossible counts.
    """
    if nodes is None:
        return here
    if nodes < 1 or nodes * here.count > MOST_GPUS:
        raise UserError(f"--nodes {nodes}: expected between 1 and {MOST_GPUS // here.count} machines like this one")
    return dataclasses.replace(here, count=nodes * here.count, nodes=nodes, sliced=nodes > 1)


def roomy(hardware: Hardware) -> Hardware:
    """Return the hardware if a GPU has more memory than the fixed share of every process.

    Raises:
        UserError: the memory is too small.
    """
    if hardware.device != "cuda":
        return hardware
    taken = overhead_prior(hardware, hardware.count).mean * GIB
    if hardware.ceiling_bytes <= taken:
        raise UserError(
            f"{hardware.name}: the {format_bytes(hardware.ceiling_bytes)} that a rank may use of it are less than the "
            f"{format_bytes(taken)} of CUDA's context and NCCL: free its memory, or take another card"
        )
    return hardware
