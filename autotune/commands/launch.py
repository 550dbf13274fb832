"""`autotune launch`, without the command line: from a study or a plan to a training that survives."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

from autotune.commands.run import DEFAULT_HEADROOM, Request, build_job, for_job, study_folder
from autotune.errors import NothingFits, UserError
from autotune.predict.predictor import Predictor
from autotune.problem.candidate import Candidate
from autotune.problem.hardware import Hardware, detect
from autotune.problem.job import Job
from autotune.problem.script import make_script
from autotune.problem.space_file import load_space, parse_space
from autotune.recovery.ladder import Rung, recovery_ladder, write_ladder
from autotune.recovery.supervisor import Launcher, Summary, check_script
from autotune.search.study import StudyStore
from autotune.units import parse_bytes, parse_duration, parse_share

DEFAULT_RESTARTS = 10
DEFAULT_SILENCE = "30m"


def launch_training(
    study: str | None,
    command: list[str],
    *,
    request: Request | None = None,
    maps: list[str] | None = None,
    storage: str | None = None,
    memory_cap: str | None = None,
    max_restarts: int = DEFAULT_RESTARTS,
    hang_timeout: str = DEFAULT_SILENCE,
    convert: bool = False,
    say: Callable[[str], None] = print,
) -> Summary:
    """Trains a script to its end under a study's winner, or without a study under the best of a plan.

    Args:
        convert: whether the ladder may lead to configs for which checkpoints must be converted.

    Raises:
        UserError: bad input, or a study that is not of this script.
        NothingFits: no config is predicted to fit.
    """
    script = make_script(command, maps or [])
    if max_restarts < 0:
        raise UserError(f"--max-restarts {max_restarts}: expected 0 or more")
    silent_seconds = parse_duration(hang_timeout)
    if study is not None:
        store = StudyStore.load(study, storage)
        job, hardware, folder = store.job, store.hardware, store.folder or Path("runs") / store.name
        check_script(store.name, job, script.target)
        if store.winner is None:
            raise UserError(f"study {store.name} has no winner yet: `autotune run --study {store.name} …` goes on")
        if job.script is None:
            say(
                f"study {store.name} is of {job.model.name} with synthetic batches, not of a script: its config is taken"
            )
        known = job.script or script
        script = dataclasses.replace(
            script, flags=script.flags or known.flags, profile=known.profile, ds_config=known.ds_config
        )
        job = dataclasses.replace(job, script=script)
        ladder = ladder_of(store, convert)
    else:
        assert request is not None
        job, hardware, ladder = _planned(request, convert)
        own = str(request.ds_config.resolve()) if request.ds_config else None
        job = dataclasses.replace(job, script=dataclasses.replace(script, ds_config=own))
        folder = study_folder(request.runs, f"launch-{script.name}")
    cap = parse_bytes(memory_cap) if memory_cap else None
    found = detect(hardware.device, hardware.count, memory_cap_bytes=cap, headroom=hardware.headroom)
    say(f"{len(ladder)} configs on the ladder; a failure is met at most {max_restarts} times")
    launcher = Launcher(
        job, found, ladder, folder, max_restarts=max_restarts, silent_seconds=silent_seconds, convert=convert, say=say
    )
    return launcher.run()


def ladder_of(store: StudyStore, convert: bool) -> list[Rung]:
    """The recovery ladder of a study's winner: as it was exported, or made anew."""
    winner = store.winner
    assert winner is not None
    path = ladder_path(store)
    if not convert and path is not None and path.exists():
        known = [Rung.from_json(one) for one in json.loads(path.read_text())]
        if known and known[0].candidate == winner.candidate:
            return known
    ladder = make_ladder(store, winner.candidate, convert)
    if not convert and path is not None:
        write_ladder(path, ladder, store.job)
    return ladder


def ladder_path(store: StudyStore) -> Path | None:
    return store.folder / f"{store.name}.ladder.json" if store.folder else None


def make_ladder(store: StudyStore, top: Candidate, convert: bool = False) -> list[Rung]:
    """From what the study measured, and predictions that it has calibrated."""
    predictor = Predictor(store.job, store.hardware)
    for record in store.records():
        if record.outcome is not None:
            predictor.observe(record.candidate, record.outcome)
    space = for_job(parse_space(store.space_text), store.job)
    return recovery_ladder(top, space, store.job, predictor, store.measured(), store.failed(), convert=convert)


def _planned(request: Request, convert: bool) -> tuple[Job, Hardware, list[Rung]]:
    """The best of a plan for this machine, and what is below it."""
    if request.global_batch_size is None:
        raise UserError(
            "launch without a study needs --global-batch-size: what the training is set to per optimizer step"
        )
    cap = parse_bytes(request.memory_cap) if request.memory_cap else None
    headroom = parse_share(request.headroom or DEFAULT_HEADROOM)
    hardware = detect(request.device, request.gpus, memory_cap_bytes=cap, headroom=headroom)
    job = build_job(request, hardware)
    space = load_space(request.space or ("default" if hardware.device == "cuda" else "cpu_demo"))
    space = for_job(space, job)
    predictor = Predictor(job, hardware)
    candidates = space.candidates(job)
    table = predictor.table(candidates)
    fits = predictor.fits(table)
    if not fits.any():
        raise NothingFits(f"nothing of space {space.name} is predicted to fit: `autotune plan` says what would")
    best = max((i for i in range(len(candidates)) if fits[i]), key=lambda i: float(table.samples[i]))
    return job, hardware, recovery_ladder(candidates[best], space, job, predictor, {}, convert=convert)
