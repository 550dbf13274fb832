"""`autotune plan`: what fits and how fast it would be, without running anything."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from autotune.errors import UserError
from autotune.predict.predictor import Prediction, Predictor
from autotune.problem.candidate import CHECKPOINTING, Candidate
from autotune.problem.hardware import Hardware, gpu_table
from autotune.problem.job import Job
from autotune.problem.space import SearchSpace
from autotune.units import GIB, format_bytes, format_count

_COLOURS = {
    "parameters": "blue",
    "gradients": "cyan",
    "optimizer": "green",
    "activations": "yellow",
    "buckets": "magenta",
    "gathered parameters": "bright_blue",
    "temporaries": "bright_magenta",
    "allocator": "bright_black",
    "context and communication": "red",
    "host": "white",
}
BAR = 48  # characters for a device's whole memory


@dataclass(frozen=True)
class StagePlan:
    """The largest micro-batch of one ZeRO stage that fits, and what would let the next one fit."""

    stage: int
    fitting: Prediction | None  # None: not even one sequence fits
    smallest: Prediction  # at micro-batch 1
    unlocks: list[str]


@dataclass(frozen=True)
class Plan:
    job: Job
    hardware: Hardware
    best: list[Prediction]
    stages: list[StagePlan]
    note: str

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.job.model.name,
            "gpu": self.hardware.name,
            "gpus": self.hardware.count,
            "seq_len": self.job.seq_len,
            "precision": self.job.precision,
            "global_batch_size": self.job.global_batch_size,
            "capacity_bytes": self.hardware.capacity_bytes,
            "best": [prediction_json(one, self.job) for one in self.best],
            "stages": [
                {
                    "stage": one.stage,
                    "largest_micro_batch": one.fitting.candidate.micro_batch if one.fitting else None,
                    "prediction": prediction_json(one.fitting or one.smallest, self.job),
                    "unlocks": one.unlocks,
                }
                for one in self.stages
            ],
            "note": self.note,
        }


def prediction_json(one: Prediction, job: Job) -> dict[str, Any]:
    """A Prediction for people's scripts; bytes, seconds and samples a second."""
    return {
        "candidate": one.candidate.as_dict,
        "ds_config": one.candidate.ds_config(job),
        "fits": one.fits,
        "peak_bytes": round(one.peak_bytes),
        "peak_interval": [round(v) for v in one.peak_interval],
        "memory": {name: round(value) for name, value in one.memory.items()},
        "moment": one.moment,
        "host_bytes_per_rank": round(one.host_bytes),
        "step_seconds": one.step_seconds,
        "step_interval": list(one.step_interval),
        "time": one.time,
        "samples_per_second": one.samples_per_second,
        "tokens_per_second": one.samples_per_second * job.tokens_per_sample,
        "binding": one.binding,
    }


def make_plan(job: Job, hardware: Hardware, space: SearchSpace, predictor: Predictor, top: int = 5) -> Plan:
    """Predicts every candidate of the space and sums up what people ask.

    Raises:
        UserError: the space has no candidate for the job.
    """
    candidates = space.candidates(job)
    table = predictor.table(candidates)
    fits = predictor.fits(table)
    order = sorted((i for i in range(len(candidates)) if fits[i]), key=lambda i: -table.samples[i])
    chosen: dict[tuple[Any, ...], int] = {}
    for i in order:
        c = candidates[i]
        chosen.setdefault((c.stage, c.checkpointing, c.offload_optimizer, c.offload_param, c.micro_batch), i)
        if len(chosen) == top:
            break
    best = predictor.predict_many([candidates[i] for i in chosen.values()]) if chosen else []
    stages = [
        _stage_plan(stage, job, hardware, space, predictor, candidates)
        for stage in sorted({c.stage for c in candidates})
    ]
    return Plan(job, hardware, best, stages, "" if predictor.trace.exact else predictor.trace.note)


def _stage_plan(
    stage: int, job: Job, hardware: Hardware, space: SearchSpace, predictor: Predictor, candidates: list[Candidate]
) -> StagePlan:
    mine = [c for c in candidates if c.stage == stage]
    # the lightest treatment that the space has: neither checkpointing nor offload, defaults elsewhere
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
    fitting = [one for one in predictions if one.fits]
    largest = max(fitting, key=lambda one: (one.candidate.micro_batch, one.samples_per_second), default=None)
    wanted = next(
        (
            one
            for one in predictions
            if not one.fits and (largest is None or one.candidate.micro_batch > largest.candidate.micro_batch)
        ),
        None,
    )
    unlocks = _unlocks(wanted, job, hardware, space, predictor) if wanted is not None else []
    return StagePlan(stage, largest, predictions[0], unlocks)


def _unlocks(wanted: Prediction, job: Job, hardware: Hardware, space: SearchSpace, predictor: Predictor) -> list[str]:
    """Single changes with which a candidate that does not fit would."""
    candidate, found = wanted.candidate, []

    def turned(name: str, value: bool | str) -> Candidate | None:
        knob = space.knobs.get(name)
        return candidate.but(**{name: value}) if knob and value in knob.values else None

    changes = [
        ("activation checkpointing", turned(CHECKPOINTING, True)),
        ("optimizer offload to the CPU", turned("offload_optimizer", "cpu")),
        ("parameter offload to the CPU", turned("offload_param", "cpu")),
    ]
    for what, changed in changes:
        if changed is not None and changed != candidate:
            one = predictor.predict(changed)
            if one.fits:
                found.append(f"{what} ({_speed(one, job)})")
    if job.global_batch_size is None:
        more = dataclasses.replace(job, ranks=job.ranks + 1)
        grown = dataclasses.replace(hardware, count=hardware.count + 1)
        if Predictor(more, grown, predictor.trace).predict(candidate).fits:
            found.append("one more GPU")
    missing = wanted.peak_bytes - hardware.ceiling_bytes
    if hardware.device == "cuda" and missing > 0:
        needed = wanted.peak_bytes / (1 - hardware.headroom) / GIB
        larger = [g for g in gpu_table().values() if g.memory_gib >= needed]
        if larger:
            card = min(larger, key=lambda g: g.memory_gib)
            found.append(f"a card of {needed:.0f} GiB or more, like {card.name}")
    return [f"micro-batch {candidate.micro_batch} would fit with {what}" for what in found] or [
        f"micro-batch {candidate.micro_batch} is short of {format_bytes(missing)}; no single change is enough"
    ]


def _speed(one: Prediction, job: Job) -> str:
    return f"{format_count(one.samples_per_second * job.tokens_per_sample).strip()} tokens/s"


# -- showing it ----------------------------------------------------------------------------------------------------------


def show_plan(plan: Plan, out: Console) -> None:
    job, hardware = plan.job, plan.hardware
    out.print(f"{job.summary}, on {hardware}", markup=False, highlight=False, soft_wrap=True)
    if plan.note:
        out.print(plan.note, style="yellow", markup=False, soft_wrap=True)
    if not plan.best:
        out.print("nothing of the space is predicted to fit", style="yellow")
    else:
        table = Table(title="best predicted", title_justify="left")
        for name in ("config", "tokens/s", "step", "peak GiB", "limited by"):
            table.add_column(name, overflow="fold")
        for one in plan.best:
            low, high = one.peak_interval
            spread = 100 * (one.step_interval[1] / one.step_seconds - 1)
            table.add_row(
                str(one.candidate),
                format_count(one.samples_per_second * job.tokens_per_sample).strip(),
                f"{one.step_seconds:.3g} s ±{spread:.0f} %",
                f"{one.peak_bytes / GIB:.1f} ({low / GIB:.1f} to {high / GIB:.1f})",
                one.binding,
            )
        out.print(table)
    out.print(f"largest micro-batch by stage; the bar is the {format_bytes(hardware.capacity_bytes)} of a device")
    for stage in plan.stages:
        one = stage.fitting or stage.smallest
        what = f"mb {one.candidate.micro_batch}" if stage.fitting else "mb 1 does not fit"
        line = Text(f"  ZeRO {stage.stage}  {what:<18}")
        line.append(bar(one, hardware))
        line.append(f"  {one.peak_bytes / GIB:.1f} GiB, {_speed(one, job)}")
        out.print(line, soft_wrap=True)
        for unlock in stage.unlocks:
            out.print(f"          {unlock}", style="dim", markup=False, highlight=False, soft_wrap=True)
    legend = Text("  ")
    for name, colour in _COLOURS.items():
        if any((s.fitting or s.smallest).memory.get(name, 0) > 0.005 * hardware.capacity_bytes for s in plan.stages):
            legend.append("█", style=colour)
            legend.append(f" {name}  ")
    out.print(legend, soft_wrap=True)


def bar(one: Prediction, hardware: Hardware) -> Text:
    """The memory of a prediction by what it holds, scaled to the device; what is over it is marked."""
    text, drawn, total = Text(), 0, 0.0
    for name, size in one.memory.items():
        total += max(0.0, size)
        upto = min(BAR + 6, round(BAR * total / hardware.capacity_bytes))
        text.append("█" * max(0, upto - drawn), style=_COLOURS[name])
        drawn = max(drawn, upto)
    if drawn < BAR:
        text.append("·" * (BAR - drawn), style="dim")
    return text


def show_comparison(plans: list[Plan], out: Console) -> None:
    """Several GPUs side by side, the fastest config of each."""
    table = Table(title="best predicted on each", title_justify="left")
    for name in ("gpu", "config", "tokens/s", "a GPU", "peak GiB", "limited by"):
        table.add_column(name, overflow="fold")
    for plan in plans:
        if not plan.best:
            table.add_row(str(plan.hardware), "nothing fits", "", "", "", "device memory")
            continue
        one = plan.best[0]
        tokens = one.samples_per_second * plan.job.tokens_per_sample
        table.add_row(
            str(plan.hardware),
            str(one.candidate),
            format_count(tokens).strip(),
            format_count(tokens / plan.job.ranks).strip(),
            f"{one.peak_bytes / GIB:.1f}",
            one.binding,
        )
    out.print(table)


def check_gpus(gpus: int) -> int:
    """A number of GPUs that a plan can be made for.

    Raises:
        UserError: it is not between 1 and 100,000.
    """
    if not 1 <= gpus <= 100_000:
        raise UserError(f"--gpus {gpus}: expected between 1 and 100000")
    return gpus
