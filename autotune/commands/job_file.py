"""Job files: options of `run`, `plan` and `launch` in YAML or JSON, under their names on the command line.

A value means what the same text means on the command line, so that relative paths start from the current folder and not from the
file. `python -m autotune.commands.job_file` prints the JSON schema that `data/job.schema.json` ships for editors.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Collection, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from autotune.commands.removed import removed
from autotune.commands.request import COMMANDS, Options, Parameter, Request, flag_of, parameters, request_from
from autotune.errors import UserError, did_you_mean
from autotune.masking import MASK, learn_data, masked_data
from autotune.problem.space import compose_yaml, parse_space, yaml_errors
from autotune.util.bounds import display_value, read_text

_EXPECTED = "expected options of autotune by name, like `model: gemma-2-2b`"

# -- names ---------------------------------------------------------------------------------------------------------------


def options_in_files(command: str) -> dict[str, Parameter]:
    """Return the options that a job file may have for a command, by flag without dashes; `script`: the words after `--`."""
    return {flag_of(one.name).removeprefix("--"): one for one in parameters(command, in_file=True)}


# -- read ----------------------------------------------------------------------------------------------------------------


def read_job(
    path: Path, command: str, given: Collection[str], print_line: Callable[[str], None]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the values of a job file for a command, by field of Options, and the place of each, by flag.

    Args:
        command: `run`, `plan` or `launch`. Options of the others are checked and left out, with one line.
        given: fields that the command line sets, which the file may hold masked.
        print_line: receives lines for display.

    Raises:
        UserError: `file:line: option: problem, and the expected form`.
    """
    text = read_text(path, f"job file {path}", _EXPECTED)
    node = _compose(text.replace("\t", "  ") if path.suffix == ".json" else text, path)  # tabs indent JSON, not YAML
    own = options_in_files(command)
    every = {name: one for each in COMMANDS for name, one in options_in_files(each).items()}
    spellings = {spelling: name for name, one in every.items() for spelling in (name, one.name.replace("_", "-"))}
    values: dict[str, Any] = {}
    places: dict[str, str] = {}
    unused: list[str] = []
    for key, value in _items(node, path):
        where, typed = f"{path}:{key.start_mark.line + 1}", str(key.value).replace("_", "-")
        name = spellings.get(typed, typed)
        if name not in every:
            problem = removed(f"--{name}") or f"unknown option {_kind(key)}{did_you_mean(name, own)}"
            raise UserError(f"{where}: {problem}")
        field = every[name].name
        if name not in own:
            unused.append(name)
        if field not in given:
            places[field] = f"{where}: {name}"
            values[field] = _value(value, places[field], path)
    values = {name: value for name, value in values.items() if value is not None}
    learn_data(values)
    request = request_from(values, places.__getitem__)
    own_options = {one.name: one.option for one in own.values()}
    used = [name for name in values if name in own_options]
    for name in used:
        found = getattr(request, name)
        if MASK in str(found):
            what = "the words after `--`" if own_options[name].is_argument else flag_of(name)
            raise UserError(f"{places[name]}: {MASK} stands for a secret, which no file keeps. Type {what} again.")
        if own_options[name].is_code and found:
            line = places[name].rpartition(": ")[0]
            raise UserError(f"{line}: a job file supplies no code. Add {_as_typed(name, found)} to the command line.")
    if unused:
        print_line(f"{path}: {command} does not use {', '.join(unused)}")
    return {name: getattr(request, name) for name in used}, {flag_of(name): places[name] for name in used}


def _as_typed(field: str, value: Any) -> str:
    """Return an option as words of a command line."""
    return flag_of(field) if value is True else shlex.join([flag_of(field), str(value)])


def _compose(text: str, path: Path) -> yaml.MappingNode:
    with yaml_errors(str(path), _EXPECTED):
        node = compose_yaml(text)
    if node is None:
        raise UserError(f"{path}:1: the file is empty; {_EXPECTED}")
    if not isinstance(node, yaml.MappingNode):
        raise UserError(f"{path}:{node.start_mark.line + 1}: found {_kind(node)}; {_EXPECTED}")
    return node


def _items(node: yaml.MappingNode, path: Path) -> Iterator[tuple[yaml.ScalarNode, yaml.Node]]:
    """Yield the keys and values of a mapping.

    Raises:
        UserError: a key is no text, or is given twice.
    """
    own: dict[str, int] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            raise UserError(f"{path}:{line}: found {_kind(key)} as a key; {_EXPECTED}")
        name = str(key.value).replace("_", "-")
        if name in own:
            raise UserError(f"{path}:{line}: {name} is given twice, first in line {own[name]}. Remove one of them.")
        own[name] = line
        yield key, value


class _Texts(yaml.SafeLoader):
    """Loader that keeps numbers, switches and dates as the texts that the command line would have."""

    yaml_constructors = yaml.SafeLoader.yaml_constructors | dict.fromkeys(
        [f"tag:yaml.org,2002:{tag}" for tag in ("bool", "int", "float", "timestamp")],
        yaml.SafeLoader.construct_yaml_str,
    )


def _value(node: yaml.Node, where: str, path: Path) -> Any:
    """Return the data of an option.

    Raises:
        UserError: it is no plain data, or no search space.
    """
    if isinstance(node, yaml.MappingNode):
        parse_space("", str(path), node, f"{where.rpartition(' ')[2]}: ")  # errors have the job file's lines
        return {"name": path.stem, **yaml.SafeLoader("").construct_document(node)}
    try:
        return _Texts("").construct_document(node)
    except yaml.YAMLError as error:
        raise UserError(f"{where}: {getattr(error, 'problem', error)}") from None


def _kind(node: yaml.Node) -> str:
    if isinstance(node, yaml.MappingNode):
        return "a mapping"
    return "a list" if isinstance(node, yaml.SequenceNode) else repr(display_value(str(node.value)))


# -- write ---------------------------------------------------------------------------------------------------------------

COMMAND_FILE = "command.yaml"  # in a study's folder


def job_text(request: Request) -> str:
    """Return a job file that repeats a request of `run`, with secrets masked."""
    own = options_in_files("run")
    options = request.model_dump(mode="json", exclude_defaults=True, include={one.name for one in own.values()})
    code = [
        _as_typed(one.name, options[one.name]) for one in own.values() if one.option.is_code and one.name in options
    ]
    data = {name: options[one.name] for name, one in own.items() if one.name in options}
    text = yaml.safe_dump(masked_data(data), sort_keys=False, allow_unicode=True, width=120)
    head = f"# yaml-language-server: $schema={schema_path()}\n"
    typed = f"# written by `{' '.join(request.command.split())}`\n" if request.command else ""
    words = " ".join(["autotune run", *code])
    folder = f"# repeat it with `{words}` and this file, from {Path.cwd()}, where relative paths start\n"
    return head + typed + folder + text


# -- schema --------------------------------------------------------------------------------------------------------------

SCHEMA = "job.schema.json"  # in the package's data


def schema_path() -> Path:
    """Return the shipped JSON schema of job files."""
    return Path(str(resources.files("autotune") / "data" / SCHEMA))


def schema_text() -> str:
    """Return the text of the shipped schema."""
    return json.dumps(Options.model_json_schema(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    print(schema_text(), end="")
