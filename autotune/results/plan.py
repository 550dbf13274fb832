"""A plan, for people and for programs: what is predicted to fit, how fast it would be, and what would unlock more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from autotune.predict.predictor import Prediction
from autotune.problem.hardware import Hardware
from autotune.problem.job import Job
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
    """What is predicted for one job on one machine; `best` is fastest first."""

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
    """A Prediction for programs; bytes, seconds and samples a second."""
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


def show_plan(plan: Plan, out: Console) -> None:
    """Prints one plan: the best configs, then by ZeRO stage the memory of the largest micro-batch as a bar."""
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
        line.append(f"  {one.peak_bytes / GIB:.1f} GiB, {token_speed(one, job)}")
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


def token_speed(one: Prediction, job: Job) -> str:
    """`12.3k tokens/s`, over all ranks."""
    return f"{format_count(one.samples_per_second * job.tokens_per_sample).strip()} tokens/s"
