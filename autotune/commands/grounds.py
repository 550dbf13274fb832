"""Executors of a `run`, and the folder for their logs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from autotune.commands.setup import Setup
from autotune.errors import UserError
from autotune.executors.local import LocalExecutor
from autotune.executors.replay import ReplayExecutor
from autotune.executors.scratch import UNPROTECTED, protection_of
from autotune.problem.hardware import Hardware
from autotune.rank.sandbox import Protection
from autotune.search.crew import Crew
from autotune.search.lock import hold, hold_a_place


@contextmanager
def place(setup: Setup) -> Iterator[Path]:
    """Lock and return the folder where this call keeps logs, until the call ends.

    The folder is the study's, or, if several calls share a study, a subfolder for this call.

    Raises:
        UserError: another run holds the study.
    """
    if setup.storage is None:
        place, held = setup.folder, hold(setup.folder, setup.name)
    else:
        place, held = hold_a_place(setup.folder, setup.name)
    try:
        yield place
    finally:
        held.release()


def with_agreed_protection(setup: Setup, work: Path, confirm: Callable[[str], bool] | None) -> Setup:
    """Return the setup of a call that may start user code here.

    Raises:
        UserError: this machine offers no protection of the user's files, and the user has not agreed to go without.
    """
    user_code = setup.landscape is None and (setup.job.script is not None or setup.job.workload is not None)
    if not user_code or setup.nodes is not None:  # each node answers for itself
        return setup
    cwd = Path(setup.job.script.cwd) if setup.job.script is not None else Path.cwd()
    if confirm is None or setup.unprotected:
        protection_of(cwd, work, unprotected=setup.unprotected)
        return setup
    agreed = protection_of(cwd, work, unprotected=True) is not Protection.NONE or confirm(f"{UNPROTECTED}. Go on?")
    if not agreed:
        raise UserError("not started: this machine cannot protect your files; run it on a copy of the folder")
    return dataclasses.replace(setup, unprotected=True)


def first_executor(setup: Setup, work: Path, cancelled: Callable[[], bool]) -> LocalExecutor | ReplayExecutor:
    if setup.landscape is not None:
        return ReplayExecutor(setup.landscape, setup.seed, setup.hardware.headroom)
    return _local(setup, setup.hardware, work, cancelled, setup.slots[0].variables if setup.slots else None)


def _local(
    setup: Setup, hardware: Hardware, work: Path, cancelled: Callable[[], bool], variables: Mapping[str, str] | None
) -> LocalExecutor:
    return LocalExecutor(
        setup.job,
        hardware,
        work,
        list(setup.candidates),
        isolation=setup.isolation,
        seed=setup.seed,
        cancelled=cancelled,
        ground=setup.nodes,
        variables=variables,
        study=setup.folder,
        unprotected=setup.unprotected,
    )


def executors_beside(setup: Setup, work: Path, first: LocalExecutor | None, crew: Crew) -> list[LocalExecutor]:
    """Return the executors that measure in parallel to the first, each in its own folder. If one fails, the trials of all end."""
    if first is None or not setup.slots:
        return []
    stopped = first.cancelled
    first.cancelled = lambda: stopped() or crew.failed
    return [
        _local(setup, slot.hardware, work / f"beside-{number}", lambda: first.cancelled(), slot.variables)
        for number, slot in enumerate(setup.slots[1:], 2)
    ]
