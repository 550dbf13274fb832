"""Search spaces as YAML files: finding, reading and validating them. An error names the file, the line and the key."""

from __future__ import annotations

import dataclasses
import json
import math
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from autotune.bounds import check_data, read_text
from autotune.errors import UserError, near
from autotune.problem.candidate import KNOBS, Value, short_name
from autotune.problem.knob_values import knob_value
from autotune.problem.knobs import ZERO
from autotune.problem.space import Domain, SearchSpace

_DS_KEYS = json.loads((resources.files("autotune") / "data" / "deepspeed_keys.json").read_text(encoding="utf-8"))
DS_ZERO_KEYS = frozenset(_DS_KEYS["zero_optimization"])
DS_TOP_LEVEL = frozenset(_DS_KEYS["top_level"])
DS_SECTIONS = {section: frozenset(keys) for section, keys in _DS_KEYS["sections"].items()}
_PARTS = ("name", "about", "lossy", "at_once", "knobs", "fixed")


def spaces_folder() -> Path:
    """Return the folder of the shipped spaces: in the installed package, or at the top of the repository."""
    package = Path(__file__).parents[1]
    inside = package / "search_spaces"
    return inside if inside.is_dir() else package.parent / "search_spaces"


def shipped_spaces() -> dict[str, Path]:
    return {path.stem: path for path in sorted(spaces_folder().glob("*.yaml"))}


def load_space(reference: str) -> SearchSpace:
    """Return the shipped space of that name, or the space in that file.

    Raises:
        UserError: there is none, or it is invalid; the message names file, line and key.
    """
    shipped = shipped_spaces()
    path = shipped.get(reference, Path(reference).expanduser())
    if reference not in shipped and not path.exists():
        raise UserError(
            f"no search space {reference!r}{near(reference, shipped)}: give a file, or {', '.join(shipped)}"
        )
    text = read_text(path, f"search space {path}", "expected YAML with `knobs:` and their values")
    return dataclasses.replace(parse_space(text, str(path)), shipped=reference in shipped)


def parse_space(text: str, file: str = "<space>") -> SearchSpace:
    """Parse a SearchSpace from YAML text.

    Raises:
        UserError: `file:line: key: problem, and the expected form`.
    """
    return _Parser(text, file).parse()


def _name_of(key: str) -> str:
    """Return the knob of a key. A key of `zero_optimization` may be written without that prefix."""
    name = short_name(key)
    bare = name not in KNOBS and not name.startswith(ZERO) and name.split(".")[0] in DS_ZERO_KEYS - DS_TOP_LEVEL
    return short_name(ZERO + name) if bare else name


class _Parser:
    """Parser of one file; it keeps the line of every key for errors."""

    def __init__(self, text: str, file: str) -> None:
        self.text, self.file = text, file
        self.lines: dict[tuple[str, ...], int] = {}

    def fail(self, path: tuple[str, ...], message: str) -> UserError:
        line = next((self.lines[path[:n]] for n in range(len(path), -1, -1) if path[:n] in self.lines), 1)
        return UserError(f"{self.file}:{line}: {'.'.join(path[1:] or path)}: {message}")

    def parse(self) -> SearchSpace:
        try:
            node = yaml.compose(self.text, Loader=yaml.SafeLoader)
            if node is None:
                raise UserError(f"{self.file}:1: the file is empty; expected `knobs:` and their values")
            self._collect(node, ())
            data = yaml.safe_load(self.text)
            if isinstance(data, dict):
                check_data(data, self.file)
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            where = f"{self.file}:{mark.line + 1}" if mark else self.file
            raise UserError(f"{where}: not YAML ({getattr(error, 'problem', None) or error})".splitlines()[0]) from None
        except (ValueError, RecursionError) as error:
            raise UserError(f"{self.file}: not YAML that can be read ({str(error)[:100]})") from None
        if not isinstance(data, dict):
            raise UserError(f"{self.file}:1: expected `knobs:` and their values, found {type(data).__name__}")
        for key in data:
            if key not in _PARTS:
                raise self.fail((str(key),), f"unknown section{near(str(key), _PARTS)}")
        self.lossy = data.get("lossy", False)
        if not isinstance(self.lossy, bool):
            raise self.fail(("lossy",), f"expected true or false, found {self.lossy!r}")
        at_once = data.get("at_once")
        if at_once is not None and (isinstance(at_once, bool) or not isinstance(at_once, int) or at_once < 0):
            raise self.fail(("at_once",), f"expected a whole number of knobs, found {at_once!r}")
        knobs = data.get("knobs") or {}
        fixed = data.get("fixed") or {}
        for section, value in (("knobs", knobs), ("fixed", fixed)):
            if not isinstance(value, dict):
                raise self.fail((section,), "expected a mapping of knobs to their values")
        domains: dict[str, Domain] = {}
        for key, raw in knobs.items():
            self._add(domains, ("knobs", str(key)), raw)
        for key, raw in fixed.items():
            if isinstance(raw, dict | list):
                raise self.fail(("fixed", str(key)), "expected one value; a dotted key reaches into a section")
            name = self._add(domains, ("fixed", str(key)), [raw])
            domains[name] = dataclasses.replace(domains[name], fixed=True)
        if not knobs and not fixed:
            raise self.fail(("knobs",), "the space has no knobs")
        for name, domain in domains.items():
            for condition, allowed in domain.when:
                if condition not in domains:
                    raise self.fail(("knobs", name, "when"), f"{condition!r} is no knob of this space")
                if not set(allowed) & set(domains[condition].values):
                    raise self.fail(("knobs", name, "when"), f"{condition} is never one of {list(allowed)}")
        name, about = str(data.get("name") or Path(self.file).stem), str(data.get("about") or "")
        space = SearchSpace(name, about, domains, self.text, at_once, self.lossy)
        if next(space.families(), None) is None:
            raise self.fail(("knobs",), f"DeepSpeed refuses every setting: {space.why_refused()}")
        return space

    def _collect(self, node: yaml.Node, path: tuple[str, ...]) -> None:
        if isinstance(node, yaml.MappingNode):
            seen = set()
            for key, value in node.value:
                inner = (*path, str(key.value))
                self.lines[inner] = key.start_mark.line + 1
                if inner in seen:
                    raise self.fail(inner, "is given twice")
                seen.add(inner)
                self._collect(value, inner)

    def _add(self, domains: dict[str, Domain], path: tuple[str, ...], raw: Any) -> str:
        """Add the knob at this path of the file, and return its name."""
        name = _name_of(path[1])
        if name not in KNOBS and "." not in name and name not in DS_TOP_LEVEL:
            known = {key.removeprefix(ZERO) for key in KNOBS} | DS_TOP_LEVEL
            raise self.fail(path, f"unknown knob{near(name, sorted(known))}; other DeepSpeed keys are dotted")
        self._check_key(path, name)
        if name in domains:
            raise self.fail(path, "is given twice (its short name and its DeepSpeed key are one knob)")
        when: tuple[tuple[str, tuple[Value, ...]], ...] = ()
        is_range = False
        if isinstance(raw, dict):
            values, when, is_range = self._mapping(path, raw)
        elif isinstance(raw, list):
            values = raw
        else:
            values = [raw]
        if not values:
            raise self.fail(path, "has no values")
        checked = tuple(self._check(path, name, value) for value in values)
        if len(set(map(repr, checked))) != len(checked):
            raise self.fail(path, "names a value twice")
        if not self.lossy and name in KNOBS and (why := KNOBS[name].lossy) and set(checked) - {KNOBS[name].off}:
            raise self.fail(
                path, f"{why}, so that losses may differ: write `lossy: true` at the top of the space, or leave it out"
            )
        domains[name] = Domain(checked, when, is_range)
        return name

    def _check_key(self, path: tuple[str, ...], name: str) -> None:
        """Raise UserError if a dotted name is no key of DeepSpeed."""
        if "." not in name or name in KNOBS:
            return
        section, _, leaf = name.rpartition(".")
        if name.startswith(ZERO) and name.split(".")[1] not in DS_ZERO_KEYS:
            leaf = name.split(".")[1]
            raise self.fail(path, f"DeepSpeed knows no such ZeRO key{near(leaf, DS_ZERO_KEYS)}")
        if name.split(".")[0] not in DS_TOP_LEVEL:
            raise self.fail(path, f"DeepSpeed knows no section {name.split('.')[0]!r}{near(name, DS_TOP_LEVEL)}")
        if section in DS_SECTIONS and leaf not in DS_SECTIONS[section]:
            raise self.fail(path, f"DeepSpeed knows no such key of {section}{near(leaf, DS_SECTIONS[section])}")

    def _mapping(self, path: tuple[str, ...], raw: dict[str, Any]) -> tuple[list[Any], Any, bool]:
        allowed = ("values", "from", "to", "step", "scale", "points", "when")
        for key in raw:
            if key not in allowed:
                raise self.fail((*path, str(key)), f"unknown{near(str(key), allowed)}; expected {', '.join(allowed)}")
        when = raw.get("when") or {}
        if not isinstance(when, dict):
            raise self.fail((*path, "when"), "expected a mapping of a knob to the values at which this one exists")
        conditions = tuple(self._condition((*path, "when", str(name)), value) for name, value in when.items())
        if "values" in raw:
            if not isinstance(raw["values"], list) or {"from", "to", "step", "scale", "points"} & set(raw):
                raise self.fail(path, "expected either `values: [...]` or `from:` and `to:`")
            return raw["values"], conditions, False
        return self._range(path, raw), conditions, True

    def _condition(self, path: tuple[str, ...], raw: Any) -> tuple[str, tuple[Value, ...]]:
        """Return a knob and its values, in the knob's own notation."""
        name = _name_of(path[-1])
        return name, tuple(self._check(path, name, value) for value in (raw if isinstance(raw, list) else [raw]))

    def _range(self, path: tuple[str, ...], raw: dict[str, Any]) -> list[Any]:
        low, high = raw.get("from"), raw.get("to")
        for key, bound in (("from", low), ("to", high)):
            if isinstance(bound, bool) or not isinstance(bound, int | float):
                raise self.fail((*path, key), f"expected a number, found {bound!r}")
        assert isinstance(low, int | float)
        assert isinstance(high, int | float)
        if not -1e15 < low <= high < 1e15:
            raise self.fail(path, f"the range is upside down: from {low} to {high}")
        scale = raw.get("scale", "linear")
        whole = isinstance(low, int) and isinstance(high, int)
        if scale == "pow2":
            if low < 1 or not whole:
                raise self.fail(path, "scale pow2 needs whole numbers of at least 1")
            return [2**n for n in range(64) if low <= 2**n <= high]
        if scale == "log":
            points = raw.get("points", 5)
            if low <= 0 or isinstance(points, bool) or not isinstance(points, int) or not 2 <= points <= 1000:
                raise self.fail(path, "scale log needs from > 0 and 2 to 1000 points")
            values = [low * (high / low) ** (i / (points - 1)) for i in range(points)]
            return sorted({round(value) for value in values}) if whole else values
        if scale != "linear":
            raise self.fail((*path, "scale"), f"expected linear, pow2 or log, found {scale!r}")
        step = raw.get("step", 1 if whole else None)
        if isinstance(step, bool) or not isinstance(step, int | float) or not 0 < step < math.inf:
            raise self.fail((*path, "step"), f"expected a number above 0, found {step!r}")
        count = int((high - low) / step + 1e-9) + 1
        if count > 10_000:
            raise self.fail(path, f"{count} values are too many: give a larger step or scale: log")
        return [low + i * step for i in range(count)]

    def _check(self, path: tuple[str, ...], name: str, value: Any) -> Value:
        if name not in KNOBS:
            if not isinstance(value, bool | int | float | str) or value in (math.inf, -math.inf) or value != value:
                raise self.fail(path, f"expected a number, a word or true/false, found {value!r}")
            return value
        try:
            return knob_value(KNOBS[name], value)
        except ValueError as error:
            raise self.fail(path, str(error)) from None
