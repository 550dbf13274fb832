"""Search space: YAML file, domains, and narrowing to a job."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, TypeVar

import yaml
from pydantic import BaseModel, Field, ValidationError, model_validator

from autotune.errors import UserError, did_you_mean
from autotune.problem.candidate import (
    ACCUMULATION,
    CHECKPOINTING,
    LOSS,
    MICRO_BATCH,
    MODEL_KNOBS,
    PACKING,
    RUNG_KNOBS,
    TRACED_KNOBS,
    Candidate,
    Value,
    is_read,
    job_with_candidate,
    knobs_of,
    settings_of,
    short_name,
)
from autotune.problem.faults import Fault, accumulation_facts, facts_of, job_facts, known_faults, own_facts
from autotune.problem.forms import first_problem
from autotune.problem.hardware import Hardware
from autotune.problem.job import FULL, Job, counted_ranks
from autotune.problem.knobs import (
    FATAL,
    FIRST_ORDER,
    KNOBS,
    OF_PACKAGES,
    OFFLOADING,
    READ,
    ZERO,
    Release,
    RequirementInputs,
    is_off,
    knob_value,
    refusal,
)
from autotune.problem.models import CAUSAL
from autotune.util.bounds import check_data, read_text
from autotune.util.files import shipped_json
from autotune.versions import dotted

# -- space -------------------------------------------------------------------------------------------------------------
#
# Search space: the knobs of a study, their values, and the candidates that they make for a Job.

MAX_CANDIDATES = 2_000_000  # more would take minutes to enumerate


When = tuple[tuple[str, tuple[Value, ...]], ...]  # knobs, and their values at which another one exists


@dataclass(frozen=True)
class Domain:
    """Values of one knob, and the conditions under which it exists."""

    values: tuple[Value, ...]
    when: When = ()
    is_range: bool = False  # written as from/to: a global batch may use any whole number in it
    fixed: bool = False  # set by the user: the tuner must not drop it


@dataclass(frozen=True)
class SearchSpace:
    """Knobs that a study may change, and keys that it fixes."""

    name: str
    about: str
    knobs: dict[str, Domain]
    text: str  # the YAML as read, stored in the study
    at_once: int | None = None  # how many second-order knobs may differ from their first values together; None: all
    lossy: bool = False  # may change arithmetic, so that losses may differ
    shipped: bool = False  # written for every DeepSpeed: keys that the installed version does not know are left out
    faults: tuple[Fault, ...] = ()  # DeepSpeed's known faults: candidates with one are left out
    # settings of a script's training that no candidate has: each is tried once, at the best candidate
    levers: dict[str, Domain] = dataclasses.field(default_factory=dict)

    @cached_property
    def order(self) -> tuple[str, ...]:
        """Names of the knobs that need a new engine, in dependency order.

        Each follows the knobs that its `when` names and those that decide whether it is read.
        """
        done: list[str] = [name for name in ("zero_stage", *OFFLOADING) if name in self.knobs]
        rest = [name for name in self.knobs if name not in done and name not in RUNG_KNOBS]
        while rest:
            ready = [n for n in rest if all(c in done or c not in rest for c in self._before(n))]
            done += ready or rest
            rest = [] if not ready else [n for n in rest if n not in ready]
        return tuple(done)

    def _before(self, name: str) -> list[str]:
        decides = KNOBS[name].read.of if name in KNOBS else None
        return [*(condition for condition, _ in self.knobs[name].when), *([decides] if decides else [])]

    def families(self) -> Iterator[dict[str, Value]]:
        """Yield every distinct setting of the knobs that need a new engine, in canonical form."""
        seen = set()
        for knobs in self._settings():
            canonical = Candidate.of(knobs).knobs
            if canonical not in seen and not refusal(knobs):
                seen.add(canonical)
                yield dict(canonical)

    def never_read(self) -> set[str]:
        """Return the knobs that DeepSpeed reads under no setting of the others."""
        unread = set(self.order)
        for knobs in self.families():
            unread -= knobs.keys()
            if not unread:
                break
        return unread

    def _settings(self) -> Iterator[dict[str, Value]]:
        return self._grow({}, 0, len(self.knobs) if self.at_once is None else self.at_once)

    def _grow(self, knobs: dict[str, Value], at: int, may_leave: int) -> Iterator[dict[str, Value]]:
        """Yield settings that extend these; `may_leave` second-order knobs may still leave their first values."""
        if at == len(self.order):
            yield knobs
            return
        name = self.order[at]
        domain = self.knobs[name]
        if not all(knobs.get(one) in allowed for one, allowed in domain.when) or not is_read(name, knobs):
            yield from self._grow(knobs, at + 1, may_leave)
            return
        for value in domain.values:
            left = may_leave - (name not in FIRST_ORDER and value != domain.values[0])
            if left >= 0:
                yield from self._grow({**knobs, name: value}, at + 1, left)

    def rungs(self, job: Job) -> list[tuple[int, int]]:
        """Return the (micro-batch, accumulation) pairs that the job allows, ascending.

        With a global batch only exact factorisations micro-batch x accumulation x ranks are allowed.

        Raises:
            UserError: no pair meets the global batch.
        """
        micro = self.knobs.get(MICRO_BATCH, Domain((1,)))
        accumulation = self.knobs.get(ACCUMULATION, Domain((1,)))
        sizes = sorted(int(value) for value in micro.values)
        if job.global_batch_size is None:
            return sorted(itertools.product(sizes, sorted(int(value) for value in accumulation.values)))
        share = job.global_batch_size // job.data_ranks
        if micro.is_range:
            sizes = list(range(sizes[0], min(sizes[-1], share) + 1))
        pairs = [(size, share // size) for size in sizes if share % size == 0]
        if not accumulation.is_range and ACCUMULATION in self.knobs:
            pairs = [pair for pair in pairs if pair[1] in accumulation.values]
        if not pairs:
            raise UserError(
                f"a global batch of {job.global_batch_size} over {counted_ranks(job.ranks, job.sequence_ranks)} "
                f"cannot be made from the micro-batches of space {self.name!r} ({sizes[0]} to {sizes[-1]}): "
                "change the batch (--global-batch-size) or the space"
            )
        return pairs

    def candidates(self, job: Job) -> list[Candidate]:
        """Return every distinct Candidate of the space for this job.

        Raises:
            UserError: there is none, or there are too many to list.
        """
        pairs = self.rungs(job)
        found = []
        for family in self.families():
            faults = self._faults(family, job)
            for micro_batch, accumulation in pairs:
                if any(fault.holds({**facts, **accumulation_facts(job, accumulation)}) for fault, facts in faults):
                    continue
                knobs = {**family, MICRO_BATCH: micro_batch, ACCUMULATION: accumulation}
                found.append(Candidate(tuple(sorted(knobs.items()))))
            if len(found) > MAX_CANDIDATES:
                raise UserError(
                    f"space {self.name!r} has over {MAX_CANDIDATES} candidates: give its ranges fewer values"
                )
        if not found and self.faults:
            raise UserError(
                f"space {self.name!r}: every candidate has a known fault of DeepSpeed, like {self.faults[0].setting} "
                f"({self.faults[0].source}): change the space, or install another DeepSpeed"
            )
        if not found:
            raise UserError(f"space {self.name!r} has no valid candidate: `autotune spaces validate` shows its knobs")
        return found

    def _faults(self, family: dict[str, Value], job: Job) -> list[tuple[Fault, dict[str, Any]]]:
        """Return the faults that candidates of a family may have, each with the family's facts."""
        if not self.faults:
            return []
        candidate = Candidate(tuple(sorted(family.items())))
        facts = facts_of(candidate.ds_config(job), job_with_candidate(job, candidate))
        facts.pop("accumulation", None)
        return [(fault, facts) for fault in self.faults if fault.holds(facts) is not False]

    def test_of(self, candidates: Iterable[Candidate]) -> Callable[[Candidate], bool]:
        """Return a test for these candidates of the space, with any of its levers."""
        known = frozenset(candidates)
        return lambda one: Candidate(tuple(item for item in one.knobs if item[0] not in self.levers)) in known

    def without_faults(self, job: Job, deepspeed: Release) -> tuple[SearchSpace, list[str]]:
        """Return the space that leaves out candidates with a known fault of this DeepSpeed, and a line for each such fault.

        A fault of the user's own config leaves nothing out: the candidates with it train as that config does.
        """
        of_job, own = job_facts(job), own_facts(job)
        possible = [one for one in known_faults(deepspeed) if one.holds(of_job) is not False]
        faults = tuple(one for one in possible if not one.harmless and not one.holds(own))
        if not faults:
            return self, []
        shown = dataclasses.replace(self, faults=faults)._shown(job)
        return dataclasses.replace(self, faults=shown), [f"{one}: left out" for one in shown]

    def _shown(self, job: Job) -> tuple[Fault, ...]:
        """Return the faults that candidates of this space have."""
        steps = {accumulation for _, accumulation in self.rungs(job)}
        shown = {
            fault.setting
            for family in self.families()
            for fault, facts in self._faults(family, job)
            if any(fault.holds({**facts, **accumulation_facts(job, one)}) for one in steps)
        }
        return tuple(fault for fault in self.faults if fault.setting in shown)


# -- space file --------------------------------------------------------------------------------------------------------
#
# Search spaces as YAML files: finding, reading and validating them. An error names the file, the line and the key.

_DS_KEYS = shipped_json("deepspeed_keys.json")
DS_ZERO_KEYS = frozenset(_DS_KEYS["zero_optimization"])
DS_TOP_LEVEL = frozenset(_DS_KEYS["top_level"])
DS_SECTIONS = {section: frozenset(keys) for section, keys in _DS_KEYS["sections"].items()}
MOST_NODES = 1_000_000  # of a YAML file with its aliases expanded
_EXPECTED = "expected `knobs:` and their values"


def spaces_folder() -> Path:
    """Return the folder of the shipped spaces: in the installed package, or at the top of the repository."""
    package = Path(__file__).parents[1]
    inside = package / "search_spaces"
    return inside if inside.is_dir() else package.parent / "search_spaces"


def shipped_spaces() -> dict[str, Path]:
    """Return the files of the shipped search spaces by name."""
    return {path.stem: path for path in sorted(spaces_folder().glob("*.yaml"))}


def load_space(reference: str | Mapping[str, Any]) -> SearchSpace:
    """Return the shipped space of that name, the space in that file, or the space that the mapping describes.

    Raises:
        UserError: there is none, or it is invalid; the message names file, line and key.
    """
    if isinstance(reference, Mapping):
        try:
            return parse_space(yaml.safe_dump(dict(reference), sort_keys=False), "space")
        except (yaml.YAMLError, RecursionError) as error:
            raise UserError(f"space: expected plain data ({str(error)[:100]})") from None
    shipped = shipped_spaces()
    path = shipped.get(reference, Path(reference).expanduser())
    if reference not in shipped and not path.exists():
        raise UserError(
            f"no search space {reference!r}{did_you_mean(reference, shipped)}: give a file, or {', '.join(shipped)}"
        )
    text = read_text(path, f"search space {path}", "expected YAML with `knobs:` and their values")
    return dataclasses.replace(parse_space(text, str(path)), shipped=reference in shipped)


def parse_space(text: str, file: str = "<space>", node: yaml.Node | None = None, key: str = "") -> SearchSpace:
    """Parse a SearchSpace from YAML text, or from a node of a file that has been parsed, below this key.

    Raises:
        UserError: `file:line: key: problem, and the expected form`.
    """
    return _Parser(text if node is None else yaml.serialize(node), file, key).parse(node)


def compose_yaml(text: str) -> yaml.Node | None:
    """Return the root of a YAML text, or None of an empty one. Nodes that several aliases name are shared.

    Raises:
        YAMLError: the text is no YAML, or its aliases would expand to more than MOST_NODES nodes.
    """
    node = yaml.compose(text, Loader=yaml.SafeLoader)
    if node is not None and (nodes := _expanded_nodes(node, {})) > MOST_NODES:
        endless = math.isinf(nodes)
        why = (
            "an alias lies within what it names" if endless else f"its aliases expand to more than {MOST_NODES} values"
        )
        raise yaml.MarkedYAMLError(problem=why, problem_mark=node.start_mark)
    return node


@contextmanager
def yaml_errors(file: str, expected: str) -> Iterator[None]:
    """Convert errors from reading a YAML file to UserError, with the line if it is known.

    Args:
        expected: the end of the message.
    """
    try:
        yield
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{file}:{mark.line + 1}" if mark else file
        why = " ".join(str(getattr(error, "problem", None) or error).split())
        raise UserError(f"{where}: not YAML ({why}); {expected}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file}: not YAML that can be read ({str(error)[:100]}); {expected}") from None


def _expanded_nodes(node: yaml.Node, known: dict[int, float]) -> float:
    """Return the number of nodes below and including one, with each alias expanded; infinite for one within itself."""
    if id(node) not in known:
        known[id(node)] = math.inf
        pairs = () if isinstance(node, yaml.ScalarNode) else node.value
        inner = (one for pair in pairs for one in (pair if isinstance(pair, tuple) else (pair,)))
        known[id(node)] = 1 + sum(_expanded_nodes(one, known) for one in inner)
    return known[id(node)]


def _name_of(key: str) -> str:
    """Return the knob of a key. A key of `zero_optimization` may be written without that prefix."""
    name = short_name(key)
    bare = name not in KNOBS and not name.startswith(ZERO) and name.split(".")[0] in DS_ZERO_KEYS - DS_TOP_LEVEL
    return short_name(ZERO + name) if bare else name


class _Form(BaseModel, extra="forbid", strict=True):
    pass


class _File(_Form):
    """Top level of a file."""

    name: Any = None
    about: Any = None
    lossy: bool = False
    at_once: int | None = Field(None, ge=0)
    knobs: dict[Any, Any] | None = None
    fixed: dict[Any, Any] | None = None
    levers: dict[Any, Any] | None = None


class _Values(_Form):
    """Values of a knob, and the conditions under which it exists."""

    values: list[Any] = []
    when: dict[Any, Any] = {}


class _Range(_Values):
    """Values of a knob from one number to another."""

    low: int = Field(alias="from")
    high: int = Field(alias="to")
    scale: Literal["linear", "pow2"] = "linear"

    @model_validator(mode="after")
    def _list(self) -> Self:
        if self.scale == "pow2":
            self.values = [2**n for n in range(64) if self.low <= 2**n <= self.high]
        elif self.high - self.low < 10_000:
            self.values = [*range(self.low, self.high + 1)]
        else:
            raise ValueError(f"{self.high - self.low + 1} values are too many: list fewer, or give scale: pow2")
        return self


_AnyForm = TypeVar("_AnyForm", bound=_Form)


class _Parser:
    """Parser of one file; it keeps the line of every key for errors."""

    def __init__(self, text: str, file: str, key: str) -> None:
        self.text, self.file, self.key = text, file, key
        self.lines: dict[tuple[str, ...], int] = {}

    def fail(self, path: tuple[str, ...], message: str) -> UserError:
        line = next((self.lines[path[:n]] for n in range(len(path), -1, -1) if path[:n] in self.lines), 1)
        return UserError(f"{self.file}:{line}: {self.key}{'.'.join(path[1:] or path)}: {message}")

    def parse(self, node: yaml.Node | None) -> SearchSpace:
        with yaml_errors(self.file, _EXPECTED):
            node = compose_yaml(self.text) if node is None else node
            if node is None:
                raise UserError(f"{self.file}:1: the file is empty; {_EXPECTED}")
            self._collect(node, ())
            data = yaml.SafeLoader("").construct_document(node)
            if isinstance(data, dict):
                check_data(data, self.file)
        if not isinstance(data, dict):
            raise UserError(f"{self.file}:1: {_EXPECTED}, found {type(data).__name__}")
        page = self._read(_File, (), data)
        self.lossy = page.lossy
        domains: dict[str, Domain] = {}
        levers: dict[str, Domain] = {}
        for section, into in (("knobs", domains), ("levers", levers), ("fixed", domains)):
            for key, raw in (getattr(page, section) or {}).items():
                self._add(into, (section, str(key)), raw)
        if not domains:
            raise self.fail(("knobs",), "the space has no knobs")
        for name, domain in domains.items():
            for condition, allowed in domain.when:
                if not set(allowed) & set(domains.get(condition, Domain(())).values):
                    raise self.fail(("knobs", name, "when"), f"no {condition} of this space is one of {list(allowed)}")
        name, about = str(page.name or Path(self.file).stem), str(page.about or "")
        space = SearchSpace(name, about, domains, self.text, page.at_once, self.lossy, levers=levers)
        if next(space.families(), None) is None:
            raise self.fail(("knobs",), f"DeepSpeed refuses every setting: {refusal(next(space._settings()))}")
        return space

    def _read(self, form: type[_AnyForm], path: tuple[str, ...], data: object) -> _AnyForm:
        try:
            return form.model_validate(data)
        except ValidationError as error:
            place, problem = first_problem(error, form)
            raise self.fail((*path, *place), problem) from None

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

    def _add(self, domains: dict[str, Domain], path: tuple[str, ...], raw: Any) -> None:
        """Add the knob at this path of the file."""
        name = _name_of(path[1])
        if name not in KNOBS and "." not in name and name not in DS_TOP_LEVEL:
            known = {key.removeprefix(ZERO) for key in KNOBS} | DS_TOP_LEVEL
            raise self.fail(path, f"unknown knob{did_you_mean(name, sorted(known))}; other DeepSpeed keys are dotted")
        self._check_key(path, name)
        if name in domains:
            raise self.fail(path, "is given twice (its short name and its DeepSpeed key are one knob)")
        fixed = path[0] == "fixed"
        if fixed or not isinstance(raw, dict | list):
            raw = [raw]
        if isinstance(raw, list):
            raw = {"values": raw}
        kind = _Values if "values" in raw else _Range
        form = self._read(kind, path, raw)
        if not form.values:
            raise self.fail(path, "has no values")
        checked = tuple(self._check(path, name, value) for value in form.values)
        if len(set(map(repr, checked))) != len(checked):
            raise self.fail(path, "names a value twice")
        if not self.lossy and name in KNOBS and (why := KNOBS[name].lossy) and set(checked) - {KNOBS[name].off}:
            raise self.fail(
                path, f"{why}, so that losses may differ: write `lossy: true` at the top of the space, or leave it out"
            )
        conditions = tuple(self._condition((*path, "when", str(one)), value) for one, value in form.when.items())
        domains[name] = Domain(checked, conditions, kind is _Range, fixed)

    def _check_key(self, path: tuple[str, ...], name: str) -> None:
        """Raise UserError if a space may not set this dotted key."""
        if "." not in name or name in KNOBS:
            return
        section, _, leaf = name.rpartition(".")
        if name.startswith(ZERO) and name.split(".")[1] not in DS_ZERO_KEYS:
            leaf = name.split(".")[1]
            raise self.fail(path, f"DeepSpeed knows no such ZeRO key{did_you_mean(leaf, DS_ZERO_KEYS)}")
        if name.split(".")[0] not in DS_TOP_LEVEL:
            raise self.fail(
                path, f"a space sets no section {name.split('.')[0]!r} of DeepSpeed{did_you_mean(name, DS_TOP_LEVEL)}"
            )
        if section in DS_SECTIONS and leaf not in DS_SECTIONS[section]:
            raise self.fail(path, f"DeepSpeed knows no such key of {section}{did_you_mean(leaf, DS_SECTIONS[section])}")

    def _condition(self, path: tuple[str, ...], raw: Any) -> tuple[str, tuple[Value, ...]]:
        """Return a knob and its values, in the knob's own notation."""
        name = _name_of(path[-1])
        return name, tuple(self._check(path, name, value) for value in (raw if isinstance(raw, list) else [raw]))

    def _check(self, path: tuple[str, ...], name: str, value: Any) -> Value:
        if name not in KNOBS:
            if not isinstance(value, bool | int | float | str) or value in (math.inf, -math.inf) or value != value:
                raise self.fail(path, f"expected a number, a word or true/false, found {value!r}")
            return value
        try:
            return knob_value(KNOBS[name], value)
        except ValueError as error:
            raise self.fail(path, str(error)) from None


# -- narrowing to a job ------------------------------------------------------------------------------------------------
#
# Search space narrowed to one job and one machine: choices that the job lacks or the machine cannot run are removed.


class Fitted(NamedTuple):
    """Space narrowed to a job and a machine, and a line for each setting that was left out, with its reason."""

    space: SearchSpace
    notes: list[str]


def fitted(space: SearchSpace, job: Job, hardware: Hardware, *, here: bool = True) -> Fitted:
    """Return the space for this job on this machine, and the settings that were left out.

    Args:
        here: ranks would run in the environment of this call. If False, a study is read: other packages may be installed, or this
            version may know more needs of a knob. Then knobs fixed by hand may be left out, too.

    Raises:
        UserError: a knob fixed by hand, in the space or in the user's own config, is not available here; or a space of the user's
            has a knob that the installed DeepSpeed does not know.
    """
    own = for_job(space, job)
    around = RequirementInputs.of(job, hardware, space.lossy)
    if here:
        _check_own(around)
    else:
        around = dataclasses.replace(around, deepspeed=READ, packages=False)
    knobs: dict[str, Domain] = {}
    lacking: dict[str, list[str]] = {}  # missing requirement -> settings that lack it
    referred = {condition for domain in own.knobs.values() for condition, _ in domain.when}
    for name, domain in {**own.levers, **own.knobs}.items():
        missing = {value: why for value in domain.values if (why := unmet(name, value, around))}
        for value, why in missing.items():
            lacking.setdefault(why, []).append(f"{name} {value}")
        left = _left(name, domain, missing, around, space)
        if left is not None and (name in referred or not _nothing_but_off(name, left, around)):
            knobs[name] = left
    notes = [f"{', '.join(settings)} {why}: left out" for why, settings in lacking.items()]
    levers = {name: knobs.pop(name) for name in own.levers if name in knobs}
    narrowed = dataclasses.replace(own, knobs=knobs, levers=levers)
    unread = narrowed.never_read() & KNOBS.keys() & space.knobs.keys()
    for name in sorted(unread):
        why = f"{name} is read by no candidate of space {space.name}: it needs {KNOBS[name].read.where}"
        # An error is raised only for knobs that gain nothing without their conditions. Buckets and offloading that a stage does
        # not read are common.
        if here and knobs[name].fixed and KNOBS[name].needs and name not in FIRST_ORDER:
            raise UserError(f"{why}; leave it out of `fixed`, or give it what it needs")
        notes.append(f"{why}: left out")
        del knobs[name]
    whole = dataclasses.replace(narrowed, knobs=knobs)
    if not here:
        return Fitted(whole, notes)
    without, faults = whole.without_faults(job, around.deepspeed)
    return Fitted(without, [*notes, *faults])


def _check_own(around: RequirementInputs) -> None:
    """Raise UserError for a knob of the user's own config with which DeepSpeed fails here.

    DeepSpeed may ignore other knobs, and a script with them was seen to start.
    """
    around = dataclasses.replace(around, lossy=True)
    for name, value in settings_of(around.job.base_config).items():
        if name not in KNOBS or is_off(name, value, around.job.precision):
            continue
        fatal = (why for need in KNOBS[name].needs if need in FATAL and (why := need(value, around)))
        if why := _unknown(name, around.deepspeed) or next(fatal, ""):
            raise UserError(f"your own DeepSpeed config: {name} {value} {why}; leave it out")


def _left(
    name: str, domain: Domain, missing: dict[Value, str], around: RequirementInputs, space: SearchSpace
) -> Domain | None:
    """Return the knob's domain without values that lack a requirement, or None if no value is left."""
    if not missing:
        return domain
    value, why = next(iter(missing.items()))
    unknown = not space.shipped and why == _unknown(name, around.deepspeed)
    if around.packages and (domain.fixed or unknown):
        raise UserError(f"space {space.name}: {name} {value} {why}; leave it out")
    left = tuple(one for one in domain.values if one not in missing)
    if not left and KNOBS[name].off is None:
        raise UserError(f"space {space.name}: {name} {value} {why}; add another value, or leave {name} out")
    return dataclasses.replace(domain, values=left) if left else None


def _nothing_but_off(name: str, domain: Domain, around: RequirementInputs) -> bool:
    """Check that a knob's only remaining value is its absence, and that a config may leave it out.

    Either the knob was narrowed to that value, or this DeepSpeed refuses its name.
    """
    knob = KNOBS.get(name)
    off = knob is not None and all(is_off(name, one) for one in domain.values)
    return off and (not domain.fixed or bool(_unknown(name, around.deepspeed)))


def unmet(name: str, value: Value, around: RequirementInputs) -> str:
    """Return the requirement that a setting lacks here, as the predicate of a sentence; empty if it lacks none."""
    knob = KNOBS.get(name)
    if knob is None or is_off(name, value, around.job.precision):
        return ""
    asked = (need for need in knob.needs if around.packages or need not in OF_PACKAGES)
    return _unknown(name, around.deepspeed) or next((why for need in asked if (why := need(value, around))), "")


def _unknown(name: str, deepspeed: Release) -> str:
    """Return why a DeepSpeed does not know the knob, and which versions do; empty if it knows it."""
    since = KNOBS[name].since
    if deepspeed < since:
        return f"is not known to deepspeed {dotted(deepspeed)}: {dotted(since)} or newer knows it"
    return ""


def for_job(space: SearchSpace, job: Job) -> SearchSpace:
    """Return the space for this job.

    Knobs that the user's own config sets and the space does not tune are fixed at their values. Knobs that cannot be passed to
    the job's script or workload are left out.
    """
    knobs = dict(space.knobs)
    for name, value in knobs_of(job.base_config).items():
        knobs.setdefault(name, Domain((value,)))
    if job.workload is not None:
        for knob in TRACED_KNOBS:
            knobs.pop(knob, None)
    if not job.lengths or job.task != CAUSAL:
        knobs.pop(PACKING, None)
    if job.loss != FULL or job.task != CAUSAL:
        knobs.pop(LOSS, None)
    seen = job.profile
    space = dataclasses.replace(space, levers={name: one for name, one in space.levers.items() if name in seen.levers})
    if job.script is None:
        return dataclasses.replace(space, knobs=knobs)
    for knob in MODEL_KNOBS:
        knobs.pop(knob, None)
    if not seen.checkpointing:
        knobs.pop(CHECKPOINTING, None)
    if seen.checkpointed:  # no switch for it was found, so that it stays on
        knobs.setdefault(CHECKPOINTING, Domain((True,)))
    if seen.batch_note:
        knobs |= {MICRO_BATCH: Domain((seen.micro_batch,)), ACCUMULATION: Domain((seen.accumulation,))}
    return dataclasses.replace(space, knobs=knobs)
