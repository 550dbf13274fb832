"""Variables of the environment: those that a script's own code reads in its probe run, and those that carry a candidate."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from autotune.masking import MASK, names_secret
from autotune.problem.candidate import Value
from autotune.rank.hooks.base import Context, VariableRead
from autotune.rank.patches import Call
from autotune.script.carriers import settings
from autotune.script.environment import VARIABLE


def install(context: Context) -> None:
    """Set the variables of a candidate. In a probe run, record every variable that is read."""
    carried: dict[str, Value] = {**context.script.profile.tried_values}
    if context.candidate is not None:
        carried |= settings(context.script, context.candidate)
    for flag, value in carried.items():
        if flag.startswith(VARIABLE):
            context.patches.set_environment(flag.removeprefix(VARIABLE), str(value))
    if context.script.profile.is_known or not context.quiet:
        return
    kind, given = type(os.environ), dict(os.environ)

    def note(name: Any, value: Any) -> Any:
        """Record the value before the script ran, and the value that a read gave, or a default."""
        if isinstance(name, str):
            before = given.get(name)
            if before and names_secret(name):
                before = MASK
            known = context.variables.setdefault(name, VariableRead(before))
            known.text = known.text if value is None else str(value)
        return value

    def read(call: Call) -> Any:
        name = call.given["key"]
        note(name, None)
        return note(name, call())

    context.patches.wrap(kind, "__getitem__", read)
    context.patches.wrap(kind, "get", read)


def _quoted(path: Path) -> str:
    """Return the texts of a Python file, one a line, or all of another file: an identifier names no variable."""
    text = path.read_text(encoding="utf-8", errors="replace")
    if path.suffix != ".py":
        return text
    with suppress(SyntaxError, ValueError):
        nodes = ast.walk(ast.parse(text))
        return "\n".join(node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return text


def found(context: Context, files: Iterable[str]) -> tuple[dict[str, str | None], dict[str, int]]:
    """Return the values of the variables that were read and that the user's files quote, and the positive integers among them.

    A library may read a variable for the user's code (environs, click, OmegaConf's `oc.env`), or others that no file quotes. A
    value is None if the variable was not set before the script ran; its integer is then the one that the code used, a default
    or one of a `.env` file.
    """
    words = set[str]()
    for path in files:
        with suppress(OSError):
            words.update(re.findall(r"\w+", _quoted(Path(context.script.cwd, path))))
    values, integers = dict[str, str | None](), dict[str, int]()
    for name, read in context.variables.items():
        if name in words:
            values[name] = read.value
            if read.text.isdecimal() and int(read.text) > 0:
                integers[f"{VARIABLE}{name}"] = int(read.text)
    return values, integers
