"""Content of the page of `autotune plan --html`: predictions only."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from autotune.results.plan import Plan
from autotune.results.plan_view import show_comparison, show_plan
from autotune.results.report.data import Bars
from autotune.results.report.memory_bars import given_back, predicted_bar
from autotune.version import __version__

WIDTH = 100  # columns of the plan's text


@dataclass(frozen=True)
class Card:
    """Predictions for one kind of device, and its capacity."""

    machine: str
    capacity_bytes: int  # of one rank
    head: str  # one line
    best: tuple[dict[str, Any], ...]  # `results.plan.prediction_json` of each
    fits_though: str  # reason why the first of them fits if its peak is above the ceiling


@dataclass(frozen=True)
class PlanReport:
    """Full content of a plan's page."""

    model: str
    job: str
    machine: str
    cards: tuple[Card, ...]  # one, or several side by side
    memory: tuple[Bars, ...]  # fastest configs, each with the limits of its own card
    text: str  # the whole plan as in the terminal
    data: Any  # the output of `--json`
    version: str = __version__
    confidential: bool = False


def plan_report(plans: list[Plan]) -> PlanReport:
    """Build the content from one plan, or from several cards side by side."""
    first, several = plans[0], len(plans) > 1
    out = Console(file=io.StringIO(), width=WIDTH, color_system=None, legacy_windows=False)
    if several:
        show_comparison(plans, out)
    else:
        show_plan(first, out)
    assert isinstance(out.file, io.StringIO)
    return PlanReport(
        model=first.job.model.name,
        job=first.job.summary,
        machine=" | ".join(str(plan.hardware) for plan in plans),
        cards=tuple(_card(plan) for plan in plans),
        memory=tuple(bars for plan in plans for bars in _memory(plan, several)),
        text=out.file.getvalue().rstrip(),
        data=[plan.to_json() for plan in plans] if several else first.to_json(),
    )


def _card(plan: Plan) -> Card:
    head = str(plan.best[0].candidate) if plan.best else "Nothing of the space is predicted to fit."
    ceiling = plan.hardware.ceiling_bytes
    though = given_back(plan.best[0].peak_bytes, plan.best[0].needed_bytes, ceiling) if plan.best else ""
    return Card(str(plan.hardware), plan.hardware.capacity_bytes, head, tuple(plan.to_json()["best"]), though)


def _memory(plan: Plan, several: bool) -> list[Bars]:
    """Return the bars of the fastest configs; if several cards are compared, of the fastest alone."""
    return [
        Bars(
            plan.hardware.name if several else f"{at + 1}",
            str(one.candidate),
            (predicted_bar(one, plan.hardware),),
            (plan.hardware.capacity_bytes, plan.hardware.ceiling_bytes),
        )
        for at, one in enumerate(plan.best[: 1 if several else None])
    ]
