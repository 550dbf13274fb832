"""Text is read and written as UTF-8, whatever the locale: every call of the package that opens text says so."""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.sources import tree_of

ROOT = Path(__file__).parents[1]
_TEXT = {"read_text": 0, "write_text": 1}  # methods of Path, and the place of their encoding
_OPENING = {"open": 1, "fdopen": 1}  # and of their mode, for functions; methods have it one place earlier
_RUNNING = {"run", "Popen", "check_output", "check_call", "NamedTemporaryFile"}
_ELSEWHERE = {"tarfile", "gzip", "webbrowser", "os", "zipfile"}  # their `open` opens no text, or says so by its mode


def without_encoding(tree: ast.Module) -> Iterator[ast.Call]:
    """Yield every call that leaves the encoding of a text to the locale."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or any(one.arg in ("encoding", None) for one in node.keywords):
            continue
        function = node.func
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        words = {one.arg: one.value for one in node.keywords}
        owner = (
            function.value.id if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name) else ""
        )
        if name in _TEXT and isinstance(function, ast.Attribute):
            if len(node.args) <= _TEXT[name]:
                yield node
        elif name in _OPENING and (name == "fdopen" or owner not in _ELSEWHERE):
            at = 1 if name == "fdopen" or isinstance(function, ast.Name) else 0
            mode = words.get("mode", node.args[at] if len(node.args) > at else None)
            if mode is None and isinstance(function, ast.Attribute):
                if not node.args and not node.keywords and owner not in ("path", "file", "log", "entry"):
                    continue  # a method of ours
                if len(node.args) > 0 or node.keywords:
                    continue
            if not isinstance(mode, ast.Constant) or not isinstance(mode.value, str):
                if mode is not None:
                    continue  # a variable, or an argument of a method of ours
                yield node
            elif "b" not in mode.value and set(mode.value) <= set("rwax+t"):
                yield node
        elif name in _RUNNING and any(word in words for word in ("text", "universal_newlines")):
            yield node


def test_no_text_depends_on_the_locale() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{call.lineno}"
        for path in sorted((ROOT / "autotune").rglob("*.py"))
        for call in without_encoding(tree_of(path))
    ]
    assert found == [], 'give these encoding="utf-8"'
