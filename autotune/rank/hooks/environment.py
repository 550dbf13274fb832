"""Variables of the environment: those that a script's own code reads in its probe run, and those that carry a candidate."""

from __future__ import annotations

import ast
import inspect
import os
import re
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from autotune.masking import MASK, names_secret
from autotune.problem.candidate import Value
from autotune.rank.hooks import source_files
from autotune.rank.hooks.base import Context, VariableRead
from autotune.rank.patches import Patches
from autotune.script.environment import VARIABLE
from autotune.script.script import settings

# files of the functions between a read and `os.environ`: `os.getenv`, `in`, and the hooks themselves
_BETWEEN = {code.co_filename for code in (os.getenv.__code__, Mapping.get.__code__, Patches.wrap.__code__)} | {__file__}


def install(context: Context) -> None:
    """Set the variables of a candidate. In a probe run, record every variable that is read by its name, and by which files."""
    carried: dict[str, Value] = {**context.script.profile.tried_values}
    if context.candidate is not None:
        carried |= settings(context.script, context.candidate)
    for flag, value in carried.items():
        if flag.startswith(VARIABLE):
            context.patches.set_environment(flag.removeprefix(VARIABLE), str(value))
    if context.script.profile.is_known or not context.quiet:
        return
    kind, given, signature = type(os.environ), dict(os.environ), inspect.signature(Mapping.get)
    iterated = deque[str]()  # a copy of the whole environment reads all names, in the order of an iteration

    def iterate(original: Callable[..., Any], environ: Any, /) -> Iterator[str]:
        iterated.clear()
        for name in original(environ):
            iterated.append(name)
            yield name

    def getitem(original: Callable[..., Any], environ: Any, name: Any, /) -> Any:
        if iterated and iterated[0] == name:
            iterated.popleft()
            return original(environ, name)
        iterated.clear()
        value = None
        try:
            value = original(environ, name)
            return value
        finally:
            _note(context, given, name, value)

    def get(original: Callable[..., Any], environ: Any, /, *args: Any, **kwargs: Any) -> Any:
        value = original(environ, *args, **kwargs)
        _note(context, given, signature.bind(environ, *args, **kwargs).arguments["key"], value)
        return value

    for name, around in (("__iter__", iterate), ("__getitem__", getitem), ("get", get)):
        context.patches.wrap(kind, name, around)


def _note(context: Context, given: Mapping[str, str], name: Any, value: Any) -> None:
    """Record a read: the file whose code made it, the value before the script ran, and the value that it gave, or a default."""
    if not isinstance(name, str):
        return
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename in _BETWEEN:
        frame = frame.f_back
    before = given.get(name)
    if before and names_secret(name):
        before = MASK
    read = context.variables.setdefault(name, VariableRead(before))
    if frame is not None:
        read.files.add(frame.f_code.co_filename)
    if value is not None:
        read.text = str(value)


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
    """Return the values of the variables that the user's files read, and the positive integers among them.

    A library may read a variable for the user's code (environs, click, OmegaConf's `oc.env`). Then one of the user's files
    quotes its name. A value is None if the variable was not set before the script ran; its integer is then the one that the code
    used, a default or one of a `.env` file.
    """
    files = source_files.found(context)
    own = {os.path.abspath(Path(context.script.cwd, path)) for path in files}
    words = set[str]()
    for path in own:
        with suppress(OSError):
            words.update(re.findall(r"\w+", _quoted(Path(path))))
    values, integers = dict[str, str | None](), dict[str, int]()
    for name, read in context.variables.items():
        readers = {source_files.users_path(context, path) for path in read.files}
        if name not in words and own.isdisjoint(readers):
            continue
        values[name] = read.value
        if read.text.isdecimal() and int(read.text) > 0:
            integers[f"{VARIABLE}{name}"] = int(read.text)
    return values, integers
