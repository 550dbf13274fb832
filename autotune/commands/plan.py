"""Predictions without running: candidates, fewest GPUs, and cheapest cards."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from autotune.commands.environment import NAMED_MODEL, ranks_python
from autotune.commands.request import Request
from autotune.commands.setup import PlanSetup, plan_setups
from autotune.errors import UserError
from autotune.predict.calibration import TIME
from autotune.predict.features import columns_of
from autotune.predict.predictor import SURE_SIGMAS, Prediction, Predictor, Table
from autotune.predict.step_time import cores_of
from autotune.predict.trace import missing_packages, traced_predictor
from autotune.predict.trace_cache import known_trace, with_runnable_attention
from autotune.predict.trace_data import Trace
from autotune.predict.what_if import (
    JobPredictions,
    OtherHardware,
    host_bytes_per_node,
    is_published,
    loading_bytes_per_node,
    whole_bytes,
)
from autotune.predict.zero_memory import saved_bytes
from autotune.problem.candidate import LOSS, Candidate
from autotune.problem.gpu_specs import Price, gpu_table, price_table
from autotune.problem.hardware import Hardware, named_hardware
from autotune.problem.job import FULL, SEQUENCE_RANKS, Job
from autotune.problem.models import has_expert_modules
from autotune.problem.space import Domain
from autotune.results.output_files import check_out
from autotune.results.plan import CardPlan, Outlook, Plan, WayPlan, write_config
from autotune.search.sampler import FeasibleSampler


def plans(
    request: Request, gpus: Sequence[str | None], print_line: Callable[[str], None] = lambda text: None
) -> list[Plan]:
    """Return a plan for each named GPU; None is the machine's own. A single plan also covers other machines.

    The config of a single plan is written to the request's file.

    Args:
        print_line: receives lines for display.

    Raises:
        UserError: bad input.
    """
    if request.out:
        check_out(request.out, ".json", makes_folders=True)
        if len(gpus) > 1:
            raise UserError("--out takes the config of one GPU. Name one with --gpu.")
    made: list[Plan] = []
    traces: dict[str, Trace] = {}  # by precision: one trace serves all GPUs
    # without torch the plan is less exact
    python = ranks_python(request.python, print_line, needed=NAMED_MODEL, optional=True)
    for setup in plan_setups(request, gpus, python):
        trace = traces.get(setup.job.precision)
        if trace is None:
            _announce_trace(setup, print_line)
        predictor = traced_predictor(setup.job, setup.hardware, trace, widened=True)
        traces[setup.job.precision] = predictor.trace
        made.append(make_plan(setup, predictor, elsewhere=len(gpus) == 1))
    if request.out and made[0].best:
        write_config(made[0], request.out)
        print_line(f"wrote {request.out}")
    return made


def planned_sampler(request: Request) -> FeasibleSampler:
    """Return a sampler over the candidates of a plan.

    Raises:
        UserError: bad input.
    """
    python = ranks_python(request.python, lambda text: None, needed=NAMED_MODEL, optional=True)
    (setup,) = plan_setups(request, [request.gpu], python)
    trace = traced_predictor(setup.job, setup.hardware).trace
    return FeasibleSampler(lambda: traced_predictor(setup.job, setup.hardware, trace), setup.space)


def _announce_trace(setup: PlanSetup, print_line: Callable[[str], None]) -> None:
    """Name the wait for traces if one of the job, with a loss of the space, is not known."""
    job = setup.job
    if job.script is not None or missing_packages(job.interpreter):
        return
    losses: Any = setup.space.knobs.get(LOSS, Domain((job.loss,))).values
    jobs = (with_runnable_attention(dataclasses.replace(job, loss=one)) for one in losses)
    if not all(known_trace(one, device=setup.hardware.device) for one in jobs):
        print_line(f"tracing {job.model.name}: once for this model, task and length, maybe a minute")


def make_plan(setup: PlanSetup, predictor: Predictor, *, elsewhere: bool = False) -> Plan:
    """Predict every candidate of the space.

    The plan has the MOST_SHOWN fastest that surely fit (or else the likeliest to fit), and each way to train.

    Args:
        elsewhere: add other machines that would suffice.

    Raises:
        UserError: the space has no candidate for the job.
    """
    candidates, left_out = predictor.buildable(setup.space.candidates(setup.job))
    table = predictor.table(candidates)
    best = _best(predictor, candidates, table)
    places = CandidateGroups(setup.hardware, predictor, table)
    closest = None if best else places.closest(range(len(candidates)))
    with_host = None if best else places.with_host()
    shown = [predictor.predict(candidates[i]) if i is not None else None for i in (closest, with_host)]
    counted = best[0] if best else shown[1] or shown[0]
    assert counted is not None
    parameters = sum(predictor.trace.every_size)
    plan = Plan(
        setup.job,
        setup.hardware,
        best,
        tuple(_ways(predictor, candidates, places)),
        (*setup.faults, *left_out, *predictor.notes(), *_advice(setup.job, setup.hardware, counted.candidate)),
        tokens=setup.tokens,
        price=setup.price,
        closest=shown[0],
        with_host=shown[1],
        host_assumed=setup.host_assumed,
        batch_assumed=setup.batch_assumed,
        loading_bytes=loading_bytes_per_node(setup.job, parameters, setup.hardware),
        zero_init_bytes=loading_bytes_per_node(setup.job, parameters, setup.hardware, zero_init=True),
        whole_bytes=whole_bytes(setup.job, parameters, counted.candidate),
        save_bytes=float(saved_bytes(setup.job, predictor.trace, columns_of([counted.candidate], setup.job))[0]),
        whole_loss=_whole_loss(predictor, candidates, table),
    )
    if not elsewhere:
        return plan
    machines = Machines(
        setup, OtherHardware(setup.space, predictor, candidates, table, batch_assumed=setup.batch_assumed)
    )
    cards = tuple(_with_answer(card, plan.outlook) for card in machines.cards())
    shared = None if best or with_host is not None else _shared_sequences(machines)
    return dataclasses.replace(plan, own=machines.fewest_of_own(), cards=cards, shared=shared)


def _advice(job: Job, hardware: Hardware, candidate: Candidate) -> Iterator[str]:
    """Yield a line for each circumstance outside the candidate on which its training or speed depends.

    Sources: deepspeed 0.19.8, runtime/zero/leaf_module_config.py; torch/distributed/run.py, which sets OMP_NUM_THREADS; steps of
    chenyaofo's gist, llmq and torchtune in `benchmarks/predict/published.py --rows`.
    """
    if hardware.facts and not is_published(hardware.facts):
        yield f"no published run on {hardware.facts} was compared with its predictions"
    transformers = job.interpreter.version("transformers")
    if candidate.stage == 3 and job.ranks > 1 and has_expert_modules(job.model.config, transformers):
        yield (
            f"transformers {transformers} keeps each expert in a module that some ranks skip: ZeRO-3 hangs or runs "
            "out of memory, unless zero_optimization.leaf_module.classes (deepspeed 0.18, which has Mixtral, Qwen2-MoE and "
            "Qwen3-MoE by default) or deepspeed.utils.set_z3_leaf_modules names the class of the MoE block; `autotune run "
            "--model` sets it"
        )
    if candidate.offload_optimizer == "cpu" and hardware.device == "cuda" and cores_of(hardware) is None:
        yield (
            "this speed is uncertain, because an offloaded optimizer steps on the CPU threads of its rank (OMP_NUM_THREADS; "
            f"torchrun sets 1). The plan assumes {math.exp(TIME['cpu_adam'].mean):.1f} times the time that main memory allows; "
            "published steps took 0.6 to 20 times"
        )


def _shared_sequences(machines: Machines) -> Outlook | None:
    """Return the fastest prediction with the fewest GPUs of a node that have to share each sequence for it to fit, or None."""
    job, hardware = machines.setup.job, machines.setup.hardware
    for size in range(job.sequence_ranks + 1, hardware.per_node + 1):
        try:
            split = dataclasses.replace(job, base_config={**job.base_config, SEQUENCE_RANKS: size})
        except UserError:  # the size divides neither ranks nor heads
            continue
        if found := machines.fastest(machines.elsewhere.on(hardware, split)):
            return found
    return None


def _with_answer(card: CardPlan, answer: Outlook | None) -> CardPlan:
    """Return the card with the plan's own answer in place of the same machine's outlook, which tries fewer candidates."""
    best = card.best
    if best is None or answer is None or card.gpu != answer.hardware.facts:
        return card
    same = (best.hardware.count, best.hardware.nodes) == (answer.hardware.count, answer.hardware.nodes)
    return dataclasses.replace(card, best=answer) if same and best.job.precision == answer.job.precision else card


MOST_SHOWN = 5  # fastest configs of a plan


def _whole_loss(predictor: Predictor, candidates: list[Candidate], table: Table) -> Prediction | None:
    """Return the fastest config that makes all logits, or None if none fits."""
    fitting = (candidates[i] for i in predictor.ranked(table))
    found = next((one for one in fitting if one.get(LOSS, predictor.job.loss) == FULL), None)
    return None if found is None else predictor.predict(found)


def _best(predictor: Predictor, candidates: list[Candidate], table: Table) -> list[Prediction]:
    """Return the first MOST_SHOWN candidates of `ranked`; of several with the same main settings only the first."""
    chosen: dict[tuple[Any, ...], int] = {}
    for i in predictor.ranked(table):
        c = candidates[i]
        chosen.setdefault(
            (c.stage, c.checkpointing, c.offload_optimizer, c.offload_param, c.micro_batch, c.get(LOSS)), i
        )
        if len(chosen) == MOST_SHOWN:
            break
    return predictor.predict_many([candidates[i] for i in chosen.values()]) if chosen else []


class CandidateGroups:
    """Indices of a table's candidates by what they need and lack."""

    def __init__(self, hardware: Hardware, predictor: Predictor, table: Table) -> None:
        self.table = table
        self.sure = predictor.margins(table) >= SURE_SIGMAS
        self._gpu_short = np.maximum(0.0, table.sure - hardware.ceiling_bytes)
        own = host_bytes_per_node(0.0, hardware)
        self._host = np.where(table.host_bytes > 0, table.host_bytes * hardware.per_node + own, 0.0)
        self._host_short = np.maximum(0.0, self._host - hardware.host_memory_bytes)

    def closest(self, among: Iterable[int]) -> int:
        """Return the candidate that lacks the least memory of a GPU, then of main memory; of several the fastest."""
        return min(among, key=lambda i: (self._gpu_short[i], self._host_short[i], -self.table.samples[i]))

    def with_host(self) -> int | None:
        """Return the candidate that surely fits the GPU and needs the least main memory; None if none fits the GPU."""
        fitting = np.flatnonzero(self._gpu_short == 0)
        return min(map(int, fitting), key=lambda i: (self._host[i], -self.table.samples[i]), default=None)


def _ways(predictor: Predictor, candidates: list[Candidate], places: CandidateGroups) -> Iterator[WayPlan]:
    """Yield the largest and the fastest candidate that surely fit, for each stage, checkpointing and offload."""
    groups: dict[tuple[int, bool, bool], list[int]] = {}
    for i, c in enumerate(candidates):
        groups.setdefault((c.stage, bool(c.offloaded), c.checkpointing), []).append(i)
    samples = places.table.samples
    for (stage, offload, checkpointing), mine in sorted(groups.items()):
        fitting = [i for i in mine if places.sure[i]]
        if fitting:
            largest = max(fitting, key=lambda i: (candidates[i].micro_batch, samples[i]))
            fastest = max(fitting, key=lambda i: samples[i])
            two = predictor.predict_many([candidates[largest], candidates[fastest]])
            yield WayPlan(stage, checkpointing, offload, two[0], two[1], None)
        else:
            lacking = predictor.predict(candidates[places.closest(mine)])
            yield WayPlan(stage, checkpointing, offload, None, None, lacking)


# -- plan machines -----------------------------------------------------------------------------------------------------

PER_NODE = 8  # GPUs in rented machines; smaller ones have 1, 2 or 4
LONGEST_SECONDS = 30 * 24 * 3600.0  # longer trainings are rejected at any price
_SIZES = ((1, 1), (2, 1), (4, 1), (PER_NODE, 1))  # (GPUs, nodes)
_MORE = tuple((PER_NODE * nodes, nodes) for nodes in (2, 4, 8))  # tried only if one machine is not enough
_EXACT = (*((gpus, 1) for gpus in range(1, PER_NODE + 1)), *((PER_NODE * nodes, nodes) for nodes in range(2, 33)))


class Machines:
    """Predictions of one job on any number of any card."""

    def __init__(self, setup: PlanSetup, elsewhere: OtherHardware) -> None:
        self.setup, self.elsewhere = setup, elsewhere
        self._tried: dict[tuple[str, int, int], JobPredictions | None] = {}

    def cards(self) -> tuple[CardPlan, ...]:
        """Return every card: cheapest first, then those too slow, those without a price, and those that are too small."""
        found = [self._card(name) for name in gpu_table()]
        return tuple(sorted(found, key=_rank))

    def fewest_of_own(self) -> CardPlan | None:
        """Return the fewest of the setup's own card: any number within a machine, then whole machines."""
        name = self.setup.hardware.facts
        return None if name is None else dataclasses.replace(self._plan(name, _EXACT, every=False), best=None)

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
        hardware = dataclasses.replace(hardware, reserve_bytes=mine.reserve_bytes)
        if name == mine.facts:  # the setup's own card may be capped, or partly in use
            same = ("memory_bytes", "memory_cap_bytes", "taken_bytes", "rates")
            hardware = dataclasses.replace(hardware, **{field: getattr(mine, field) for field in same})
        return hardware

    def _card(self, name: str) -> CardPlan:
        whole = self.tried(name, PER_NODE, 1)
        hopeless = whole is not None and whole.fastest() is None  # fewer would not suffice either
        found = self._plan(name, _SIZES[-1:] if hopeless else _SIZES)
        return found if found.best else self._plan(name, _MORE)

    def _plan(self, name: str, sizes: Iterable[tuple[int, int]], *, every: bool = True) -> CardPlan:
        """Return the card's plan in machines of these sizes, in ascending order.

        Args:
            every: try the sizes after the first that holds everything, too.
        """
        fewest = fewest_offloading = None
        best: tuple[tuple[bool, float], JobPredictions, int] | None = None
        for one in self._sizes(name, sizes):
            fewest = fewest or self.outlook(one, one.fastest(offload=False))
            if fewest and not every:
                break
            place = one.fastest()
            fewest_offloading = fewest_offloading or fewest or self.outlook(one, place)
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
        """Return the setup's job on `gpus` of a card; None if the card lacks the precision, or the batch cannot be split."""
        job = self.setup.job
        if job.precision == "bf16" and not gpu_table()[name].bf16:
            if self.setup.precision_typed:
                return None
            job = dataclasses.replace(job, precision="fp16")
        key = name, gpus, nodes
        if key not in self._tried:
            self._tried[key] = self.elsewhere.on(self.of(*key), job)
        return self._tried[key]

    def _sizes(self, name: str, sizes: Iterable[tuple[int, int]]) -> Iterator[JobPredictions]:
        return (found for size in sizes if (found := self.tried(name, *size)))


def _rank(card: CardPlan) -> tuple[bool, bool, bool, float, str]:
    cost = card.best.usd if card.best else None
    long = card.best is not None and 3600 * card.best.hours > LONGEST_SECONDS
    return card.best is None, cost is None, long, cost or 0.0, card.gpu
