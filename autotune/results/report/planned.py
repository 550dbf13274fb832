"""What the page of `autotune plan --html` says: a prediction, nothing of which was measured."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from autotune.results.plan import Plan
from autotune.results.plan_view import show_comparison, show_plan
from autotune.results.report.data import Bar, Bars
from autotune.version import __version__

WIDTH = 100  # columns of the plan's text


@dataclass(frozen=True)
class PlanReport:
    """Everything that the page of a plan says."""

    model: str
    job: str
    machine: str
    capacity_bytes: int
    ceiling_bytes: int
    head: str  # one line
    memory: tuple[Bars, ...]  # of the fastest configs
    best: tuple[dict[str, Any], ...]  # `results.plan.prediction_json` of each
    text: str  # the whole plan, as the terminal has it
    data: Any  # as `--json` says it
    version: str = __version__
    confidential: bool = False


def plan_report(plans: list[Plan]) -> PlanReport:
    """Of one plan, or of several cards side by side."""
    first = plans[0]
    out = Console(file=io.StringIO(), width=WIDTH, color_system=None, legacy_windows=False)
    if len(plans) > 1:
        show_comparison(plans, out)
    else:
        show_plan(first, out)
    assert isinstance(out.file, io.StringIO)
    data = first.to_json() if len(plans) == 1 else [plan.to_json() for plan in plans]
    memory = [
        Bars(
            plan.hardware.name if len(plans) > 1 else f"{at + 1}",
            str(one.candidate),
            (Bar("predicted", tuple((n, s) for n, s in one.memory.items() if s > 0), f"highest in {one.moment}"),),
        )
        for plan in plans
        for at, one in enumerate(plan.best[: 1 if len(plans) > 1 else None])
    ]
    return PlanReport(
        model=first.job.model.name,
        job=first.job.summary,
        machine=" | ".join(str(plan.hardware) for plan in plans),
        capacity_bytes=max(plan.hardware.capacity_bytes for plan in plans),
        ceiling_bytes=max(plan.hardware.ceiling_bytes for plan in plans),
        head=str(first.best[0].candidate) if first.best else "Nothing of the space is predicted to fit.",
        memory=tuple(memory),
        best=tuple(first.to_json()["best"]),
        text=out.file.getvalue().rstrip(),
        data=data,
    )
