"""Ends of loops, read from the frames in which an optimizer steps."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from autotune.problem.training_trace import MOST_STEPS
from autotune.rank.loop_end import LoopEnds


class Traced(Exception):
    """Enough steps were traced."""


class Training:
    """Engine with four micro-batches in an optimizer step, whose conditions are read after each."""

    def __init__(self, accumulation: int = 4) -> None:
        self.ends, self.accumulation, self.micro_steps = LoopEnds(), accumulation, 0

    @property
    def global_steps(self) -> int:
        return self.micro_steps // self.accumulation

    def step(self) -> None:
        self.micro_steps += 1
        if self.micro_steps % self.accumulation == 0:
            self.ends.note(sys._getframe(1))
        if self.global_steps == MOST_STEPS:
            raise Traced


def over_range(engine: Training, args: Any) -> None:
    for _iteration in range(2, args.iterations):
        engine.step()


def of_loader(engine: Training, args: Any) -> None:
    for epoch in range(100):
        for at, _ in enumerate(args.loader):
            if epoch * len(args.loader) + at >= 100 * len(args.loader):
                return
            engine.step()


def until_break(engine: Training, args: Any) -> None:
    step = 0
    while True:
        step += 1
        if step % 2 == 3:
            break
        if step > args.iterations or args.stop():
            break
        one_pass(engine)


def one_pass(engine: Training) -> None:
    engine.step()


def of_optimizer_steps(engine: Training, args: Any) -> None:
    while engine.global_steps < args.iterations // 4:
        for _ in range(engine.accumulation):
            engine.step()


def by_time(engine: Training, args: Any) -> None:
    loss, best = 3.0, 0.0
    while args.clock() < 1 or loss > best:
        loss -= 0.01
        engine.step()
        if engine.micro_steps == 48 or args.stop():
            return


ARGS = SimpleNamespace(iterations=48, loader=range(24), stop=lambda: False, clock=lambda: 0.0)


@pytest.mark.parametrize(
    ("loop", "found"),
    [
        (over_range, {"`for _iteration in range(2, args.iterations)`": 12}),
        (of_loader, {"`epoch * len(args.loader) + at >= 100 * len(args.loader)`": 600}),
        (of_optimizer_steps, {"`engine.global_steps < args.iterations // 4`": 12}),
        (by_time, {"`engine.micro_steps == 48`": 12}),
    ],
)
def test_a_condition_tells_after_how_many_optimizer_steps_a_loop_ends(loop: Any, found: dict[str, int]) -> None:
    engine = Training()
    with pytest.raises(Traced):
        loop(engine, ARGS)
    steps = {
        where.partition(" (test_loop_end.py:")[0]: round(number)
        for where, number in engine.ends.optimizer_steps.items()
    }
    assert steps == found


def test_a_break_of_a_caller_is_read_and_its_steps_grow_with_the_accumulation() -> None:
    for accumulation in (2, 3):
        engine = Training(accumulation)
        with pytest.raises(Traced):
            until_break(engine, SimpleNamespace(iterations=60, stop=lambda: False))
        assert {where.partition(" (")[0] for where in engine.ends.optimizer_steps} == {"`step > args.iterations`"}
        assert list(engine.ends.optimizer_steps.values()) == [60 / accumulation]
