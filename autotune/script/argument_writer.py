"""Per-trial copies of argument files."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from ruamel.yaml.scalarstring import DoubleQuotedScalarString
from ruamel.yaml.util import load_yaml_guess_indent

from autotune.errors import UserError
from autotune.problem.candidate import Candidate
from autotune.problem.ds_config import MOST_BYTES, read_config, value_at
from autotune.problem.job import ArgumentFile, Job, Script
from autotune.script.argument_files import (
    OUTPUT,
    OUTPUT_FOLDER,
    Place,
    copies_folder,
    entries,
    find_key,
    has_known_key,
    is_ds_config,
    launcher_changes,
    launcher_file,
    own_config,
    own_files,
    winners_copy,
)
from autotune.script.carriers import changes_for, declared_places
from autotune.script.profile import over_present

# -- argument texts ----------------------------------------------------------------------------------------------------
#
# Texts of argument files: finding them in a command, reading them, and writing copies with a candidate's values.

SUFFIXES = (".yaml", ".yml", ".json")


def with_argument_files(script: Script) -> Script:
    """Return the script with the argument files of its command: with a known key, or a key that one of its flags names.

    Raises:
        UserError: a word that can only name an argument file names one that does not parse.
    """
    declared = [tuple(flag.split(".")) for flag in declared_places(script).values()]
    known, found = {file.at for file in own_files(script)}, list[ArgumentFile]()
    for index, path in _mentioned(script):
        file = None if index in known else read_file(path, index, strict=_surely(script.argv, index, path))
        if file is None:
            continue
        if has_known_key(file.data) or any(value_at(file.data, place) is not None for place in declared):
            found.append(file)
    return replace(script, files=(*script.files, *found))


def integers_in_files(script: Script) -> dict[str, int]:
    """Return the positive integers in the files that the command names, by dotted name. DeepSpeed configs are left out."""
    found: dict[str, int] = {}
    for index, path in _mentioned(script):
        file = read_file(path, index, strict=False)
        for place, value in entries(file.data) if file else ():
            if type(value) is int and value > 0 and not any("." in key for key in place):
                found[".".join(place)] = value
    return found


def read_file(path: Path, index: int, *, strict: bool, launcher: bool = False) -> ArgumentFile | None:
    """Return the file, or None if it cannot be read or holds no mapping.

    Args:
        strict: treat an unreadable file as the user's mistake.

    Raises:
        UserError: the file cannot be read and `strict` is set, or a YAML file does not parse.
    """
    try:
        text = path.read_text(encoding="utf-8")
        data = json.loads(text) if path.suffix == ".json" else parsed(text, _shown(path))
    except OSError as error:
        if strict:
            raise UserError(f"{path} cannot be read: {error.strerror}") from None
        return None
    except json.JSONDecodeError as error:
        if strict and not _are_lines(error.doc):
            raise UserError(f"{_shown(path)}:{error.lineno}: not JSON ({error.msg})") from None
        return None
    except UnicodeDecodeError:
        return None
    if isinstance(data, dict):
        with suppress(TypeError, ValueError):  # keys that are dates; a training has no such arguments
            return ArgumentFile(index, str(path), text, json.loads(json.dumps(data, default=str)), launcher)
    return None


def write_trial_files(job: Job, candidate: Candidate | None, folder: Path, *, quiet: bool) -> None:
    """Write the copies that a worker group reads, and next to each copy links to the original's neighbours.

    Args:
        job: a job with a script.
        candidate: None, or a candidate without knobs, keeps the script's own values.
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
        tried = {tuple(name.split(".")): value for name, value in script.profile.tried_values.items()}
        changes |= {place: value for place, value in tried.items() if value_at(file.data, place) is not None}
        if quiet and (place := find_key(file.data, (OUTPUT,))) is not None:
            changes[place] = str(folder / OUTPUT_FOLDER)
        (below / path.name).write_text(edited(file.text, changes, is_json=path.suffix == ".json"), encoding="utf-8")


def output_folders(script: Script) -> list[Path]:
    """Return the user's output folders, as argument files name them. A trial's output folder shows the first that exists."""
    said = [value_at(file.data, place) for file in own_files(script) if (place := find_key(file.data, (OUTPUT,)))]
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
    """Return copies of the user's files with a winner in them, by their paths."""
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


def _mentioned(script: Script) -> Iterator[tuple[int, Path]]:
    """Yield (index, path) of the words of the command that name a YAML or JSON file, except DeepSpeed configs."""
    for index, word in enumerate(script.argv):
        path = Path(script.cwd) / (word.partition("=")[2] or word)
        # `os.path.isfile` accepts a text of any length; Path refuses a long one
        if path.suffix not in SUFFIXES or not os.path.isfile(path):
            continue
        if path.stat().st_size <= MOST_BYTES and not is_ds_config(path):
            yield index, path


def _surely(argv: Sequence[str], index: int, path: Path) -> bool:
    """Check that the word can only name an argument file: a YAML, or a JSON that is not another flag's value."""
    head, equals, _ = argv[index].partition("=")
    flag = head if equals else argv[index - 1]
    named = any(word in flag for word in ("config", "args", "deepspeed"))
    return path.suffix != ".json" or not flag.startswith("-") or named


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
    """Parse the data of a YAML file.

    Args:
        name: the file's, for the error.

    Raises:
        UserError: the text is no YAML; the message has the line.
    """
    try:
        return yaml.load(text, _Loader)  # a SafeLoader
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        line = f":{min(mark.line, text.rstrip().count(chr(10))) + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
        raise UserError(f"{name}{line}: not YAML ({problem})") from None


def edited(text: str, changes: Mapping[Place, Any], *, is_json: bool = False) -> str:
    """Return the text with the value at each place changed or added; None removes the place.

    Comments, order and quotes of a YAML file stay, unless its text cannot be changed in place.
    """
    data = json.loads(text) if is_json else yaml.load(text, _Loader)
    expected = data if isinstance(data, dict) else {}
    for place, value in changes.items():
        expected = _changed(expected, place, value)
    if expected == data:
        return text
    if is_json:
        return json.dumps(expected, indent=2, ensure_ascii=False) + "\n"
    try:
        found = _in_place(text, changes)
        if yaml.load(found, _Loader) == expected:
            return found
    except (YAMLError, yaml.YAMLError, ValueError, TypeError, AttributeError, LookupError):
        pass  # a duplicate key, or a value where a mapping is expected
    return yaml.safe_dump(expected, sort_keys=False)


def _changed(data: dict[str, Any], place: Place, value: Any) -> dict[str, Any]:
    first, rest = place[0], place[1:]
    if not rest and value is None:
        return {key: known for key, known in data.items() if key != first}
    if not rest:
        return {**data, first: value}
    below = data.get(first)
    return {**data, first: _changed(below if isinstance(below, dict) else {}, rest, value)}


def _in_place(text: str, changes: Mapping[Place, Any]) -> str:
    editor = YAML()
    editor.preserve_quotes = True
    editor.width = 2**31  # a long line stays one line
    _, indent, offset = load_yaml_guess_indent(text)
    data = editor.load(text)
    if indent is not None:
        editor.indent(mapping=offset or indent, sequence=indent, offset=offset)
    for place, value in changes.items():
        node = data
        for key in place[:-1]:
            if not isinstance(node.get(key), dict):
                node[key] = {}
            node = node[key]
        if value is None:
            node.pop(place[-1], None)
        else:
            node[place[-1]] = _quoted(value)
    written = io.StringIO()
    editor.dump(data, written)
    return written.getvalue()


def _quoted(value: Any) -> Any:
    """Return a text in quotes if YAML 1.1 would read it as another type: ruamel.yaml writes 1.2, PyYAML reads 1.1."""
    if not isinstance(value, str):
        return value
    try:
        plain = yaml.safe_load(f"key: {value}") == {"key": value}
    except yaml.YAMLError:
        plain = False
    return value if plain else DoubleQuotedScalarString(value)
