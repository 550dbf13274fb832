"""`autotune plan`: configs that fit and their speed, without running anything."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from autotune.commands.plan_gains import gains
from autotune.commands.plan_machines import Machines
from autotune.commands.python import NAMED_MODEL, ranks_python
from autotune.commands.request import Request, plan_setups
from autotune.commands.setup import PlanSetup
from autotune.errors import UserError
from autotune.predict.elsewhere import PLENTY, Elsewhere, host_bytes_per_node
from autotune.predict.known_error import known_errors
from autotune.predict.passes import Trace
from autotune.predict.predictor import Prediction, Predictor, Table
from autotune.predict.traced import traced_predictor
from autotune.problem.candidate import CHECKPOINTING, Candidate
from autotune.problem.hardware import gpu_table
from autotune.results.plan import HostNeed, Plan, StagePlan
from autotune.results.plan_view import token_speed
from autotune.units import GIB, format_bytes


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
        "; ".join([*left_out, *predictor.notes()]),
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
