"""Traces of real engines of one CPU rank: what a script does between backward and step, beside the engine and around it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autotune.problem.training_trace import MOST_STEPS
from autotune.rank.hooks import deepspeed
from autotune.rank.training_trace import TraceRecorder
from tests.rank.hooks.conftest import make_context

ROWS, MICRO_BATCH, ACCUMULATION = 26, 2, 4


def traced(folder: str, stage: int, layer: Callable[[], Any], loop: Callable[..., None], **given: Any) -> Any:
    """Train a small model with a loop, and return the report of its trace."""
    import deepspeed as library
    import torch

    context, _ = make_context(folder)
    context.trace = TraceRecorder()
    deepspeed.install(context)
    deepspeed.install_optimizers(context)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), layer(), torch.nn.Linear(8, 1))
    config = {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": ACCUMULATION,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        **given,
    }
    model[0].requires_grad_(False)  # before the engine is made, like the base of LoRA
    trained = [one for one in model.parameters() if one.requires_grad]
    engine, *_ = library.initialize(model=model, optimizer=torch.optim.SGD(trained, lr=0.1), config=config)
    loop(engine, torch.utils.data.DataLoader(torch.randn(ROWS, 8), MICRO_BATCH))
    context.patches.close()
    return {
        **context.trace.report(),
        "changes_gradients": context.trace.changes_gradients,
        "unsynced": context.unsynced,
    }


def passes(engine: Any, loader: Any, after: Callable[[Any], None] = lambda engine: None) -> None:
    for _ in range(2):
        for x in loader:
            engine.backward(engine(x).square().mean())
            after(engine)
            engine.step()


def freezes_later(engine: Any, loader: Any) -> None:
    engine.module[2].bias.requires_grad_(False)
    passes(engine, loader)


def clip(limit: float, at_boundary: bool = False) -> Callable[[Any], None]:
    def after(engine: Any) -> None:
        from torch.nn.utils.clip_grad import clip_grad_norm_ as renamed

        if engine.is_gradient_accumulation_boundary() or not at_boundary:
            renamed(engine.module.parameters(), limit)

    return after


def scale(engine: Any) -> None:
    for one in engine.module.parameters():
        if one.grad is not None:
            one.grad.clamp_(-1e6, 1e6)


def clips_after_the_step(engine: Any, loader: Any) -> None:
    for x in [*loader, *loader]:
        engine.backward(engine(x).square().mean())
        engine.step()
        scale(engine)


def steps_beside(engine: Any, loader: Any) -> None:
    import torch

    centers = torch.nn.Parameter(torch.zeros(1))
    beside = torch.optim.SGD([centers], lr=0.1)
    for x in [*loader, *loader]:
        engine.backward((engine(x) - centers).square().mean())
        engine.step()
        beside.step()
        beside.zero_grad()


def sums_without_reduction(engine: Any, loader: Any) -> None:
    from contextlib import nullcontext

    for at, x in enumerate([*loader, *loader]):
        with engine.no_sync() if at % 2 else nullcontext():
            engine.backward(engine(x).square().mean())
        if at % 2 == 0:
            engine.step()


def counts_iterations(engine: Any, loader: Any) -> None:
    from torch.nn.utils import clip_grad_norm_

    iteration, most = 0, 48
    batches = iter([*loader, *loader, *loader, *loader])
    while iteration < most:
        engine.backward(engine(next(batches)).square().mean())
        engine.step()
        iteration += 1
        if engine.global_steps >= 12:
            break
    clip_grad_norm_(engine.module.parameters(), 1.0)  # after a step, with no effect


def scenarios(folder: str, stages: list[int]) -> dict[str, Any]:
    import torch

    found = {}
    for stage in stages:
        linear: Callable[[], Any] = torch.nn.Tanh
        loops: dict[str, tuple[Callable[[], Any], Callable[..., None]]] = {
            "plain": (linear, passes),
            "freezes later": (linear, freezes_later),
            "clips at the boundary": (linear, lambda e, data: passes(e, data, clip(1e6, at_boundary=True))),
            "asks for the norm": (linear, lambda e, data: passes(e, data, clip(float("inf")))),
        }
        if stage == 0:
            loops |= {
                "clips": (linear, lambda e, data: passes(e, data, clip(1e6))),
                "scales": (linear, lambda e, data: passes(e, data, scale)),
                "clips after the step": (linear, clips_after_the_step),
                "steps beside": (linear, steps_beside),
                "counts": (linear, counts_iterations),
                "batch norm": (lambda: torch.nn.BatchNorm1d(8), passes),
                "instance norm": (lambda: torch.nn.InstanceNorm1d(8), passes),
                "group norm": (lambda: torch.nn.GroupNorm(2, 8), passes),
                "weight norm": (lambda: torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(8, 8)), passes),
            }
        found |= {f"{name} at {stage}": traced(folder, stage, *one) for name, one in loops.items()}
    unsynced = traced(folder, 1, torch.nn.Tanh, sums_without_reduction, gradient_accumulation_steps=1)
    return {**found, "sums without reduction": unsynced}


@pytest.fixture
def found(in_rank: Callable[..., Any], tmp_path: Path) -> dict[str, Any]:
    return in_rank(scenarios, str(tmp_path), [0, 1, 2, 3])  # type: ignore[no-any-return]


def test_what_a_script_does_around_its_engine_is_in_the_trace(found: dict[str, Any]) -> None:
    """One rank for all, because it imports DeepSpeed for seconds."""
    for name, report in found.items():
        assert report["missing"] == "", name
        assert len(report["steps"]) == MOST_STEPS, name
    # Stage 3 refers to its optimizer from every parameter, also from those that were frozen before.
    assert {name for name, one in found.items() if one["holds_frozen"]} == {f"freezes later at {n}" for n in (1, 2, 3)}

    def per_step(count: str) -> dict[str, int]:
        return {name: max(step[count] for step in one["steps"]) for name, one in found.items()}

    changed = {"clips at 0", "scales at 0"}
    changes = per_step("changed_by_hand")
    assert {name for name, count in changes.items() if count == ACCUMULATION} == changed
    assert changes["clips at the boundary at 0"] == 1
    assert changes["clips after the step at 0"] == ACCUMULATION - 1, "after the last one there is no gradient"
    at_zero = {"clips at the boundary at 0", "clips after the step at 0"}
    assert {name for name, count in changes.items() if count} == changed | at_zero
    clips = {name: one["clips_at"] for name, one in found.items() if one["clips_at"]}
    at_boundaries = {f"clips at the boundary at {n}" for n in range(4)}
    assert clips == dict.fromkeys(at_boundaries | changed - {"scales at 0"}, 1e6)
    assert {name for name, one in found.items() if one["changes_gradients"]} >= at_boundaries | changed
    assert not found["plain at 0"]["changes_gradients"]

    outside = per_step("outside_steps")
    assert {name for name, count in outside.items() if count} == {"steps beside at 0"}
    assert outside["steps beside at 0"] == ACCUMULATION

    moving = {name for name, one in found.items() if any(step["buffers"][0] for step in one["steps"])}
    assert moving == {"batch norm at 0"}

    assert found["plain at 3"]["epoch_steps"] == ROWS / MICRO_BATCH / ACCUMULATION
    assert {name for name, one in found.items() if one["unsynced"]} == {"sums without reduction"}
    ends = found["counts at 0"]["loop_ends"]
    assert {where.partition("` (")[0]: steps for where, steps in ends.items()} == {
        "`iteration < most": 12.0,
        "`engine.global_steps >= 12": 12.0,
    }
    assert found["plain at 0"]["loop_ends"] == {}
