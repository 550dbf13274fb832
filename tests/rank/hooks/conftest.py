"""What tests of the hooks share: a watcher that remembers, and a context whose patches are undone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.problem.candidate import Candidate
from autotune.problem.job import Script
from autotune.problem.outcome import Phase
from autotune.rank.hooks.base import Context, Sizes
from autotune.rank.sandbox import Protection, Sandbox
from tests.conftest import make_job


class Recorder:
    """A TrainingObserver: all that it is told, in order, as JSON."""

    def __init__(self) -> None:
        self.seen: list[list[Any]] = []
        self.engines = 0  # that were built

    def names(self) -> list[str]:
        return [name for name, *_ in self.seen]

    def of(self, name: str) -> list[Any]:
        return [told for kind, *told in self.seen if kind == name]

    def configured(self, config: dict[str, Any]) -> None:
        self.seen.append(["configured", config])

    def planned(self, micro_batch: int, accumulation: int, optimizer: str = "") -> None:
        self.seen.append(["planned", micro_batch, accumulation])

    def engine_built(self) -> None:
        self.engines += 1

    def built(self, engine: Any, facts: dict[str, Any]) -> None:
        self.seen.append(["built", facts])

    def forward(self, sizes: Sizes) -> None:
        self.seen.append(["rows and tokens", sizes.rows, sizes.tokens])

    def entered(self, phase: Phase) -> None:
        self.seen.append([str(phase)])

    def stepped(self) -> None:
        self.seen.append(["stepped"])

    def auxiliary_stepped(self, number: int, rows: int) -> None:
        self.seen.append(["beside", number, rows])

    def failed(self, error: BaseException) -> None:
        self.seen.append(["failed", type(error).__name__])

    def op_missing(self, builder: str) -> None:
        self.seen.append(["unbuilt", builder])

    def no_engine_found(self) -> None:
        self.seen.append(["strayed"])


def make_context(
    folder: Path | str = ".", candidate: Candidate | None = None, *, quiet: bool = True, **script: Any
) -> tuple[Context, Recorder]:
    """For a script of one CPU rank, and its watcher. Whoever installs hooks into this process undoes them (`context` does);
    a process of its own, `in_rank`, need not."""
    watcher = Recorder()
    given = Script(**{"argv": ("train.py",), "cwd": str(folder), **script})
    job = replace(make_job(1), script=given)
    sandbox = Sandbox(Path(folder), Path(given.cwd), Protection.LANDLOCK) if quiet else None
    return Context(job, candidate, watcher, "cpu", Path(folder), quiet, sandbox=sandbox), watcher


@pytest.fixture
def context(tmp_path: Path) -> Iterator[Callable[..., tuple[Context, Recorder]]]:
    """`make_context`, undone at the test's end."""
    made = []

    def make(*arguments: Any, **more: Any) -> tuple[Context, Recorder]:
        found = make_context(tmp_path, *arguments, **more)
        made.append(found[0])
        return found

    yield make
    for one in reversed(made):
        one.patches.close()
