"""Editing values in the text of a YAML or JSON file: other lines, their order and comments stay unchanged."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import yaml

from autotune.errors import UserError
from autotune.problem.argument_files import Place


class _Loader(yaml.SafeLoader):
    """Loader that knows only YAML's own tags: a value with another tag is read as plain data."""


def _untagged(loader: _Loader, suffix: str, node: yaml.Node) -> Any:
    if isinstance(node, yaml.MappingNode):
        return loader.construct_mapping(node, deep=True)
    if isinstance(node, yaml.SequenceNode):
        return loader.construct_sequence(node, deep=True)
    return node.value


_Loader.add_multi_constructor("", _untagged)


def parsed(text: str, name: str) -> Any:
    """Parse the file's data.

    Args:
        name: the file's, for the error.

    Raises:
        UserError: the text is neither YAML nor JSON; the message has the line.
    """
    try:
        return yaml.load(text, _Loader)  # a SafeLoader
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        line = f":{min(mark.line, text.rstrip().count(chr(10))) + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
        what = "JSON" if name.endswith(".json") else "YAML"
        raise UserError(f"{name}{line}: not {what} ({problem})") from None


def edited(text: str, changes: Mapping[Place, Any], *, is_json: bool = False) -> str:
    """Return the text with the value at each place changed or added; None removes the place.

    If the text cannot be changed in place (an alias, a merged key), it is dumped again without its comments.
    """
    for place, value in changes.items():
        data = yaml.load(text, _Loader)
        expected = _changed(data if isinstance(data, dict) else {}, place, value)
        if expected == data:
            continue
        try:
            found = _edit(text, place, value, is_json)
            same = yaml.load(found, _Loader) == expected
        except (yaml.YAMLError, LookupError):
            same = False
        if not same:
            found = json.dumps(expected, indent=2) + "\n" if is_json else yaml.safe_dump(expected, sort_keys=False)
        text = found
    return text


def _changed(data: dict[str, Any], place: Place, value: Any) -> dict[str, Any]:
    first, rest = place[0], place[1:]
    if not rest and value is None:
        return {key: known for key, known in data.items() if key != first}
    if not rest:
        return {**data, first: value}
    below = data.get(first)
    return {**data, first: _changed(below if isinstance(below, dict) else {}, rest, value)}


def _edit(text: str, place: Place, value: Any, is_json: bool) -> str:
    node: Any = yaml.compose(text, yaml.SafeLoader)
    for above, key in enumerate(place[:-1]):
        below = next((below for name, below in node.value if name.value == key), None)
        if below is None:  # the parent is missing, too
            return _edit(text, place[: above + 1], _changed({}, place[above + 1 :], value), is_json)
        node = below
    key = place[-1]
    if not isinstance(node, yaml.MappingNode):
        raise LookupError(place)
    pairs: list[tuple[yaml.Node, yaml.Node]] = node.value
    found = next((pair for pair in pairs if pair[0].value == key), None)
    flow = bool(node.flow_style)
    if found is None:
        return _added(text, node, key, value, is_json)
    name, old = found
    if value is None:
        if flow:
            raise LookupError(place)
        start, end = text.rindex("\n", 0, name.start_mark.index) + 1 if name.start_mark.line else 0, _end(text, old)
        line_end = text.find("\n", end)
        return text[:start] + (text[line_end + 1 :] if line_end >= 0 else "")
    start = old.start_mark.index
    space = " " if text[start - 1 : start] == ":" else ""
    return text[:start] + space + _scalar(value, flow or is_json) + text[_end(text, old) :]


def _added(text: str, node: yaml.MappingNode, key: str, value: Any, is_json: bool) -> str:
    flow = bool(node.flow_style)
    name = json.dumps(key) if flow else key
    line = f"{name}: {_scalar(value, flow or is_json)}"
    if not node.value:
        start, end = node.start_mark.index, node.end_mark.index
        return text[:start] + "{" + line + "}" + text[end:]
    last_name, last = node.value[-1]
    end = _end(text, last)
    if flow:
        before = node.value[-2][0].start_mark.line if len(node.value) > 1 else node.start_mark.line
        apart = f",\n{' ' * last_name.start_mark.column}" if last_name.start_mark.line > before else ", "
        return text[:end] + apart + line + text[end:]
    line_end = text.find("\n", end)
    head, tail = (text, "") if line_end < 0 else (text[: line_end + 1], text[line_end + 1 :])
    if not head.endswith("\n"):
        head += "\n"
    return f"{head}{' ' * last_name.start_mark.column}{line}\n{tail}"


def _end(text: str, node: yaml.Node) -> int:
    """Return the index at which a value's text ends. YAML's end marks of blocks reach to the next value."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _end(text, last[1] if isinstance(last, tuple) else last)
    end: int = node.end_mark.index
    return end if end <= node.start_mark.index else len(text[:end].rstrip("\n"))


def _scalar(value: Any, quoted: bool) -> str:
    written = json.dumps(value, ensure_ascii=False)
    if quoted or not isinstance(value, str):
        return written
    try:
        plain = yaml.safe_load(f"key: {value}") == {"key": value}
    except yaml.YAMLError:
        plain = False
    return value if plain else written
