"""Per-trial copies of argument files."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from autotune.errors import UserError
from autotune.problem.candidate import Candidate
from autotune.problem.ds_config import MOST_BYTES, read_config
from autotune.problem.job import ArgumentFile, Job, Script
from autotune.script.argument_files import (
    OUTPUT,
    OUTPUT_FOLDER,
    Place,
    changes_for,
    copies_folder,
    find,
    is_ds_config,
    launcher_changes,
    launcher_file,
    own_config,
    own_files,
    telling,
    value_at,
    winners_copy,
)
from autotune.script.profile import over_present

# -- argument texts ----------------------------------------------------------------------------------------------------
#
# Texts of argument files: finding them in a command, reading them, and writing copies with a candidate's values.

SUFFIXES = (".yaml", ".yml", ".json")


def argument_files(argv: Sequence[str], cwd: Path, *, named: Sequence[str] = ()) -> tuple[ArgumentFile, ...]:
    """Return the argument files that the command names, with the indices of the words that name them.

    Args:
        named: dotted names that the user has declared as knobs.

    Raises:
        UserError: a word that can only name an argument file names one that does not parse.
    """
    found = []
    for index, path in _mentioned(argv, cwd):
        file = read_file(path, index, strict=_surely(argv, index, path))
        if file is None:
            continue
        told = any(value_at(file.data, tuple(name.split("."))) is not None for name in named)
        if told or telling(file.data):
            found.append(file)
    return tuple(found)


def read_file(path: Path, index: int, *, strict: bool, launcher: bool = False) -> ArgumentFile | None:
    """Return the file, or None if it cannot be read or holds no mapping.

    Args:
        strict: treat an unreadable file as the user's mistake.

    Raises:
        UserError: the file cannot be read and `strict` is set, or a YAML file does not parse.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        if strict and not isinstance(error, UnicodeDecodeError):
            raise UserError(f"{path} cannot be read: {error.strerror}") from None
        return None
    try:
        data = json.loads(text) if path.suffix == ".json" else parsed(text, _shown(path))
    except json.JSONDecodeError as error:
        if strict and not _are_lines(text):
            raise UserError(f"{_shown(path)}:{error.lineno}: not JSON ({error.msg})") from None
        return None
    except UserError:
        if strict or path.suffix != ".json":
            raise
        return None
    if not isinstance(data, dict):
        return None
    try:
        plain = json.loads(json.dumps(data, default=str))
    except (TypeError, ValueError):  # keys that are dates; a training has no such arguments
        return None
    return ArgumentFile(index, str(path), text, plain, launcher)


def write_trial_files(job: Job, candidate: Candidate | None, folder: Path, *, quiet: bool) -> None:
    """Write the copies that a worker group reads, and next to each copy links to the original's neighbours.

    Args:
        job: a job with a script.
        candidate: None, or a candidate without knobs, keeps the script's own values.
        folder: the group's.
        quiet: keep the script's output in the folder.
    """
    assert job.script is not None
    script = job.script
    for file in own_files(script):
        path, below = Path(file.path), copies_folder(folder, file)
        below.mkdir(parents=True, exist_ok=True)
        for beside in path.parent.iterdir():
            if beside.name != path.name and not (below / beside.name).is_symlink():
                (below / beside.name).symlink_to(beside)
        changes: dict[Place, Any] = {}
        if candidate is not None and candidate.knobs:
            changes = changes_for(
                script, file, candidate, _merged_config(job, candidate, below / f".{path.stem}.ds.json")
            )
        if quiet and (place := find(file.data, (OUTPUT,))) is not None:
            changes[place] = str(folder / OUTPUT_FOLDER)
        (below / path.name).write_text(edited(file.text, changes, is_json=path.suffix == ".json"), encoding="utf-8")


def output_folders(script: Script) -> list[Path]:
    """Return the user's output folders, as argument files name them. A trial's output folder shows the first that exists."""
    said = [value_at(file.data, place) for file in own_files(script) if (place := find(file.data, (OUTPUT,)))]
    return [Path(script.cwd, os.path.expanduser(one)) for one in said if isinstance(one, str)]


def _merged_config(job: Job, candidate: Candidate, path: Path) -> str | None:
    """Write the config that the script's files hold or name, with the candidate's keys in it, and return its path."""
    assert job.script is not None
    own = own_config(job.script)
    if own is None:
        return None
    known = own if isinstance(own, dict) else read_config(own)
    path.write_text(json.dumps(candidate.ds_config(over_present(job, known))), encoding="utf-8")
    return str(path)


def winners_files(script: Script, candidate: Candidate, config: Path) -> dict[Path, str]:
    """Return copies of the user's files with a winner in them, by their paths.

    Args:
        config: the winner's DeepSpeed config.
    """
    found, path = {}, str(config.resolve())
    for file in script.files:
        if not file.launcher:
            changes = changes_for(script, file, candidate, path)
        elif file == launcher_file(script):
            changes = launcher_changes(file, candidate, path)
        else:
            continue
        found[winners_copy(config, file)] = edited(file.text, changes, is_json=file.path.endswith(".json"))
    return found


# -- on the command line -------------------------------------------------------------------------------------------------


def _mentioned(argv: Sequence[str], cwd: Path) -> Iterator[tuple[int, Path]]:
    for index, word in enumerate(argv):
        path = cwd / (word.partition("=")[2] or word)
        # `os.path.isfile` accepts a text of any length; Path refuses a long one
        if path.suffix not in SUFFIXES or not os.path.isfile(path):
            continue
        if path.stat().st_size <= MOST_BYTES and not is_ds_config(path):
            yield index, path


def _surely(argv: Sequence[str], index: int, path: Path) -> bool:
    """Check that the word can only name an argument file: a YAML, or a JSON that is not another flag's value."""
    if path.suffix != ".json":
        return True
    flag = argv[index].partition("=")[0] if "=" in argv[index] else argv[index - 1] if index else ""
    return not flag.startswith("-") or any(word in flag for word in ("config", "args", "deepspeed"))


def _are_lines(text: str) -> bool:
    """Check that the file holds JSON lines, which are data."""
    try:
        json.loads(text.lstrip().partition("\n")[0])
    except ValueError:
        return False
    return True


def _shown(path: Path) -> str:
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


# -- YAML edits --------------------------------------------------------------------------------------------------------
#
# Editing values in the text of a YAML or JSON file: other lines, their order and comments stay unchanged.


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
