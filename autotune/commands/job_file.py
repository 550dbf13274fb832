"""Job files: options of `run`, `plan` and `launch` in YAML or JSON, under their names on the command line.

A value means what the same text means on the command line, so that relative paths start from the current folder and not from the
file. `python -m autotune.commands.job_file` prints the JSON schema that `data/job.schema.json` ships for editors.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import MISSING
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from autotune.commands.removed import removed
from autotune.commands.request import COMMANDS, Parameter, Request, check_value, convert, flag_of, parameters
from autotune.errors import UserError, did_you_mean
from autotune.masking import MASK, learn_data, masked_data
from autotune.problem.space import compose_yaml, parse_space
from autotune.util.bounds import display_value, read_text

SUFFIXES = (".yaml", ".yml", ".json")
_EXPECTED = "expected options of autotune by name, like `model: gemma-2-2b`"

# -- names ---------------------------------------------------------------------------------------------------------------


def options_in_files(command: str) -> dict[str, Parameter]:
    """Return the options that a job file may have for a command, by flag without dashes; `script`: the words after `--`."""
    return {
        one.name if one.option.is_argument else flag_of(one.name).removeprefix("--"): one
        for one in parameters(command, in_file=True)
    }


def is_job_file(word: str) -> bool:
    """Check that a word of the command line names a job file, which need not exist."""
    return word.lower().endswith(SUFFIXES) and not Path(word).is_dir()


# -- read ----------------------------------------------------------------------------------------------------------------


def read_job(path: Path, command: str, given: Collection[str], print_line: Callable[[str], None]) -> dict[str, Any]:
    """Return the values of a job file for a command, by field of Request.

    Args:
        command: `run`, `plan` or `launch`. Options of the others are left out, with one line.
        given: fields that the command line sets, which the file may hold masked.
        print_line: receives lines for display.

    Raises:
        UserError: `file:line: option: problem, and the expected form`.
    """
    text = read_text(path, f"job file {path}", _EXPECTED)
    node = _compose(text.replace("\t", "  ") if path.suffix == ".json" else text, path)  # tabs indent JSON, not YAML
    known = options_in_files(command)
    others = {name for one in COMMANDS for name in options_in_files(one)} - known.keys()
    values: dict[str, Any] = {}
    unused: list[str] = []
    for key, value in _items(node, path):
        name, where = str(key.value).replace("_", "-"), f"{path}:{key.start_mark.line + 1}"
        if name in others:
            unused.append(name)
        elif name not in known:
            problem = removed(f"--{name}") or f"unknown option {_kind(key)}{_meant(str(key.value), known)}"
            raise UserError(f"{where}: {problem}")
        elif value.tag != "tag:yaml.org,2002:null":
            parameter = known[name]
            if parameter.name not in given:
                values[parameter.name] = found = _value(parameter, value, f"{where}: {name}", path)
                if parameter.option.is_code and found:
                    raise UserError(
                        f"{where}: a job file supplies no code. Add {_as_typed(name, found)} to the command line."
                    )
    learn_data(values)
    if unused:
        print_line(f"{path}: {command} does not use {', '.join(unused)}")
    return values


def _as_typed(name: str, value: Any) -> str:
    """Return an option as words of a command line."""
    return f"--{name}" if value is True else shlex.join([f"--{name}", str(value)])


def _compose(text: str, path: Path) -> yaml.MappingNode:
    try:
        node = compose_yaml(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        why = " ".join(str(getattr(error, "problem", None) or error).split())
        raise UserError(f"{where}: not YAML ({why}); {_EXPECTED}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not YAML that can be read ({str(error)[:100]}); {_EXPECTED}") from None
    if node is None:
        raise UserError(f"{path}:1: the file is empty; {_EXPECTED}")
    if not isinstance(node, yaml.MappingNode):
        raise UserError(f"{path}:{node.start_mark.line + 1}: found {_kind(node)}; {_EXPECTED}")
    return node


def _items(node: yaml.MappingNode, path: Path) -> Iterator[tuple[yaml.ScalarNode, yaml.Node]]:
    """Yield the keys and values of a mapping, those of `<<:` included.

    Raises:
        UserError: a key is no text, or is given twice.
    """
    own: dict[str, int] = {}
    for key, _ in node.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            raise UserError(f"{path}:{line}: found {_kind(key)} as a key; {_EXPECTED}")
        name = str(key.value).replace("_", "-")
        if name in own:
            raise UserError(f"{path}:{line}: {name} is given twice, first in line {own[name]}. Remove one of them.")
        own[name] = line
    loader = yaml.SafeLoader("")
    try:
        loader.flatten_mapping(node)
    except (yaml.YAMLError, RecursionError) as error:
        why = getattr(error, "problem", None) or "it contains itself"
        raise UserError(f"{path}:{node.start_mark.line + 1}: `<<` cannot be merged ({why})") from None
    merged = {str(key.value).replace("_", "-"): (key, value) for key, value in node.value}  # own keys come last
    yield from merged.values()


def _meant(key: str, known: Mapping[str, Parameter]) -> str:
    """Return a hint for an unknown key: the option of that field of the Python API, or the nearest names."""
    of_python = [name for name, one in known.items() if one.name == key.replace("-", "_")]
    return f"; did you mean {of_python[0]}?" if of_python else did_you_mean(key.replace("_", "-"), known)


def _value(parameter: Parameter, node: yaml.Node, where: str, path: Path) -> Any:
    """Return the value of a node for an option.

    Raises:
        UserError: the option cannot have it, or it is masked.
    """
    if dict in parameter.types and isinstance(node, yaml.MappingNode):
        parse_space("", str(path), node)  # errors have the job file's lines
        return {"name": path.stem, **yaml.SafeLoader("").construct_document(node)}
    value: Any
    if node.tag not in yaml.SafeLoader.yaml_constructors:
        raise UserError(f"{where}: YAML's tag {node.tag} has no meaning here. Remove it.")
    if bool in parameter.types and node.tag != "tag:yaml.org,2002:bool":
        raise UserError(f"{where}: expected true or false, found {_kind(node)}")
    if isinstance(node, yaml.ScalarNode):
        value = yaml.SafeLoader("").construct_yaml_bool(node) if bool in parameter.types else str(node.value)
    elif isinstance(node, yaml.SequenceNode) and list[str] in parameter.types:
        if bad := [one for one in node.value if not isinstance(one, yaml.ScalarNode)]:
            raise UserError(f"{where}: expected a list of words, found {_kind(bad[0])} in it")
        value = [str(one.value) for one in node.value]
    else:
        raise UserError(f"{where}: expected {_expected(parameter)}, found {_kind(node)}")
    texts = value if isinstance(value, list) else [value]
    if any(isinstance(one, str) and MASK in one for one in texts):
        how = "after `--`" if parameter.option.is_argument else f"with {flag_of(parameter.name)}"
        variable = f" or ${parameter.option.variable}" if parameter.option.variable else ""
        raise UserError(f"{where}: {MASK} stands for a secret, which no file keeps. Give it again {how}{variable}.")
    if parameter.option.is_argument and isinstance(value, str):
        try:
            value = shlex.split(value.replace("\\\n", " "))
        except ValueError as error:
            raise UserError(f"{where}: not a command ({str(error).lower()})") from None
    elif list[str] in parameter.types and isinstance(value, str):
        value = [value]
    found = convert(where, value, parameter.types)
    check_value(parameter.name, found, where)
    return found


def _expected(parameter: Parameter) -> str:
    if dict in parameter.types:
        return "a name, a file or a mapping"
    return "a list of words or a text" if list[str] in parameter.types else "a text or a number"


def _kind(node: yaml.Node) -> str:
    if isinstance(node, yaml.MappingNode):
        return "a mapping"
    return "a list" if isinstance(node, yaml.SequenceNode) else repr(display_value(str(node.value)))


# -- write ---------------------------------------------------------------------------------------------------------------

COMMAND_FILE = "command.yaml"  # in a study's folder


def job_text(request: Request, command: str) -> str:
    """Return a job file that repeats a request, with secrets masked."""
    options: dict[str, Any] = {}
    defaults = Request()
    for name, one in options_in_files(command).items():
        value = getattr(request, one.name)
        if value not in (None, getattr(defaults, one.name)):
            options[name] = str(value) if isinstance(value, Path) else value
    text = yaml.safe_dump(masked_data(options), sort_keys=False, allow_unicode=True, width=120) if options else "{}\n"
    head = f"# yaml-language-server: $schema={schema_path()}\n"
    typed = f"# written by `{' '.join(request.command.split())}`\n" if request.command else ""
    code = [name for name in options if options_in_files(command)[name].option.is_code]
    words = " ".join([f"autotune {command}", *(_as_typed(name, options[name]) for name in code)])
    folder = f"# repeat it with `{words}` and this file, from {Path.cwd()}, where relative paths start\n"
    return head + typed + folder + text


# -- schema --------------------------------------------------------------------------------------------------------------

SCHEMA = "job.schema.json"  # in the package's data
_JSON_TYPES: dict[Any, list[str]] = {
    str: ["string", "number"],  # `budget: 600`
    Path: ["string"],
    int: ["integer"],
    float: ["number"],
    bool: ["boolean"],
    list[str]: ["array", "string"],
    dict: ["object"],
}


def schema_path() -> Path:
    """Return the shipped JSON schema of job files."""
    return Path(str(resources.files("autotune") / "data" / SCHEMA))


def schema() -> dict[str, Any]:
    """Return the JSON schema of job files for all commands."""
    options = [(name, command, one) for command in COMMANDS for name, one in options_in_files(command).items()]
    properties: dict[str, Any] = {}
    for name, _, one in options:
        known = [command for other, command, _ in options if other == name]
        properties.setdefault(name, _property(one, f" ({', '.join(known)})" if len(known) < len(COMMANDS) else ""))
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Job file of autotune",
        "description": "Options of `autotune run`, `plan` and `launch`; relative paths start from the current folder.",
        "type": "object",
        "additionalProperties": False,
        "properties": dict(sorted(properties.items())),
    }


def _property(parameter: Parameter, commands: str) -> dict[str, Any]:
    types = [*dict.fromkeys(name for one in parameter.types for name in _JSON_TYPES[one])]
    types = [one for one in types if (one, "number") != ("integer", types[-1])]  # numbers include whole ones
    found: dict[str, Any] = {"type": types[0] if len(types) == 1 else types}
    if "array" in types:
        found["items"] = {"type": ["string", "number"]}
    if parameter.default not in (None, MISSING, []):
        found["default"] = parameter.default
    return {**found, "description": f"{parameter.help}{commands}"}


def schema_text() -> str:
    """Return the text of the shipped schema."""
    return json.dumps(schema(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    print(schema_text(), end="")
