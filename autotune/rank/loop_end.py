"""Ends of a script's loop: what its conditions count, and how many optimizer steps that is."""

from __future__ import annotations

import ast
import functools
import itertools
import linecache
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_OF_LIBRARIES = ("site-packages", "dist-packages", str(Path(__file__).parents[1]))
_CALLED = {"len", "int", "min", "max", "abs"}  # functions that a condition may call without an effect


@dataclass(frozen=True)
class _Condition:
    """Comparison of a loop's counter with its limit."""

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
        while frame is not None:
            name = frame.f_code.co_filename
            if not any(part in name for part in _OF_LIBRARIES):
                for line, condition in _conditions(name, frame.f_lineno, frame.f_code.co_firstlineno):
                    counter, limit = _value(condition.counter, frame), _value(condition.limit, frame)
                    if counter is not None and limit is not None:
                        where = f"`{condition.text}` ({Path(name).name}:{line})"
                        self._seen.setdefault((where, condition.counter), []).append((counter, limit))
            frame = frame.f_back

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
def _loops(file: str) -> list[tuple[ast.For | ast.While, int]]:
    """Return the loops of a file, each with the first line of its function (decorators included); 0 outside of one."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return []
    found = []

    def visit(node: ast.AST, function: int) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.For | ast.While):
                found.append((child, function))
            inside = function
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                inside = min([child.lineno, *(one.lineno for one in child.decorator_list)])
            visit(child, inside)

    visit(tree, 0)
    return found


@functools.lru_cache
def _conditions(file: str, line: int, first_line: int) -> tuple[tuple[int, _Condition], ...]:
    """Return (line, condition) of each loop around a line of a function or module that begins at another line."""
    found = list[tuple[int, _Condition]]()
    for loop, function in _loops(file):
        if function in (first_line, 0) and loop.lineno <= line <= (loop.end_lineno or loop.lineno):
            found += _conditions_of(loop)
    return tuple(found)


def _conditions_of(loop: ast.For | ast.While) -> Iterator[tuple[int, _Condition]]:
    if isinstance(loop, ast.For) and _called(loop.iter) == "range" and isinstance(loop.target, ast.Name):
        arguments = loop.iter.args  # type: ignore[attr-defined]
        limit = ast.unparse(arguments[min(1, len(arguments) - 1)])
        text = f"for {loop.target.id} in {ast.unparse(loop.iter)}"
        yield loop.lineno, _Condition(loop.target.id, limit, text)
    tests = [loop.test] if isinstance(loop, ast.While) else []
    for node in ast.walk(loop):
        if isinstance(node, ast.If) and any(isinstance(one, ast.Break | ast.Return) for one in node.body):
            tests.append(node.test)
    for test in tests:
        for one in ast.walk(test):
            if isinstance(one, ast.Compare) and len(one.ops) == 1:
                left, right = ast.unparse(one.left), ast.unparse(one.comparators[0])
                for counter, limit in ((left, right), (right, left)):
                    yield one.lineno, _Condition(counter, limit, ast.unparse(one))


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
