"""Programs that a study or a table names: recorded facts to read, never something to run.

A `RecordedJob` cannot be passed to a process (`Job.order` raises), and a `RecordedPython` is no path. Only `commands.trust` turns
them into what runs, after the reader's command line named them or the reader accepted them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.errors import UserError
from autotune.problem.candidate import Candidate
from autotune.problem.job import Job
from autotune.script.argument_files import PRODUCTS
from autotune.script.parse_command import declared

_PLAIN = re.compile(r"\w*")  # transformers' own attention; a name with a slash is a kernel from the Hub


@dataclass(frozen=True)
class RecordedItem:
    """A thing from a study that this machine would run, load or write."""

    kind: str  # for display: "workload"
    what: str

    def __str__(self) -> str:
        return f"{self.kind} {self.what}"


@dataclass(frozen=True)
class RecordedPython:
    """The Python in which a study was measured."""

    shown: str

    def __str__(self) -> str:
        return self.shown


class RecordedJob(Job):
    """Job that names code, as recorded in a study or a table."""

    def order(self) -> dict[str, Any]:
        """Refuse to be run or traced.

        Raises:
            UserError: always.
        """
        named = ", ".join(map(str, code_of(self)))
        raise UserError(f"it names code that this command line does not: {named}; look at it, then add --trust")

    def __eq__(self, other: object) -> bool:
        return vars(self) == vars(other) if isinstance(other, Job) else NotImplemented

    __hash__ = Job.__hash__


def recorded_job(data: Mapping[str, Any]) -> Job:
    """Return the job in a study's or a table's JSON: a RecordedJob if it names code.

    Raises:
        UserError: it is no job.
    """
    try:
        job = Job.from_json(dict(data))
        return RecordedJob.from_json(dict(data)) if code_of(job) else job
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"the job that was recorded cannot be read ({type(error).__name__}: {error})") from None


def code_of(job: Job) -> list[RecordedItem]:
    """Return the code that runs when the job's model is built, except libraries: a workload and a model's remote code."""
    config = job.model.config
    found = []
    if job.workload is not None:
        found.append(RecordedItem("workload", f"{job.workload} ({job.model.source}), called from {Path.cwd()}"))
    if job.model.trust_remote_code:
        found.append(RecordedItem("remote code of", str(config.get("_name_or_path") or job.model.source)))
    return [*found, *_code_in(config)]


def runs_user_code(job: Job) -> bool:
    """Return whether the ranks of a job run more than libraries."""
    return job.script is not None or bool(code_of(job))


def training_names(job: Job) -> list[RecordedItem]:
    """Return what a training under the job's config takes from it, except code: variables, words, files and paths."""
    script = job.script
    found = _paths_in(job.base_config)
    if script is not None:
        found += profile_names(script.profile)
        found += [RecordedItem("option", text) for text in declared(script)]
        found += [RecordedItem("config file", script.ds_config)] if script.ds_config is not None else []
    return found


def profile_names(profile: Mapping[str, Any]) -> list[RecordedItem]:
    """Return what ranks take from a script's profile: variables, words of the command, kernels and paths."""
    variables, spellings = (dict(profile.get(name) or {}) for name in ("variables", "spellings"))
    return [
        *(RecordedItem("variable", f"{name}={value}") for name, value in variables.items()),
        *(RecordedItem("option", f"{flag} {json.dumps(words)}") for flag, words in spellings.items()),
        *(RecordedItem("option", f"{flag} {value}") for flag, value in (profile.get(PRODUCTS) or {}).items()),
        *_code_in(profile.get("model_config")),
        *_paths_in(profile.get("config")),
    ]


def knob_names(candidates: Iterable[Candidate]) -> list[RecordedItem]:
    """Return the paths among candidates' values."""
    return list(dict.fromkeys(one for candidate in candidates for one in _paths_in(candidate.as_dict)))


def _code_in(config: Any) -> list[RecordedItem]:
    """Return the code that a model's configuration names."""
    found = []
    for path, value in _leaves(config):
        key = path.rpartition(".")[2]
        kernel = key in ("use_kernels", "kernel_config") and value
        if key == "auto_map":
            found.append(RecordedItem("remote code", f"{path}={value}"))
        elif kernel or (key.endswith("implementation") and value is not None and not _PLAIN.fullmatch(str(value))):
            found.append(RecordedItem("kernel", f"{path}={value}"))
    return found


def _paths_in(config: Any) -> list[RecordedItem]:
    """Return the paths that DeepSpeed reads or writes under a DeepSpeed config."""
    return [
        RecordedItem("path of the DeepSpeed config", f"{path}={value}")
        for path, value in _leaves(config)
        if isinstance(value, str) and (re.search(r"[/\\~]", value) or re.search(r"(path|file|dir)$", path))
    ]


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted path, value) of every value in a JSON value that is no container; `auto_map` is yielded whole."""
    left = [(path, value)]
    while left:
        path, value = left.pop()
        if path.rpartition(".")[2] == "auto_map":
            yield path, value
        elif isinstance(value, dict):
            left += [(f"{path}.{key}" if path else str(key), one) for key, one in value.items()]
        elif isinstance(value, list | tuple):
            left += [(path, one) for one in value]
        else:
            yield path, value
