"""Changes that would make a job faster on its machine, ranked by prediction."""

from __future__ import annotations

import dataclasses

from autotune.commands.plan_machines import PER_NODE, Machines
from autotune.predict.elsewhere import Tried
from autotune.problem.hardware import GpuFacts, Hardware
from autotune.problem.job import Job
from autotune.results.plan import CardPlan, Gain, Outlook
from autotune.results.plan_view import short

WORTH = 0.02  # share of the speed; smaller gains are not shown
MOST = 6
_NVLINK_GB_PER_S = 300.0  # GB/s of one A100, one direction (NVIDIA's data sheet)


def gains(base: Outlook, machines: Machines, cards: tuple[CardPlan, ...]) -> tuple[Gain, ...]:
    """Return single changes of the job or the machine that are predicted to raise speed, best first, one of each kind."""
    found = [*_of_the_machine(base, machines), *_of_the_job(base, machines), *_of_other_cards(base, machines, cards)]
    worth = sorted((gain for gain in found if gain.share >= WORTH), key=lambda gain: -gain.share)
    return tuple(worth[:MOST])


def _of_the_machine(base: Outlook, machines: Machines) -> list[Gain]:
    hardware, facts = base.hardware, base.hardware.gpu_facts
    found = [
        _gain(
            base, _on(base, machines, _twice(hardware)), f"twice the GPUs: {_described(_twice(hardware))}", a_gpu=True
        )
    ]
    roomier = dataclasses.replace(hardware, memory_bytes=2 * hardware.memory_bytes, memory_cap_bytes=None)
    found.append(_gain(base, _on(base, machines, roomier), "twice the memory a GPU", config=True))
    richer = dataclasses.replace(hardware, host_memory_bytes=16 * hardware.host_memory_bytes)
    found.append(_gain(base, _on(base, machines, richer), "all the main memory that offload can use", config=True))
    if facts is not None and hardware.per_node > 1 and facts.link == "pcie":
        linked = _with(hardware, facts, link="nvlink", link_gb_per_s=_NVLINK_GB_PER_S)
        found.append(_gain(base, _on(base, machines, linked), "NVLink between the GPUs of a machine in place of PCIe"))
    if facts is not None and hardware.nodes > 1:
        rate = 2 * hardware.network_gb_per_s
        wider = _with(hardware, facts, network_gb_per_s=rate)
        found.append(_gain(base, _on(base, machines, wider), f"twice the network: {8 * rate:.0f} Gbit/s a node"))
    return [gain for gain in found if gain]


def _of_the_job(base: Outlook, machines: Machines) -> list[Gain]:
    job, found = base.job, []
    if job.global_batch_size is not None:
        larger = dataclasses.replace(job, global_batch_size=2 * job.global_batch_size)
        what = f"twice the global batch: {larger.global_batch_size} sequences"
        found.append(_gain(base, _on(base, machines, base.hardware, job=larger), what, config=True))
    if job.lengths and not job.packed:
        packed, what = dataclasses.replace(job, packed=True), "packing the sequences (--packing)"
        found.append(_gain(base, _on(base, machines, base.hardware, job=packed), what, config=True))
    return [gain for gain in found if gain]


def _on(base: Outlook, machines: Machines, hardware: Hardware | None = None, job: Job | None = None) -> Outlook | None:
    """Return the fastest prediction on other hardware, or for another job, than `base`'s."""
    return machines.fastest(machines.elsewhere.on(hardware or base.hardware, job or base.job))


def _of_other_cards(base: Outlook, machines: Machines, cards: tuple[CardPlan, ...]) -> list[Gain]:
    """Return gains of the same number of another card: the fastest card, and the faster one with the lowest cost per token."""
    hardware, found = base.hardware, []
    for card in cards:
        if card.best is None or card.gpu == hardware.facts:
            continue
        tried = machines.tried(card.gpu, hardware.count, hardware.nodes)
        place = tried.fastest() if tried else None
        if tried is not None and place is not None:
            found.append((float(tried.table.samples[place]), tried))
    now = base.prediction.samples_per_second
    faster = [(samples, tried) for samples, tried in found if samples > (1 + WORTH) * now]
    if not faster:
        return []
    chosen = [max(faster, key=lambda one: one[0])]
    chosen.append(min(faster, key=lambda one: _dollars(machines, one[1]) / one[0]))
    gains = (
        _gain(base, machines.fastest(tried), f"{tried.hardware.name} in place of {hardware.name}", config=True)
        for _, tried in chosen
    )
    return list(dict.fromkeys(gain for gain in gains if gain))


def _dollars(machines: Machines, tried: Tried) -> float:
    """Return dollars per GPU hour; infinite if no price is known."""
    price = machines.price(tried.hardware)
    return price.usd_per_hour if price else float("inf")


def _gain(base: Outlook, new: Outlook | None, what: str, *, a_gpu: bool = False, config: bool = False) -> Gain | None:
    """Return the gain of a change, or None if nothing fits with it.

    Args:
        a_gpu: add the remaining speed of each GPU.
        config: add the config that the change allows, if it differs.
    """
    if new is None:
        return None
    share = new.tokens_per_second / base.tokens_per_second - 1
    real = new.hardware.rates == base.hardware.rates and new.hardware.memory_bytes == base.hardware.memory_bytes
    known = new.usd is not None and base.usd and (real or new.hardware.facts != base.hardware.facts)
    detail = ""
    if a_gpu:
        detail = f"each {(1 + share) * base.hardware.count / new.hardware.count:.0%} as fast as now"
    elif config and short(new.prediction.candidate) != short(base.prediction.candidate):
        detail = short(new.prediction.candidate)
    return Gain(what, share, new.usd / base.usd - 1 if known and new.usd and base.usd else None, detail)


def _twice(hardware: Hardware) -> Hardware:
    """Return hardware with twice the GPUs: in machines of at most PER_NODE, or of the present size if that is larger."""
    grows = hardware.nodes == 1 and 2 * hardware.count <= PER_NODE
    host = hardware.host_memory_bytes * (2 if grows else 1)
    nodes = hardware.nodes if grows else 2 * hardware.nodes
    return dataclasses.replace(hardware, count=2 * hardware.count, nodes=nodes, host_memory_bytes=host)


def _with(hardware: Hardware, facts: GpuFacts, **rates: object) -> Hardware:
    return dataclasses.replace(hardware, rates={**dataclasses.asdict(facts), **rates})


def _described(hardware: Hardware) -> str:
    nodes = f" in {hardware.nodes} nodes" if hardware.nodes > 1 else ""
    return f"{hardware.count} x {hardware.name}{nodes}"
