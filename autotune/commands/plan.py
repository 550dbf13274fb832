"""Predictions without running: candidates, fewest GPUs, and changes that would help."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from autotune.commands.environment import NAMED_MODEL, ranks_python
from autotune.commands.request import Request
from autotune.commands.setup import PlanSetup, plan_setups
from autotune.errors import UserError
from autotune.predict.predictor import Prediction, Predictor, Table
from autotune.predict.trace import traced_predictor
from autotune.predict.trace_data import Trace
from autotune.predict.what_if import PLENTY, Elsewhere, JobPredictions, host_bytes_per_node, known_errors
from autotune.problem.candidate import CHECKPOINTING, Candidate
from autotune.problem.gpu_specs import Price, price_table
from autotune.problem.hardware import GpuFacts, Hardware, gpu_table, named_hardware
from autotune.problem.job import Job
from autotune.results.plan import CardPlan, HostNeed, Outlook, Plan, PlannedGain, StagePlan, short, token_speed
from autotune.util.units import GIB, format_bytes

# -- plan --------------------------------------------------------------------------------------------------------------
#
# `autotune plan`: configs that fit and their speed, without running anything.


def plans(request: Request, gpus: Sequence[str | None], say: Callable[[str], None] = lambda text: None) -> list[Plan]:
    """Return a plan for each named GPU; None is the machine's own. A single plan also covers other machines.

    Args:
        say: receives lines for display.

    Raises:
        UserError: bad input.
    """
    if not gpus:
        raise UserError("--compare names no GPU: expected several, like rtx4090,a100-80gb,h100")
    made: list[Plan] = []
    traces: dict[str, Trace] = {}  # by precision: one trace serves all GPUs
    with ranks_python(request.python, say, named=NAMED_MODEL):  # without torch the plan is less exact
        for setup in plan_setups(request, gpus):
            predictor = traced_predictor(setup.job, setup.hardware, traces.get(setup.job.precision))
            traces[setup.job.precision] = predictor.trace
            made.append(make_plan(setup, predictor, elsewhere=len(gpus) == 1))
    return made


def make_plan(setup: PlanSetup, predictor: Predictor, top: int = 5, *, elsewhere: bool = False) -> Plan:
    """Predict every candidate of the space.

    The plan has the `top` fastest that surely fit (or else the likeliest to fit), and the largest micro-batch by ZeRO stage.

    Args:
        elsewhere: add other machines that would suffice, and changes that would help.

    Raises:
        UserError: the space has no candidate for the job.
    """
    candidates, left_out = predictor.buildable(setup.space.candidates(setup.job))
    table = predictor.table(candidates)
    best = _best(predictor, candidates, table, top)
    of_stage = np.array([c.stage for c in candidates])
    stages = []
    for stage in sorted({c.stage for c in candidates}):
        head = predictor.ranked(table, of_stage == stage)[:1]
        stages.append(_stage_plan(stage, candidates, head, setup, predictor))
    shown = best[0] if best else stages[-1].smallest
    plan = Plan(
        setup.job,
        setup.hardware,
        best,
        stages,
        "; ".join([*setup.faults, *left_out, *predictor.notes()]),
        tokens=setup.tokens,
        price=setup.price,
        host=_host_needs(setup, predictor, candidates),
        host_assumed=setup.host_assumed,
        errors=known_errors(setup.job, shown.candidate, setup.hardware),
    )
    if not elsewhere:
        return plan
    machines = Machines(setup, Elsewhere(setup.space, predictor, candidates, table))
    cards = machines.cards()
    helped = gains(plan.outlook, machines, cards) if plan.outlook else ()
    return dataclasses.replace(plan, own=machines.fewest_of_own(), cards=cards, gains=helped)


def _best(predictor: Predictor, candidates: list[Candidate], table: Table, top: int) -> list[Prediction]:
    """Return the first candidates of `ranked`; of several with the same main settings only the first."""
    chosen: dict[tuple[Any, ...], int] = {}
    for i in predictor.ranked(table):
        c = candidates[i]
        chosen.setdefault((c.stage, c.checkpointing, c.offload_optimizer, c.offload_param, c.micro_batch), i)
        if len(chosen) == top:
            break
    return predictor.predict_many([candidates[i] for i in chosen.values()]) if chosen else []


def _host_needs(setup: PlanSetup, predictor: Predictor, candidates: list[Candidate]) -> tuple[HostNeed, ...]:
    """Return the main memory for each way of offloading, at the fewest sequences and with activations recomputed."""
    smallest: dict[tuple[int, bool], Candidate] = {}
    for c in candidates:
        if "cpu" in (c.offload_optimizer, c.offload_param) and c.offload_optimizer != "none":
            key = (c.stage, c.offload_param != "none")
            rank = (c.micro_batch, not c.checkpointing, -c.accumulation)
            held = smallest.get(key)
            if held is None or rank < (held.micro_batch, not held.checkpointing, -held.accumulation):
                smallest[key] = c
    if not smallest:
        return ()
    hardware, ways = setup.hardware, sorted(smallest)
    roomy = Predictor(
        setup.job, dataclasses.replace(hardware, host_memory_bytes=PLENTY), predictor.trace, predictor.tracer
    )
    return tuple(
        HostNeed(stage, parameters, host_bytes_per_node(one.host_bytes, hardware), one.sure)
        for (stage, parameters), one in zip(ways, roomy.predict_many([smallest[way] for way in ways]), strict=True)
    )


def _stage_plan(
    stage: int, candidates: list[Candidate], head: list[int], setup: PlanSetup, predictor: Predictor
) -> StagePlan:
    """Return the plan of one ZeRO stage.

    Args:
        head: the index of the stage's best candidate, if any may fit.
    """
    mine = [c for c in candidates if c.stage == stage]
    # The family with the fewest changes: no checkpointing or offload if the space allows it, and defaults elsewhere.
    plain = min(
        mine,
        key=lambda c: (
            c.checkpointing,
            c.offload_param != "none",
            c.offload_optimizer != "none",
            abs(c.get("reduce_bucket_size", 5e8) - 5e8),
            not c.get("overlap_comm", True),
        ),
    )
    rungs = sorted({c for c in mine if c.family == plain.family}, key=lambda c: (c.micro_batch, c.accumulation))
    predictions = predictor.predict_many(rungs)
    fitting = [one for one in predictions if one.sure]
    largest = max(fitting, key=lambda one: (one.candidate.micro_batch, one.samples_per_second), default=None)
    wanted = next(
        (
            one
            for one in predictions
            if not one.sure and (largest is None or one.candidate.micro_batch > largest.candidate.micro_batch)
        ),
        None,
    )
    unlocks = _unlocks(wanted, setup, predictor) if wanted is not None else []
    helped = predictor.predict(candidates[head[0]]) if head and largest is None else None
    return StagePlan(stage, largest, predictions[0], unlocks, helped)


def _unlocks(wanted: Prediction, setup: PlanSetup, predictor: Predictor) -> list[str]:
    """Return single changes, each of which would make a candidate fit that does not."""
    job, hardware = setup.job, setup.hardware
    candidate, found = wanted.candidate, []

    def turned(name: str, value: bool | str) -> Candidate | None:
        knob = setup.space.knobs.get(name)
        return candidate.but(**{name: value}) if knob and value in knob.values else None

    changes = [
        ("activation checkpointing", turned(CHECKPOINTING, True)),
        ("optimizer offload to the CPU", turned("offload_optimizer", "cpu")),
        ("parameter offload to the CPU", turned("offload_param", "cpu")),
    ]
    for what, changed in changes:
        if changed is not None and changed != candidate:
            one = predictor.predict(changed)
            if one.sure:
                found.append(f"{what} ({token_speed(one, job)})")
    if job.global_batch_size is None:
        step = 1 if hardware.nodes == 1 else hardware.per_node
        more = dataclasses.replace(job, ranks=job.ranks + step)
        nodes = hardware.nodes + (hardware.nodes > 1)
        grown = dataclasses.replace(hardware, count=hardware.count + step, nodes=nodes)
        if Predictor(more, grown, predictor.trace, predictor.tracer).predict(candidate).sure:
            found.append("one more GPU" if hardware.nodes == 1 else "one more node")
    missing = wanted.sure_bytes - hardware.ceiling_bytes
    if hardware.device == "cuda" and missing > 0:
        needed = wanted.sure_bytes / (1 - hardware.headroom) / GIB
        larger = [g for g in gpu_table().values() if g.memory_gib >= needed]
        if larger:
            card = min(larger, key=lambda g: g.memory_gib)
            found.append(f"a card of {needed:.0f} GiB or more, like {card.name}")
    return [f"micro-batch {candidate.micro_batch} would fit with {what}" for what in found] or [
        f"micro-batch {candidate.micro_batch} is short of {format_bytes(missing)}; no single change is enough"
    ]


# -- plan machines -----------------------------------------------------------------------------------------------------
#
# Machines that would suffice for a job: the fewest GPUs of a card, and a comparison of all cards.

PER_NODE = 8  # GPUs in rented machines; smaller ones have 1, 2 or 4
LONGEST_SECONDS = 30 * 24 * 3600.0  # longer trainings are rejected at any price
_SIZES = ((1, 1), (2, 1), (4, 1), (PER_NODE, 1))  # (GPUs, nodes)
_MORE = tuple((PER_NODE * nodes, nodes) for nodes in (2, 4, 8))  # tried only if one machine is not enough
_EXACT = (*((gpus, 1) for gpus in range(1, PER_NODE + 1)), *((PER_NODE * nodes, nodes) for nodes in range(2, 33)))


class Machines:
    """Predictions of one job on any number of any card."""

    def __init__(self, setup: PlanSetup, elsewhere: Elsewhere) -> None:
        self.setup, self.elsewhere = setup, elsewhere
        self._tried: dict[tuple[str, int, int], JobPredictions | None] = {}

    def cards(self) -> tuple[CardPlan, ...]:
        """Return every card of the table: by cost per token, then those without a price, then those on which nothing fits."""
        found = [self._card(name) for name in gpu_table()]
        return tuple(sorted(found, key=_rank))

    def fewest_of_own(self) -> CardPlan | None:
        """Return the fewest of the setup's own card: any number within a machine, then whole machines."""
        hardware = self.setup.hardware
        if hardware.facts is None:
            return None
        fewest = fewest_offloading = None
        for one in self._sizes(hardware.facts, _EXACT):
            fewest = self.outlook(one, one.fastest(offload=False))
            if fewest:
                break
            fewest_offloading = fewest_offloading or self.outlook(one, one.fastest(any_host=True))
        return CardPlan(hardware.facts, fewest, fewest_offloading, None)

    def outlook(self, tried: JobPredictions | None, place: int | None) -> Outlook | None:
        """Return the outlook of one candidate of a trial setup."""
        if tried is None or place is None:
            return None
        price = self.price(tried.hardware)
        return Outlook(tried.prediction(place), tried.job, tried.hardware, self.setup.tokens, price)

    def fastest(self, tried: JobPredictions | None) -> Outlook | None:
        """Return the outlook of the fastest candidate that fits."""
        return self.outlook(tried, tried.fastest() if tried else None)

    def price(self, hardware: Hardware) -> Price | None:
        """Return the price of one GPU: the setup's for its own card, else from `data/prices.json`."""
        if hardware.facts == self.setup.hardware.facts:
            return self.setup.price
        return price_table().get(hardware.facts or "")

    def of(self, name: str, gpus: int, nodes: int) -> Hardware:
        """Return `gpus` of a card, with the setup's headroom and, if it was typed, its main memory."""
        mine = self.setup.hardware
        typed = None if self.setup.host_assumed else mine.host_memory_bytes
        hardware = named_hardware(name, gpus, headroom=mine.headroom, host_memory_bytes=typed, nodes=nodes)
        if name == mine.facts:  # the setup's own card may be capped, or partly in use
            same = ("memory_bytes", "memory_cap_bytes", "taken_bytes", "rates")
            hardware = dataclasses.replace(hardware, **{field: getattr(mine, field) for field in same})
        return hardware

    def _card(self, name: str) -> CardPlan:
        whole = self.tried(name, PER_NODE, 1)
        hopeless = whole is not None and whole.fastest(any_host=True) is None  # fewer would not suffice either
        found = self._plan(name, _SIZES[-1:] if hopeless else _SIZES)
        return found if found.best else self._plan(name, _MORE)

    def _plan(self, name: str, sizes: Iterable[tuple[int, int]]) -> CardPlan:
        """Return the card's plan in machines of these sizes, in ascending order."""
        fewest = fewest_offloading = None
        best: tuple[tuple[bool, float], JobPredictions, int] | None = None
        for one in self._sizes(name, sizes):
            fewest = fewest or self.outlook(one, one.fastest(offload=False))
            fewest_offloading = fewest_offloading or fewest or self.outlook(one, one.fastest(any_host=True))
            place = one.fastest()
            if place is not None:
                samples = float(one.table.samples[place])
                long = self.setup.tokens / (samples * one.job.tokens_per_sample) > LONGEST_SECONDS
                # GPUs per (sample per second): proportional to the cost of a token at any GPU price
                cost = long, one.hardware.count / samples
                if best is None or cost < best[0]:
                    best = cost, one, place
        if fewest_offloading is fewest:
            fewest_offloading = None
        return CardPlan(name, fewest, fewest_offloading, self.outlook(best[1], best[2]) if best else None)

    def tried(self, name: str, gpus: int, nodes: int) -> JobPredictions | None:
        """Return the setup's job on `gpus` of a card; None if its global batch cannot be split over them."""
        job = self.setup.job
        if job.precision == "bf16" and not gpu_table()[name].bf16 and not self.setup.precision_typed:
            job = dataclasses.replace(job, precision="fp16")
        key = name, gpus, nodes
        if key not in self._tried:
            self._tried[key] = self.elsewhere.on(self.of(*key), job)
        return self._tried[key]

    def _sizes(self, name: str, sizes: Iterable[tuple[int, int]]) -> Iterator[JobPredictions]:
        return (found for size in sizes if (found := self.tried(name, *size)))


def _rank(card: CardPlan) -> tuple[bool, bool, float, str]:
    cost = card.best.usd if card.best else None
    long = card.best is not None and 3600 * card.best.hours > LONGEST_SECONDS
    return card.best is None, long, cost if cost is not None else float("inf"), card.gpu


# -- plan gains --------------------------------------------------------------------------------------------------------
#
# Changes that would make a job faster on its machine, ranked by prediction.

WORTH = 0.02  # share of the speed; smaller gains are not shown
MOST = 6
_NVLINK_GB_PER_S = 300.0  # GB/s of one A100, one direction (NVIDIA's data sheet)


def gains(base: Outlook, machines: Machines, cards: tuple[CardPlan, ...]) -> tuple[PlannedGain, ...]:
    """Return single changes of the job or the machine that are predicted to raise speed, best first, one of each kind."""
    found = [*_of_the_machine(base, machines), *_of_the_job(base, machines), *_of_other_cards(base, machines, cards)]
    worth = sorted((gain for gain in found if gain.share >= WORTH), key=lambda gain: -gain.share)
    return tuple(worth[:MOST])


def _of_the_machine(base: Outlook, machines: Machines) -> list[PlannedGain]:
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


def _of_the_job(base: Outlook, machines: Machines) -> list[PlannedGain]:
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


def _of_other_cards(base: Outlook, machines: Machines, cards: tuple[CardPlan, ...]) -> list[PlannedGain]:
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


def _dollars(machines: Machines, tried: JobPredictions) -> float:
    """Return dollars per GPU hour; infinite if no price is known."""
    price = machines.price(tried.hardware)
    return price.usd_per_hour if price else float("inf")


def _gain(
    base: Outlook, new: Outlook | None, what: str, *, a_gpu: bool = False, config: bool = False
) -> PlannedGain | None:
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
    return PlannedGain(what, share, new.usd / base.usd - 1 if known and new.usd and base.usd else None, detail)


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
