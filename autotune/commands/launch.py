"""`autotune launch` without the command line: from a study or a plan to a supervised training."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

from autotune.commands.launched_command import Launched, about_variables
from autotune.commands.nodes import SCHEDULERS, Nodes, named_nodes
from autotune.commands.python import TRAINING, ranks_python
from autotune.commands.remembered import remembered
from autotune.commands.request import Request, launch_setup
from autotune.commands.setup import LaunchSetup, PlanSetup
from autotune.commands.trust import Ask
from autotune.errors import NothingFits, UserError, one_line
from autotune.group.locks import held_gpus
from autotune.predict.traced import traced_predictor
from autotune.problem.candidate import Candidate
from autotune.problem.hardware import Hardware, detect
from autotune.problem.job import Job, Script
from autotune.problem.script import half_told, line_of
from autotune.problem.sources import SOURCES
from autotune.problem.typed import launchers_config
from autotune.recovery.ladder import Rung, ladder_path, recovery_ladder, stored_ladder, write_ladder
from autotune.recovery.supervisor import LaunchSummary, Supervisor, check_script
from autotune.results.report.page import training_page, write_page
from autotune.results.report.training import AttemptShown, TrainingReport
from autotune.search.storage import check_no_links, make_study_folder, output_folder
from autotune.search.study import StudyStore
from autotune.version import __version__


@dataclasses.dataclass(frozen=True)
class _Training:
    """The job to train, the hardware for which it was tuned or planned, and the configs under which it may run."""

    job: Job  # includes the script
    hardware: Hardware
    ladder: list[Rung]
    folder: Path
    threads: int | None = None  # CPU threads per rank during measurement; None: nothing was measured


def launch_training(request: Request, say: Callable[[str], None] = print, *, ask: Ask | None = None) -> LaunchSummary:
    """Train a script to its end under a study's winner, or without a study under the best config of a plan.

    Args:
        request: its `study` or its `model`, and its `script`.
        say: receives lines for display.
        ask: asks the reader a question; None without a terminal.

    Raises:
        UserError: bad input, or a study of another script.
        NothingFits: no config is predicted to fit.
    """
    if request.executor not in ("local", *SCHEDULERS):
        raise UserError(f"--executor {request.executor}: expected local, slurm or ray")
    known = remembered(request, ask)
    request = dataclasses.replace(request, maps=known.maps_under(request.maps))
    with (
        ranks_python(request.python, say, needed=TRAINING, remembered=known.python),
        named_nodes(request, say) as nodes,
    ):
        return _launch(launch_setup(request, nodes), nodes, known.job, say)


def _launch(setup: LaunchSetup, nodes: Nodes | None, accepted: Job | None, say: Callable[[str], None]) -> LaunchSummary:
    if setup.study is not None:
        store = StudyStore.load(setup.study, setup.storage)  # raises if there is none
        assert accepted is not None
        training = _from_study(setup, store, accepted, say)
    else:
        training = _from_plan(setup)
    found = _machines(training.hardware, setup.memory_cap_bytes, nodes)
    who = f"launch of {setup.script.target}"
    ground = nodes.cluster if nodes is not None else None
    if training.job.script is not None and (half := half_told(training.job.script, training.ladder[0].candidate)):
        say(half)
    say(
        f"{len(training.ladder)} configs on the ladder; {setup.max_restarts} restarts at most without a newer checkpoint"
    )
    supervisor = Supervisor(
        training.job,
        found,
        training.ladder,
        training.folder,
        max_restarts=setup.max_restarts,
        silent_seconds=setup.silent_seconds,
        convert=setup.convert,
        say=say,
        threads=training.threads,
        ground=ground,
    )
    if ground is not None:
        ground.who = who
        ground.cancelled, ground.echo = lambda: supervisor.stopped, True
    with held_gpus(found, who, say) if ground is None else nullcontext():  # agents lock their own GPUs
        summary = supervisor.run()
    _write_page(summary, training, found, say)
    return summary


def _machines(tuned: Hardware, memory_cap_bytes: int | None, nodes: Nodes | None) -> Hardware:
    """Return the hardware for the training, equal in size to the hardware for which it was tuned or planned.

    Raises:
        UserError: there are fewer devices, or another number of machines.
    """
    if nodes is None:
        if tuned.nodes > 1:
            raise UserError(
                f"it was tuned on {tuned.nodes} nodes with {tuned.per_node} devices each: give --hostfile FILE, or "
                "--executor slurm or ray"
            )
        return detect(tuned.device, tuned.count, memory_cap_bytes=memory_cap_bytes, headroom=tuned.headroom)
    if nodes.cluster is None:
        nodes.count = nodes.count or tuned.nodes
        path = str(Path.cwd())
        found = nodes.reach(tuned.device, tuned.per_node, memory_cap_bytes, tuned.headroom, path)
    else:  # for the plan
        found = tuned
    if (found.nodes, found.count) != (tuned.nodes, tuned.count):
        raise UserError(
            f"it was tuned on {tuned.nodes} nodes with {tuned.per_node} devices each, and this is {found.nodes} with "
            f"{found.per_node}: name as many (--nodes, --include), or tune on these"
        )
    return found


def _write_page(summary: LaunchSummary, training: _Training, hardware: Hardware, say: Callable[[str], None]) -> None:
    """Write the training's page next to `launch.json`. An error costs one line, and never changes the training's exit code."""
    path = training.folder / "launch.html"
    try:
        page = training_page(
            TrainingReport(
                name=training.folder.name,
                job=training.job.summary,
                machine=str(hardware),
                capacity_bytes=hardware.capacity_bytes,
                code=summary.code,
                lines=tuple(summary.lines()),
                attempts=tuple(AttemptShown(**dataclasses.asdict(one)) for one in summary.attempts),
                ladder=tuple((str(rung.candidate), rung.measured, rung.peak_bytes) for rung in training.ladder),
                version=__version__,
            )
        )
        write_page(page, path)
    except Exception as error:
        say(f"the report of the training was not written: {one_line(error)}")
        return
    say(f"wrote {path}")


def _from_study(setup: LaunchSetup, store: StudyStore, job: Job, say: Callable[[str], None]) -> _Training:
    """Return a training under a study's winner, with the study's findings about the script that the reader accepted (`job`)."""
    script, tuned = setup.script, job
    check_script(store.name, job, script.target)
    if setup.ranks not in (None, store.hardware.per_node):
        each = " on each node" if store.hardware.nodes > 1 else ""
        raise UserError(
            f"study {store.name} is of {store.hardware.per_node} ranks{each}, and `{setup.ranks_said}` of {setup.ranks}: "
            "give as many"
        )
    winner = store.winner
    if winner is None:
        raise UserError(
            f"study {store.name} has no winner yet: `autotune run --study {shlex.quote(store.name)} …` goes on"
        )
    if job.script is None:
        say(f"study {store.name} is of {job.model.name} with synthetic batches, not of a script: its config is taken")
    known = job.script or script
    flags = tuple({**dict(known.flags), **dict(script.flags)}.items())
    script = dataclasses.replace(script, flags=flags, profile=known.profile, ds_config=_config_beside(known, script))
    launched = Launched(store.name, job, winner.candidate, script, store.fingerprint.get(SOURCES, {}))
    job, lines = launched.checked(setup.global_batch_size)
    for line in lines:
        say(line)
    if line := about_variables(store.name, store.fingerprint, winner.candidate):
        say(line)
    ladder = ladder_of(store, tuned, winner.candidate, setup.convert)
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
    """Return the recovery ladder of a study's winner: as `run` wrote it, or a new one if none was written for this winner."""
    path = ladder_path(store.folder, store.name) if store.folder else None
    if not convert and store.folder is not None:
        known = stored_ladder(store.folder, store.name)
        if known and known[0].candidate == top:
            return known
    ladder = make_ladder(store, job, top, convert)
    if not convert and path is not None and output_folder(store.folder) == store.folder:
        write_ladder(path, ladder, job)
    return ladder


def make_ladder(store: StudyStore, job: Job, top: Candidate, convert: bool = False) -> list[Rung]:
    """Build a ladder from a study's measurements, and from predictions that its outcomes have calibrated."""
    predictor = traced_predictor(job, store.hardware)
    for record in store.records():
        if record.outcome is not None:
            predictor.observe(record.candidate, record.outcome)
    space = store.searched_space()
    return recovery_ladder(top, space, job, predictor, store.measured(), store.failed(), convert=convert)


def _from_plan(setup: LaunchSetup) -> _Training:
    """Return a training under the best config of a plan for this machine, with a ladder below it."""
    assert setup.plan is not None
    assert setup.folder is not None
    plan = setup.plan
    ladder = _planned_ladder(plan, setup.convert)
    make_study_folder(setup.folder)
    return _Training(dataclasses.replace(plan.job, script=setup.script), plan.hardware, ladder, setup.folder)


def _planned_ladder(plan: PlanSetup, convert: bool) -> list[Rung]:
    predictor = traced_predictor(plan.job, plan.hardware)
    candidates, _ = predictor.buildable(plan.space.candidates(plan.job))
    ranked = predictor.ranked(predictor.table(candidates))
    if not ranked:
        raise NothingFits(f"nothing of space {plan.space.name} is predicted to fit: `autotune plan` says what would")
    return recovery_ladder(candidates[ranked[0]], plan.space, plan.job, predictor, {}, convert=convert)
