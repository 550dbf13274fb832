"""Supervised training from a study or a plan."""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from autotune.commands.environment import (
    SEVERAL_MACHINES,
    TRAINING,
    Nodes,
    check_executor,
    check_studys_python,
    named_nodes,
    ranks_python,
)
from autotune.commands.request import Request
from autotune.commands.setup import FREE, LaunchSetup, PlanSetup, launch_setup
from autotune.errors import NothingFits, UserError, readable
from autotune.executors.local import P2P_OFF
from autotune.explain.explanation import explain_end
from autotune.predict.trace import traced_predictor
from autotune.problem.candidate import ALLOCATOR_VARIABLES, Candidate, job_with_candidate
from autotune.problem.hardware import Hardware, detect
from autotune.problem.job import Job
from autotune.recovery.ladder import Rung, ladder_path, recovery_ladder, stored_ladder, write_ladder
from autotune.recovery.supervisor import FirstStep, LaunchSummary, Supervisor, check_script
from autotune.results.export import needs_of_loss
from autotune.script.argument_writer import with_argument_files
from autotune.script.recorded import check_candidate, job_to_train, with_findings
from autotune.script.script import wrong_batch_warning
from autotune.search.certificate import trains_otherwise
from autotune.search.fingerprint import measured_under, other_variables, watched_variables
from autotune.search.storage import make_study_folder, output_folder
from autotune.search.study import StudyStore
from autotune.search.trials import Record
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
    first_step: FirstStep | None = None  # None: any batch is accepted


def launch_training(request: Request, print_line: Callable[[str], None] = print) -> LaunchSummary:
    """Train a script to its end under a study's winner, or without a study under the best config of a plan.

    Args:
        request: its `study` or its `model`, and its `script`.
        print_line: receives lines for display.

    Raises:
        UserError: bad input, or a study of another script.
        NothingFits: no config is predicted to fit.
    """
    check_executor(request.executor)
    if not request.script:
        raise UserError("launch needs the script to train: `autotune launch STUDY -- train.py its arguments`")
    if request.model and request.study is not None:
        raise UserError("--model plans a training without a study. Remove --model, or the study.")
    python = ranks_python(request.python, print_line, needed=TRAINING)
    with named_nodes(request, print_line, python, lasting=True) as nodes:
        return _launch(launch_setup(request, nodes, python), nodes, print_line)


def _launch(setup: LaunchSetup, nodes: Nodes | None, print_line: Callable[[str], None]) -> LaunchSummary:
    request = setup.request
    if request.study is not None:
        # raises if there is none
        store = StudyStore.load(request.study, request.storage or None, interpreter=setup.interpreter)
        with readable("the study"):
            training = _from_study(setup, store, print_line)
    else:
        training = _from_plan(setup)
    found = _machines(training.hardware, setup.memory_cap_bytes, nodes)
    who = f"launch of {setup.typed.script.target}"
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
        first_step=training.first_step,
    )
    if cluster is not None:
        cluster = dataclasses.replace(cluster, who=who, cancelled=lambda: supervisor.stopped, echo=True)
    with lock_gpus(found, who) if cluster is None else nullcontext():  # agents lock their own GPUs
        summary = supervisor.run(cluster)
    last = summary.attempts[-1]
    for line in explain_end(last.ended, training.job, training.ladder[last.rung].candidate):
        print_line(line)
    return summary


def _machines(tuned: Hardware, memory_cap_bytes: int | None, nodes: Nodes | None) -> Hardware:
    """Return the hardware for the training, equal in size to the hardware for which it was tuned or planned.

    Memory that was reserved for another process stays reserved. Nodes and ranks inherit a variable without which ranks hung.

    Raises:
        UserError: there are fewer devices, another number of machines, or too little memory besides the reserved one.
    """
    os.environ.update({name: tuned.environment[name] for name in P2P_OFF.keys() & tuned.environment.keys()})
    if nodes is None:
        if tuned.nodes > 1:
            raise UserError(
                f"the study was tuned on {tuned.nodes} nodes with {tuned.per_node} devices each. Add {SEVERAL_MACHINES}"
            )
        return detect(tuned.device, tuned.count, memory_cap_bytes=memory_cap_bytes, headroom=tuned.headroom).reserving(
            tuned.reserve_bytes
        )
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


def _from_study(setup: LaunchSetup, store: StudyStore, print_line: Callable[[str], None]) -> _Training:
    """Return a training of the typed script under a study's winner, with the study's findings about the script."""
    typed, job = setup.typed, store.job
    script = typed.script
    check_studys_python(store.name, store.python, setup.request.python, setup.interpreter)
    check_script(store.name, job, script.target)
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
    check_candidate(store.name, winner.candidate)
    if job.script is not None:
        script = with_findings(store.name, job.script, script)
    else:
        print_line(
            f"study {store.name} measured {job.model.name} with synthetic batches, not a script: its config is used"
        )
        for line in needs_of_loss(job_with_candidate(job, winner.candidate)):
            print_line(f"your training must {line}")
    script = with_argument_files(script)
    first_step = _first_step(setup.global_batch_size, store, winner)
    if first_step is not None:
        print_line(f"{first_step.samples} samples per optimizer step, as in study {store.name}")
    if line := about_variables(store.name, store.fingerprint, winner.candidate):
        print_line(line)
    ladder = ladder_of(store, winner.candidate, setup.request.convert)
    for rung in ladder:
        check_candidate(store.name, rung.candidate)
    job = job_to_train(job, script)
    return _Training(job, store.hardware, ladder, _folder_of(store), store.threads, first_step)


def _first_step(asked: int | str | None, store: StudyStore, winner: Record) -> FirstStep | None:
    """Return what the training's first step must have; None if the caller leaves the batch open.

    Raises:
        UserError: the caller asks for another batch than the study's.
    """
    samples = winner.candidate.rows_per_rank * store.job.data_ranks
    if asked not in (None, FREE, samples):
        raise UserError(
            f"--global-batch-size {asked}: study {store.name} was tuned for {samples} samples per optimizer step. Give that, "
            f"or tune again with {asked}"
        )
    trace = winner.outcome.trace if winner.outcome is not None else None
    if asked == FREE or (trace is None and store.job.script is not None):  # then the script's rows may be packed
        return None
    return FirstStep(store.name, samples, trace)


def _folder_of(store: StudyStore) -> Path:
    """Return the folder that the training writes to: the study's, or if that is another user's, one in the current folder.

    Raises:
        UserError: it cannot be written, or has links.
    """
    folder = store.folder
    if folder is None or output_folder(folder) != folder:
        folder = Path("runs") / store.name
    make_study_folder(folder)
    return folder


def ladder_of(store: StudyStore, top: Candidate, convert: bool) -> list[Rung]:
    """Return the recovery ladder of a study's winner: as `run` wrote it, or a new one if none was written for this winner.

    A new one is built from the study's measurements, and from predictions that its outcomes have calibrated.
    """
    folder = store.folder
    if not convert and folder is not None:
        known = stored_ladder(folder, store.name)
        if known and known[0].candidate == top:
            return known
    unprotected = dataclasses.replace(store.job, unprotected=True)  # like the training itself
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
        write_ladder(ladder_path(folder, store.name), ladder, store.job)
    return ladder


def _from_plan(setup: LaunchSetup) -> _Training:
    """Return a training under the best config of a plan for this machine, with a ladder below it."""
    assert setup.plan is not None
    assert setup.folder is not None
    plan = setup.plan
    ladder = _planned_ladder(plan, setup.request.convert)
    make_study_folder(setup.folder)
    return _Training(dataclasses.replace(plan.job, script=setup.typed.script), plan.hardware, ladder, setup.folder)


def _planned_ladder(plan: PlanSetup, convert: bool) -> list[Rung]:
    predictor = traced_predictor(plan.job, plan.hardware, widened=True)
    candidates, _ = predictor.buildable(plan.space.candidates(plan.job))
    ranked = predictor.ranked(predictor.table(candidates))
    if not ranked:
        raise NothingFits(f"nothing of space {plan.space.name} is predicted to fit: `autotune plan` says what would")
    return recovery_ladder(candidates[ranked[0]], plan.space, plan.job, predictor, {}, convert=convert)


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
