"""Facts of a study that another user may have made: data to read. They supply no code.

A `RecordedJob` cannot be passed to a process: `Job.order` raises. A training takes from a study only its candidates and findings
about the script (`with_findings`). Everything that could run or load a program is on the command line of the reader.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from autotune.errors import UserError
from autotune.problem.candidate import BATCH_KEYS, Candidate
from autotune.problem.import_time_env import of_the_device
from autotune.problem.job import Job, Script, ScriptProfile
from autotune.script.argument_files import argument_names
from autotune.script.argument_writer import integers_in_files
from autotune.script.carriers import OF_A_BATCH, with_profile
from autotune.script.environment import VARIABLE
from autotune.script.parse_command import declared, launchers_config
from autotune.script.script import line_of
from autotune.util.bounds import leaves

_PLAIN = re.compile(r"\w*")  # transformers' own attention; a name with a slash is a kernel from the Hub
_PATH = re.compile(r"[/\\~]")
_FLAG = re.compile(r"-[\w.-]+")  # without a value, which could be a path


class RecordedJob(Job):
    """Job that names code, as recorded in a study."""

    def order(self) -> dict[str, Any]:
        """Refuse to be run or traced.

        Raises:
            UserError: always.
        """
        raise UserError(
            f"a study supplies no code, and this one names {', '.join(code_of(self))}. Tune your own job first."
        )

    def __eq__(self, other: object) -> bool:
        return vars(self) == vars(other) if isinstance(other, Job) else NotImplemented

    __hash__ = Job.__hash__


def recorded_job(data: Mapping[str, Any]) -> Job:
    """Return the job in a study's JSON: a RecordedJob if it names code.

    Raises:
        UserError: it is no job.
    """
    try:
        job = Job.from_json(dict(data))
        return RecordedJob.from_json(dict(data)) if code_of(job) else job
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise UserError(f"the job that was recorded cannot be read ({type(error).__name__}: {error})") from None


def code_of(job: Job) -> list[str]:
    """Return the code that runs when the job's model is built, except libraries: a workload and a model's remote code."""
    config = job.model.config
    found = []
    if job.workload is not None:
        found.append(f"workload {job.workload} ({job.model.source})")
    if job.model.trust_remote_code:
        found.append(f"remote code of {config.get('_name_or_path') or job.model.source}")
    return [*found, *_code_in(config)]


def runs_user_code(job: Job) -> bool:
    """Return whether the ranks of a job run more than libraries."""
    return job.script is not None or bool(code_of(job))


def job_to_train(job: Job, script: Script) -> Job:
    """Return the job of a training of a typed script, under a recorded job.

    The training builds its own model. Paths in the recorded DeepSpeed config are left out: the script's own config has those
    that it needs.
    """
    fields = {one.name: getattr(job, one.name) for one in dataclasses.fields(Job)}
    base = {key: value for key, value in job.base_config.items() if not _names_path({key: value})}
    model = dataclasses.replace(job.model, config={}, trust_remote_code=False)
    return Job(**{**fields, "script": script, "workload": None, "model": model, "base_config": base})


def check_candidate(study: str, candidate: Candidate) -> None:
    """Check that a study's candidate sets no path.

    Raises:
        UserError: it sets one, to which a training would write.
    """
    for name, value in candidate.knobs:
        if _names_path({name: value}):
            raise UserError(
                f"study {study} sets {name} to {value}, and a study supplies no path. Put it into your DeepSpeed config, and "
                "tune without that knob."
            )


# -- findings about a script -------------------------------------------------------------------------------------------


def options_to_type(known: Script, typed: Script) -> str:
    """Return the options that the typed command lacks and a study does not supply, as they are typed."""
    known_flags = known.profile.found_flags
    missing = [
        f"--map {knob}={flag}"
        for knob, flag in declared(known)
        if known_flags.get(knob) != flag and knob not in dict(typed.flags)
    ]
    if _given_config(known) and not _given_config(typed):
        missing.append(f"--ds-config {shlex.quote(str(known.ds_config))}")
    return " ".join(missing)


def with_findings(study: str, known: Script, typed: Script) -> Script:
    """Return the typed script with a study's findings about it.

    Raises:
        UserError: the study's command had something that the typed one lacks; the message says what to add.
    """
    if missing := options_to_type(known, typed):
        raise UserError(
            f"study {study} was tuned with {missing}, and what a study names is typed again: add it to the command line"
        )
    profile = data_of(known.profile, typed)
    for name in known.profile.variables.keys() - profile.variables.keys():
        raise UserError(
            f"study {study} was measured with {name}={known.profile.variables[name]}, which its script sets, and a study "
            f"supplies no paths. Set {name} in front of autotune."
        )
    if left := known.profile.found_flags.keys() & {*BATCH_KEYS} - profile.found_flags.keys():
        flags_left = ", ".join(sorted(known.profile.found_flags[knob] for knob in left))
        raise UserError(
            f"study {study} changes its batch by {flags_left}, which is not on the command line, and a study supplies no flags. "
            "Add it with your own batch size."
        )
    return with_profile(typed, profile)


def _given_config(script: Script) -> bool:
    """Check that a script's DeepSpeed config is from `--ds-config`, and not from its launcher."""
    return script.ds_config not in (None, launchers_config(line_of(script), script.files, script.cwd))


def data_of(profile: ScriptProfile, typed: Script) -> ScriptProfile:
    """Return the findings about a script that are data, whoever recorded them.

    A found flag carries a batch size. Its name tells so, or it is on the typed command, in its files, or a variable that is set
    or that the script reads. A spelling is the flag itself, switched or negated. A variable belongs to the device and is no path,
    unless this process has it.
    """
    variables_here = [f"{VARIABLE}{name}" for name in {**os.environ, **dict(typed.environment), **profile.environment}]
    names = {*argument_names(typed.argv), *integers_in_files(typed), *variables_here}

    def is_typed(flag: object) -> bool:
        text = str(flag)
        telling = _FLAG.fullmatch(text) and OF_A_BATCH.search(text)
        return text in names or telling is not None

    def is_plain(name: str, value: str) -> bool:
        return os.environ.get(name) == value or (bool(of_the_device([name])) and not _PATH.search(value))

    return dataclasses.replace(
        profile,
        found_flags={k: flag for k, flag in profile.found_flags.items() if k in BATCH_KEYS and is_typed(flag)},
        spellings={flag: words for flag, words in profile.spellings.items() if _is_spelling(flag, words)},
        variables={name: value for name, value in profile.variables.items() if is_plain(name, str(value))},
    )


def is_data(profile: ScriptProfile, typed: Script) -> bool:
    """Check that recorded findings are data only, so that a trial may use them."""
    return data_of(profile, typed) == profile and not _code_in(profile.model_config, remote=False)


def _is_spelling(flag: str, words: Any) -> bool:
    mine = re.compile(rf"{re.escape(flag)}(=\w*)?|--no-[\w-]+")
    return all(word is None or (isinstance(word, str) and mine.fullmatch(word)) for word in words)


# -- values that name code or paths ------------------------------------------------------------------------------------


def _code_in(config: Any, *, remote: bool = True) -> list[str]:
    """Return the code that a model's configuration names.

    Args:
        remote: include `auto_map`, which transformers only loads if the caller trusts it.
    """
    found = []
    for path, value in _values(config):
        keys = path.split(".")
        kernel = value and not {"use_kernels", "kernel_config"}.isdisjoint(keys)
        if "auto_map" in keys:
            found += [f"remote code {path}={value}"] if remote else []
        elif kernel or (path.endswith("implementation") and not _PLAIN.fullmatch(str(value))):
            found.append(f"kernel {path}={value}")
    return found


def _names_path(config: Any) -> bool:
    """Check that a value, or a value below it, is a path that DeepSpeed reads or writes."""
    found = ((path, value) for path, value in _values(config) if isinstance(value, str))
    return any(_PATH.search(value) or re.search(r"(path|file|dir)$", path) for path, value in found)


def _values(config: Any) -> Iterator[tuple[str, Any]]:
    """Yield (dotted path without positions in lists, value) of every value in a JSON value that is no container."""
    for path, value, is_key in leaves(config):
        if not is_key:
            yield ".".join(one for one in path if not one.isdigit()), value
