"""Where a `run` measures: its executors, and the folder for their logs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from autotune.commands.setup import Setup
from autotune.executors.local import LocalExecutor
from autotune.executors.replay import ReplayExecutor
from autotune.problem.hardware import Hardware
from autotune.search.crew import Crew
from autotune.search.lock import hold, hold_a_place


@contextmanager
def place(setup: Setup) -> Iterator[Path]:
    """Where this call keeps logs: in the study's folder, or where several share a study in a folder of this one's there. It is
    held from before the first write to it until the call ends.

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
    )


def executors_beside(setup: Setup, work: Path, first: LocalExecutor | None, crew: Crew) -> list[LocalExecutor]:
    """What measures beside the first executor, each in a place of its own; when one fails, trials of all of them end."""
    if first is None or not setup.slots:
        return []
    stopped = first.cancelled
    first.cancelled = lambda: stopped() or crew.failed
    return [
        _local(setup, slot.hardware, work / f"beside-{number}", lambda: first.cancelled(), slot.variables)
        for number, slot in enumerate(setup.slots[1:], 2)
    ]
