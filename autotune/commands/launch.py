"""Supervised training from a study or a plan."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from fractions import Fraction
from pathlib import Path
from typing import Any

from autotune.commands.environment import SEVERAL_MACHINES, TRAINING, Nodes, check_executor, named_nodes, ranks_python
from autotune.commands.request import Request
from autotune.commands.setup import FREE, LaunchSetup, PlanSetup, launch_setup
from autotune.commands.trust import Ask, remembered
from autotune.errors import NothingFits, UserError
from autotune.predict.trace import traced_predictor
from autotune.problem.candidate import ACCUMULATION, ALLOCATOR_VARIABLES, MICRO_BATCH, Candidate
from autotune.problem.ds_config import BATCH, global_batch_of, read_config, value_at
from autotune.problem.hardware import Hardware, detect
from autotune.problem.job import Job, Script
from autotune.recovery.ladder import Rung, ladder_path, recovery_ladder, stored_ladder, write_ladder
from autotune.recovery.supervisor import LaunchSummary, Supervisor, check_script
from autotune.script.argument_files import argument_names, find_key, knob_values, launcher_file, own_config, own_files
from autotune.script.argument_writer import with_declared_files
from autotune.script.command_line import ACCELERATE, framework_of
from autotune.script.parse_command import launchers_config
from autotune.script.profile import over_present, own_samples
from autotune.script.script import KNOWN_FLAGS, config_path, line_of, wrong_batch_warning
from autotune.script.source_digests import SOURCES, digests
from autotune.search.certificate import trains_otherwise
from autotune.search.fingerprint import measured_under, other_variables, watched_variables
from autotune.search.storage import check_no_links, make_study_folder, output_folder
from autotune.search.study import StudyStore
from autotune.util.units import counted
from autotune.workers.gpu_locks import lock_gpus


@dataclasses.dataclass(frozen=True)
class _Training:
    """The job to train, the hardware for which it was tuned or planned, and the configs under which it may run."""

    job: Job  # includes the script
    hardware: Hardware
    ladder: list[Rung]
    folder: Path
    threads: int | None = None  # CPU threads per rank during measurement; None: nothing was measured


def launch_training(
    request: Request, print_line: Callable[[str], None] = print, *, ask: Ask | None = None
) -> LaunchSummary:
    """Train a script to its end under a study's winner, or without a study under the best config of a plan.

    Args:
        request: its `study` or its `model`, and its `script`.
        print_line: receives lines for display.
        ask: asks the reader a question; None without a terminal.

    Raises:
        UserError: bad input, or a study of another script.
        NothingFits: no config is predicted to fit.
    """
    check_executor(request.executor)
    if not request.script:
        study = request.study if request.study and not request.study.endswith(".py") else "STUDY"
        whose = f"--model {request.model} …" if request.model else shlex.quote(study)
        raise UserError(f"launch needs the script to train: `autotune launch {whose} -- train.py its arguments`")
    if request.model and request.study is not None:
        raise UserError("--model plans a training without a study. Remove --model, or the study.")
    known = remembered(request, ask)
    request = dataclasses.replace(request, maps=known.maps_under(request.maps))
    python = ranks_python(request.python, print_line, needed=TRAINING, remembered=known.python)
    with named_nodes(request, print_line, python, lasting=True) as nodes:
        return _launch(launch_setup(request, nodes, python), nodes, known.job, print_line)


def _launch(
    setup: LaunchSetup, nodes: Nodes | None, accepted: Job | None, print_line: Callable[[str], None]
) -> LaunchSummary:
    request = setup.request
    if request.study is not None:
        # raises if there is none
        store = StudyStore.load(request.study, request.storage or None, interpreter=setup.interpreter)
        assert accepted is not None
        accepted = dataclasses.replace(accepted, interpreter=setup.interpreter)
        training = _from_study(setup, store, accepted, print_line)
    else:
        training = _from_plan(setup)
    found = _machines(training.job, training.hardware, setup.memory_cap_bytes, nodes)
    who = f"launch of {setup.script.target}"
    cluster = nodes.cluster if nodes is not None else None
    if training.job.script is not None and (
        half := wrong_batch_warning(training.job.script, training.ladder[0].candidate)
    ):
        print_line(half)
    print_line(
        f"{counted(len(training.ladder), 'config')} on the ladder; {counted(request.max_restarts, 'restart')} at most without "
        "a newer checkpoint"
    )
    supervisor = Supervisor(
        training.job,
        found,
        training.ladder,
        training.folder,
        max_restarts=request.max_restarts,
        silent_seconds=setup.silent_seconds,
        convert=request.convert,
        print_line=print_line,
        threads=training.threads,
    )
    if cluster is not None:
        cluster = dataclasses.replace(cluster, who=who, cancelled=lambda: supervisor.stopped, echo=True)
    with lock_gpus(found, who, print_line) if cluster is None else nullcontext():  # agents lock their own GPUs
        summary = supervisor.run(cluster)
    return summary


def _machines(job: Job, tuned: Hardware, memory_cap_bytes: int | None, nodes: Nodes | None) -> Hardware:
    """Return the hardware for the training, equal in size to the hardware for which it was tuned or planned.

    Memory that was reserved for another process stays reserved.

    Raises:
        UserError: there are fewer devices, another number of machines, or too little memory besides the reserved one.
    """
    if nodes is None:
        if tuned.nodes > 1:
            raise UserError(
                f"the study was tuned on {tuned.nodes} nodes with {tuned.per_node} devices each. Add {SEVERAL_MACHINES}"
            )
        return detect(
            tuned.device,
            tuned.count,
            memory_cap_bytes=memory_cap_bytes,
            headroom=tuned.headroom,
            interpreter=job.interpreter,
        ).reserving(tuned.reserve_bytes)
    if nodes.cluster is None:
        path = str(Path.cwd())
        found = nodes.reach(tuned.device, tuned.per_node, memory_cap_bytes, tuned.headroom, path, tuned.nodes)
    else:  # for the plan
        found = tuned
    if (found.nodes, found.count) != (tuned.nodes, tuned.count):
        raise UserError(
            f"the study was tuned on {tuned.nodes} nodes with {tuned.per_node} devices each, not on {found.nodes} with "
            f"{found.per_node}. Select as many (--nodes, --include), or tune on these"
        )
    return found.reserving(tuned.reserve_bytes)


def _from_study(setup: LaunchSetup, store: StudyStore, job: Job, print_line: Callable[[str], None]) -> _Training:
    """Return a training under a study's winner, with the study's findings about the script that the reader accepted (`job`)."""
    script, tuned = setup.script, job
    check_script(store.name, job, script.target)
    typed = setup.typed
    if typed.ranks not in (None, store.hardware.per_node):
        each = " on each node" if store.hardware.nodes > 1 else ""
        raise UserError(
            f"study {store.name} was tuned with {store.hardware.per_node} ranks{each}, and `{typed.ranks_source}` starts "
            f"{typed.ranks}. Start as many as the study"
        )
    winner = store.winner
    if winner is None:
        raise UserError(
            f"study {store.name} has no winner yet: `autotune run --study {shlex.quote(store.name)} …` continues it"
        )
    if job.script is None:
        print_line(
            f"study {store.name} measured {job.model.name} with synthetic batches, not a script: its config is used"
        )
    known = job.script or script
    flags = tuple({**dict(known.flags), **dict(script.flags)}.items())
    script = dataclasses.replace(script, flags=flags, profile=known.profile, ds_config=_config_beside(known, script))
    script = with_declared_files(script)
    launched = Launched(store.name, job, winner.candidate, script, store.fingerprint.get(SOURCES, {}))
    job, lines = launched.checked(setup.global_batch_size)
    for line in lines:
        print_line(line)
    if line := about_variables(store.name, store.fingerprint, winner.candidate):
        print_line(line)
    ladder = ladder_of(store, tuned, winner.candidate, setup.request.convert)
    return _Training(dataclasses.replace(job, script=script), store.hardware, ladder, _folder_of(store), store.threads)


def _folder_of(store: StudyStore) -> Path:
    """Return the folder that the training writes to: the study's, or if that is another user's, one in the current folder.

    Raises:
        UserError: it has links.
    """
    folder = store.folder
    if folder is None or output_folder(folder) != folder:
        return Path("runs") / store.name
    check_no_links(folder)
    return folder


def _config_beside(known: Script, script: Script) -> str | None:
    """Return the DeepSpeed config that no word of the script itself names.

    The launcher's present config is returned. If the study had its own by --ds-config, which took precedence over the
    launcher's, that is returned.
    """
    given = known.ds_config is not None and known.ds_config != launchers_config(line_of(known), known.files, known.cwd)
    return known.ds_config if given else script.ds_config or known.ds_config


def ladder_of(store: StudyStore, job: Job, top: Candidate, convert: bool) -> list[Rung]:
    """Return the recovery ladder of a study's winner: as `run` wrote it, or a new one if none was written for this winner.

    A new one is built from the study's measurements, and from predictions that its outcomes have calibrated.
    """
    folder = store.folder
    if not convert and folder is not None:
        known = stored_ladder(folder, store.name)
        if known and known[0].candidate == top:
            return known
    unprotected = dataclasses.replace(job, unprotected=True)  # as the training itself, whose code was accepted
    predictor = traced_predictor(unprotected, store.hardware)
    for record in store.records():
        if record.outcome is not None:
            predictor.observe(record.candidate, record.outcome)
    ladder = recovery_ladder(
        top,
        store.searched_space(),
        unprotected,
        predictor,
        store.measured(),
        store.failed(),
        convert=convert,
        trains_otherwise=trains_otherwise(store.job, store.records()),
    )
    if not convert and folder is not None and output_folder(folder) == folder:
        write_ladder(ladder_path(folder, store.name), ladder, job)
    return ladder


def _from_plan(setup: LaunchSetup) -> _Training:
    """Return a training under the best config of a plan for this machine, with a ladder below it."""
    assert setup.plan is not None
    assert setup.folder is not None
    plan = setup.plan
    ladder = _planned_ladder(plan, setup.request.convert)
    make_study_folder(setup.folder)
    return _Training(dataclasses.replace(plan.job, script=setup.script), plan.hardware, ladder, setup.folder)


def _planned_ladder(plan: PlanSetup, convert: bool) -> list[Rung]:
    predictor = traced_predictor(plan.job, plan.hardware, widened=True)
    candidates, _ = predictor.buildable(plan.space.candidates(plan.job))
    ranked = predictor.ranked(predictor.table(candidates))
    if not ranked:
        raise NothingFits(f"nothing of space {plan.space.name} is predicted to fit: `autotune plan` says what would")
    return recovery_ladder(candidates[ranked[0]], plan.space, plan.job, predictor, {}, convert=convert)


# -- launched command --------------------------------------------------------------------------------------------------
#
# The two commands are compared with each other, not with the observations of the first. A script may count its batch by
# its own rules, and a change of the words changes its steps by the same factor.

_TRAINERS = {MICRO_BATCH: 8, ACCUMULATION: 1}  # defaults of transformers' TrainingArguments
_OFF = ("false", "False", "0", "no")


@dataclasses.dataclass(frozen=True)
class Launched:
    """A launched command, and the study under whose winner it trains.

    Attributes:
        job: the study's.
        script: the launched script, with the study's findings about it.
        sources: digests of the files that the study's script used, by path.
    """

    study: str
    job: Job
    winner: Candidate
    script: Script
    sources: Mapping[str, str]

    def checked(self, asked: int | str | None) -> tuple[Job, list[str]]:
        """Return the job with the command's present precision, and lines about differences from the measured job.

        Args:
            asked: samples per optimizer step that the caller wants, or `free`: the study's; None: the command's.

        Raises:
            UserError: the command's steps have another number of samples than the study's.
        """
        config = self._edited_config()
        lines = self._about_batch(asked, config)
        return self._about_arithmetic(config, lines)

    # -- the batch ---------------------------------------------------------------------------------------------------

    def _about_batch(self, asked: int | str | None, config: dict[str, Any] | None) -> list[str]:
        target, tuned = self.script.target, self.winner.rows_per_rank * self.job.data_ranks
        if asked not in (None, FREE, tuned):
            raise UserError(
                f"--global-batch-size {asked}: study {self.study} was tuned for {tuned} samples per optimizer step. Give that, "
                f"or tune again with {asked}"
            )
        now, untold = self._samples_now(config)
        if asked is not None or now in (None, tuned, self._first_samples):
            told = untold and asked is None
            return [f"{target} no longer sets its batch: {tuned} samples per optimizer step, as tuned"] if told else []
        if self.script.holds_batch:
            return [f"{target} sets {now} samples per optimizer step now, and the study measured {self._first_samples}"]
        if self.job.global_batch_size is None:  # the study has chosen it
            return [
                f"{target} sets {now} samples per optimizer step; the study was free to choose, and {tuned} are trained"
            ]
        raise UserError(
            f"{target} sets {now} samples per optimizer step, and study {self.study} was tuned for {tuned}. Change the script, "
            f"tune again with its batch, or give --global-batch-size {tuned} to train with the study's"
        )

    @property
    def _first_samples(self) -> int | None:
        """Samples per step of the tuned script in its probe run; None if no script was tuned."""
        first = self.job.script
        return own_samples(first, self.job.ranks) if first is not None and "micro_batch" in first.profile else None

    def _samples_now(self, config: dict[str, Any] | None) -> tuple[int | None, bool]:
        """Return the samples per step by the command, or None, and whether a setting was dropped whose default is unknown.

        Only the script knows such a default.
        """
        first, before = self.job.script, self._first_samples
        if first is None or before is None:
            return self._samples_of_words(config or {}), False
        through = bool(first.profile.get("through_arguments"))
        trainers, share, untold, unchanged = through and framework_of(first) is None, Fraction(1), False, []
        for knob, name in ((MICRO_BATCH, "micro_batch"), (ACCUMULATION, "accumulation")):
            then, now = _command_batch_size(first, knob), _command_batch_size(self.script, knob)
            if now is None and then is not None:
                default = _TRAINERS[knob] if trainers and _said_to_trainer(first, knob) else None
                now = default or (_count(config, knob) if config is not None and not through else None)
            changed = Fraction(now, then or int(first.profile[name])) if now is not None else Fraction(1)
            unchanged += [knob] if changed == 1 else []
            share *= changed if not first.loop_cuts else 1  # the engine's batch is a whole step's, however it is cut
            untold |= now is None and then is not None
        if config is not None and not through:
            share *= self._share_of(first.profile["config"], config, unchanged)
        return round(before * share), untold

    def _samples_of_words(self, config: dict[str, Any]) -> int | None:
        """Return the samples per step of a script without a probe run: from its words, or else from its config."""
        words = {knob: size for knob in _TRAINERS if (size := _command_batch_size(self.script, knob)) is not None}
        told = {**config, **words}
        if len(words) == len(_TRAINERS):
            told.pop(BATCH, None)
        elif told.get(ACCUMULATION) == "auto" and _said_to_trainer(self.script, MICRO_BATCH):
            told[ACCUMULATION] = _TRAINERS[ACCUMULATION]
        return global_batch_of(told, self.job.ranks)[0]

    def _share_of(self, old: dict[str, Any], new: dict[str, Any], knobs: Sequence[str]) -> Fraction:
        """Return the factor by which an edited config enlarges the steps, in these knobs."""
        then, now = (global_batch_of(one, self.job.ranks)[0] for one in (old, new))
        if len(knobs) == len(_TRAINERS) and then and now:
            return Fraction(now, then)
        share = Fraction(1)
        for knob in knobs:
            then, now = _count(old, knob), _count(new, knob)
            share *= Fraction(now, then) if then and now else 1
        return share

    # -- the config --------------------------------------------------------------------------------------------------

    def _edited_config(self) -> dict[str, Any] | None:
        """Return the DeepSpeed config that the command holds or names now.

        None is returned if the config is in code, or is the same file as in the probe run. A script may change the config that it
        reads, so that comparing the two would show a difference without an edit.
        """
        path = config_path(self.script)
        inside = own_config(self.script) if path is None else None
        if path is None:
            return inside if isinstance(inside, dict) else None
        try:
            found = read_config(path)
        except (OSError, ValueError):
            return None  # the training itself reports it
        same = self.sources.items() & digests([path], self.script.cwd).items()
        return found if isinstance(found, dict) and not same else None

    def _about_arithmetic(self, config: dict[str, Any] | None, lines: list[str]) -> tuple[Job, list[str]]:
        first, job = self.job.script, self.job
        if first is None or "config" not in first.profile:
            return job, lines
        others = []
        if config is not None and (old := _optimizer(first.profile["config"])) != (new := _optimizer(config)):
            others += [f"optimizer {new or 'of its own'}, not {old or 'of its own'}"]
        before, after = (_value(one, "optim") or "(its default)" for one in (first, self.script))
        if before != after:
            others += [f"--optim {after}, not {before}"]
        precision = over_present(job, config).precision if config is not None else job.precision
        if precision == job.precision and first.profile.get("through_arguments"):
            precision = self._told_precision(first)
        if precision != job.precision:
            others += [f"precision {precision}, not {job.precision}"]
            job = dataclasses.replace(job, precision=precision)
        if others:
            told = "; ".join(others)
            lines = [
                *lines,
                f"trained otherwise than measured, as the command says now ({told}): memory and speed may differ",
            ]
        return job, lines

    def _told_precision(self, first: Script) -> str:
        """Return the precision of a Trainer's arguments if they differ from the study's; else the job's."""
        then, now = ([_is_on(one, name) for name in ("bf16", "fp16")] for one in (first, self.script))
        if then == now:
            return self.job.precision
        return "bf16" if now[0] else "fp16" if now[1] else "fp32"


def about_variables(study: str, fingerprint: dict[str, Any], winner: Candidate) -> str:
    """Return a line about variables of this process that differ from those of the study's measurement; empty if none do."""
    other = other_variables(fingerprint)
    allocators = (_allocator(own, winner) for own in (measured_under(fingerprint), watched_variables()))
    if len({*allocators}) == 1:  # for example, the winner's own knob was exported: `start it with …`
        other = {name: values for name, values in other.items() if name not in ALLOCATOR_VARIABLES}
    if not other:
        return ""
    told = [f"{name} {_shown(now)} here, {_shown(then)} there" for name, (then, now) in other.items()]
    return f"trained under this shell's variables, not those that study {study} was measured under: {'; '.join(told)}"


def _allocator(own: Mapping[str, str], winner: Candidate) -> str:
    """Return the setting that torch's allocator reads in a rank of the winner."""
    variables = {**own, **winner.environment(own)}
    return next((variables[name] for name in ALLOCATOR_VARIABLES if variables.get(name)), "")


def _shown(value: str | None) -> str:
    return "not set" if value is None else shlex.quote(" ".join(value.split()))


def _command_batch_size(script: Script, knob: str) -> int | None:
    """Return a batch size from the command: from its last matching word, or else from its files or its launcher."""
    words = dataclasses.replace(script, files=())
    flag = dict(script.flags).get(knob) or KNOWN_FLAGS[knob]
    found = [*knob_values(script, knob), *knob_values(dataclasses.replace(words, flags=((knob, flag),)), knob)]
    line, file = line_of(script), launcher_file(script)
    if line.kind == ACCELERATE and knob == ACCUMULATION:
        inside = (file.data.get("deepspeed_config") or {}) if file is not None else {}
        found = [inside.get(knob), line.options.get(knob), *found]
    numbers = [int(word) for one in found if (word := str(one)).isdigit() and int(word) > 0]
    return numbers[-1] if numbers else None


def _said_to_trainer(script: Script, knob: str) -> bool:
    """Check that a Trainer's own argument sets it, with a known default. Only the script knows the defaults of its flags."""
    name = KNOWN_FLAGS[knob].removeprefix("--")
    flags = (word.removeprefix("--").replace("-", "_") for word in argument_names(script.argv) if word.startswith("--"))
    return name in flags or any(find_key(file.data, (name,)) is not None for file in own_files(script))


def _count(config: dict[str, Any], knob: str) -> int | None:
    """Return a size in a config; None if the config leaves it open, or to its caller by `"auto"`."""
    value = config.get(knob)
    return int(value) if isinstance(value, int | float) and value >= 1 else None


def _optimizer(config: dict[str, Any]) -> str:
    section = config.get("optimizer")
    return str(section.get("type", "")).lower() if isinstance(section, dict) else ""


def _value(script: Script, name: str) -> str | None:
    """Return a Trainer's argument from the command's words, or else from its files.

    The result is empty for a flag without a value, and None if the argument is missing.
    """
    found = None
    for file in own_files(script):
        place = find_key(file.data, (name,))
        found = found if place is None else str(value_at(file.data, place))
    for at, word in enumerate(script.argv):
        given, equals, value = word.partition("=")
        if given == f"--{name}":
            after = "".join(script.argv[at + 1 : at + 2])
            found = value if equals else "" if after.startswith("-") else after
    return found


def _is_on(script: Script, name: str) -> bool:
    return (found := _value(script, name)) is not None and found not in _OFF
