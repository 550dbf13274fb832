"""What would make a job faster than it is on its machine, ranked by what is predicted."""

from __future__ import annotations

import dataclasses

from autotune.commands.plan_machines import PER_NODE, Machines
from autotune.problem.hardware import GpuFacts, Hardware
from autotune.problem.job import Job
from autotune.results.plan import CardPlan, Gain, Outlook

WORTH = 0.02  # a share of the speed; less is not said
MOST = 6
_NVLINK_GB_PER_S = 300.0  # of one A100, one direction (NVIDIA's data sheet)


def gains(base: Outlook, machines: Machines, cards: tuple[CardPlan, ...]) -> tuple[Gain, ...]:
    """Changes of the job or the machine that are predicted to give speed, best first: one of each kind, one at a time."""
    found = [*_of_the_machine(base, machines), *_of_the_job(base, machines), *_of_other_cards(base, machines, cards)]
    worth = sorted((gain for gain in found if gain.share >= WORTH), key=lambda gain: -gain.share)
    return tuple(worth[:MOST])


def _of_the_machine(base: Outlook, machines: Machines) -> list[Gain]:
    hardware, facts = base.hardware, base.hardware.gpu_facts
    found = [_gain(base, machines, _twice(hardware), f"twice the GPUs: {_described(_twice(hardware))}", a_gpu=True)]
    roomier = dataclasses.replace(hardware, memory_bytes=2 * hardware.memory_bytes, memory_cap_bytes=None)
    found.append(_gain(base, machines, roomier, "twice the memory a GPU", config=True))
    richer = dataclasses.replace(hardware, host_memory_bytes=16 * hardware.host_memory_bytes)
    found.append(_gain(base, machines, richer, "all the main memory that offload can use", config=True))
    if facts is not None and hardware.per_node > 1 and facts.link == "pcie":
        linked = _with(hardware, facts, link="nvlink", link_gb_per_s=_NVLINK_GB_PER_S)
        found.append(_gain(base, machines, linked, "NVLink between the GPUs of a machine in place of PCIe"))
    if facts is not None and hardware.nodes > 1:
        rate = 2 * hardware.network_gb_per_s
        wider = _with(hardware, facts, network_gb_per_s=rate)
        found.append(_gain(base, machines, wider, f"twice the network: {8 * rate:.0f} Gbit/s a node"))
    return [gain for gain in found if gain]


def _of_the_job(base: Outlook, machines: Machines) -> list[Gain]:
    job, found = base.job, []
    if job.global_batch_size is not None:
        larger = dataclasses.replace(job, global_batch_size=2 * job.global_batch_size)
        what = f"twice the global batch: {larger.global_batch_size} sequences"
        found.append(_gain(base, machines, base.hardware, what, job=larger, config=True))
    if job.lengths and not job.packed:
        packed = dataclasses.replace(job, packed=True)
        found.append(_gain(base, machines, base.hardware, "packing the sequences (--packing)", job=packed, config=True))
    return [gain for gain in found if gain]


def _of_other_cards(base: Outlook, machines: Machines, cards: tuple[CardPlan, ...]) -> list[Gain]:
    """As many of the fastest other card; and of the one with the next more memory, which is often a small step."""
    hardware, found = base.hardware, []
    for card in cards:
        if card.best is None or card.gpu == hardware.facts:
            continue
        other = machines.of(card.gpu, hardware.count, hardware.nodes)
        gain = _gain(base, machines, other, f"{card.gpu} in place of {hardware.name}", config=True)
        if gain:
            found.append(gain)
    fastest = max(found, key=lambda gain: gain.share, default=None)
    priced = [gain for gain in found if gain.usd_share is not None and gain.usd_share < -WORTH and gain.share >= WORTH]
    cheapest = min(priced, key=lambda gain: gain.usd_share or 0.0, default=None)
    return list(dict.fromkeys(gain for gain in (fastest, cheapest) if gain))


def _gain(
    base: Outlook,
    machines: Machines,
    hardware: Hardware,
    what: str,
    *,
    job: Job | None = None,
    a_gpu: bool = False,
    config: bool = False,
) -> Gain | None:
    """The change's gain, or None where nothing fits with it.

    Args:
        a_gpu: say what is left of the speed of each GPU.
        config: say the config that it makes possible, where that is another.
    """
    tried = machines.elsewhere.on(hardware, job or base.job)
    new = machines.outlook(tried, tried.fastest() if tried else None)
    if new is None:
        return None
    share = new.tokens_per_second / base.tokens_per_second - 1
    usd = new.usd / base.usd - 1 if new.usd is not None and base.usd and hardware.rates is None else None
    detail = ""
    if a_gpu:
        detail = f"each {(1 + share) * base.hardware.count / hardware.count:.0%} as fast"
    elif config and new.prediction.candidate != base.prediction.candidate:
        detail = str(new.prediction.candidate)
    return Gain(what, share, usd, detail)


def _twice(hardware: Hardware) -> Hardware:
    """Twice as many, in machines of at most PER_NODE or, where they already have more, of as many as now."""
    grows = hardware.nodes == 1 and 2 * hardware.count <= PER_NODE
    host = hardware.host_memory_bytes * (2 if grows else 1)
    nodes = hardware.nodes if grows else 2 * hardware.nodes
    return dataclasses.replace(hardware, count=2 * hardware.count, nodes=nodes, host_memory_bytes=host)


def _with(hardware: Hardware, facts: GpuFacts, **rates: object) -> Hardware:
    return dataclasses.replace(hardware, rates={**dataclasses.asdict(facts), **rates})


def _described(hardware: Hardware) -> str:
    nodes = f" in {hardware.nodes} nodes" if hardware.nodes > 1 else ""
    return f"{hardware.count} x {hardware.name}{nodes}"
