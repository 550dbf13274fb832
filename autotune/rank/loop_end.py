"""Ends of a script's loop: what its conditions count, and how many optimizer steps that is."""

from __future__ import annotations

import ast
import functools
import itertools
import linecache
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

_OF_LIBRARIES = ("site-packages", "dist-packages", str(Path(__file__).parents[1]))
_CALLED = {"len", "int", "min", "max", "abs"}  # functions that a condition may call without an effect


class _Condition(NamedTuple):
    """Comparison of a loop's counter with its limit."""

    loop: ast.For | ast.While
    line: int
    counter: str  # expression; a loop over a range has its variable
    limit: str
    text: str  # text of the user


class LoopEnds:
    """Values of the conditions that end the loops around each optimizer step.

    A `while` condition, a condition of a `break`, and a loop over a range compare a counter with a limit. The limit divided
    by the counter's rise in an optimizer step is the number of optimizer steps that the loop makes.
    """

    def __init__(self) -> None:
        # (counter, limit) of each step, by condition with its place, and by counter
        self._seen: dict[tuple[str, str], list[tuple[float, float]]] = {}

    def note(self, frame: types.FrameType | None) -> None:
        """Read the conditions of all loops in whose bodies this frame and its callers are."""
        now = dict[tuple[str, str], tuple[float, float]]()
        while frame is not None:
            name = frame.f_code.co_filename
            is_users = not any(part in name for part in _OF_LIBRARIES)
            for one in _conditions(name) if is_users else ():
                if one.loop.lineno <= frame.f_lineno <= (one.loop.end_lineno or 0):
                    counter, limit = _value(one.counter, frame), _value(one.limit, frame)
                    if counter is not None and limit is not None:
                        where = f"`{one.text}` ({Path(name).name}:{one.line})"
                        now[where, one.counter] = counter, limit
            frame = frame.f_back
        for condition, values in now.items():  # once, also within several loops
            self._seen.setdefault(condition, []).append(values)

    @property
    def optimizer_steps(self) -> dict[str, float]:
        """Optimizer steps until the limit, by condition whose counter rises evenly to a limit that stays."""
        found = {}
        for (where, _), values in self._seen.items():
            counters, limits = zip(*values, strict=True)
            rises = {now - before for before, now in itertools.pairwise(counters)}
            if len(rises) == len(set(limits)) == 1 and min(rises) > 0 and limits[0] > counters[-1]:
                found[where] = limits[0] / min(rises)
        return found


@functools.cache
def _conditions(file: str) -> list[_Condition]:
    """Return the conditions of all loops in a file."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return []
    return [one for loop in ast.walk(tree) if isinstance(loop, ast.For | ast.While) for one in _conditions_of(loop)]


def _conditions_of(loop: ast.For | ast.While) -> Iterator[_Condition]:
    if isinstance(loop, ast.For) and _called(loop.iter) == "range" and isinstance(loop.target, ast.Name):
        arguments = loop.iter.args  # type: ignore[attr-defined]
        limit = ast.unparse(arguments[min(1, len(arguments) - 1)])
        text = f"for {loop.target.id} in {ast.unparse(loop.iter)}"
        yield _Condition(loop, loop.lineno, loop.target.id, limit, text)
    tests = [loop.test] if isinstance(loop, ast.While) else []
    for node in ast.walk(loop):
        if isinstance(node, ast.If) and any(isinstance(one, ast.Break | ast.Return) for one in node.body):
            tests.append(node.test)
    for one in itertools.chain.from_iterable(map(ast.walk, tests)):
        if isinstance(one, ast.Compare) and len(one.ops) == 1:
            left, right = ast.unparse(one.left), ast.unparse(one.comparators[0])
            for counter, limit in ((left, right), (right, left)):
                yield _Condition(loop, one.lineno, counter, limit, ast.unparse(one))


def _called(node: ast.AST) -> str:
    """Return the name of the function that a node calls; empty for any other node."""
    return node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""


@functools.lru_cache
def _compiled(expression: str) -> types.CodeType | None:
    """Return the code of an expression that only reads; None for any other."""
    tree = ast.parse(expression, mode="eval")
    kinds = (ast.Name, ast.Attribute, ast.Constant, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.Load)
    for node in ast.walk(tree.body):
        if _called(node) not in _CALLED and not isinstance(node, kinds):
            return None
    return compile(tree, "<condition>", "eval")


def _value(expression: str, frame: types.FrameType) -> float | None:
    """Return the number that an expression has in a frame; None if it is none, or not known there."""
    code = _compiled(expression)
    if code is None:
        return None
    try:
        value: Any = eval(code, frame.f_globals, frame.f_locals)
    except Exception:  # attributes of the script's own classes
        return None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
