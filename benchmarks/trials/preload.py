"""Seconds of a trial with and without what the fork server imports before it forks:
`python benchmarks/trials/preload.py [--rounds 5] [--json FILE]`.

CPU ranks, a tiny model, two steps: nearly all of a trial is its start. At stages 1 to 3 ZeRO imports
`deepspeed.runtime.zero.muon.muon_optimizer`, which brings torch's compiler. One fork server has imported it, the other not,
as ranks of GPUs were forked before; trials of both take turns.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

if not __package__:  # started by its path: benchmarks import each other from the repository's root
    sys.path[0] = str(Path(__file__).parents[2])

from autotune.problem.hardware import detect
from autotune.problem.job import Job
from autotune.problem.models import resolve_model
from autotune.util.interpreter import bound_command
from autotune.workers import launchers
from autotune.workers.fork_server import PRELOADED
from benchmarks.common import command_line, parse, print_table, write_json
from benchmarks.trials.ranks import LocalExecutor, opened
from benchmarks.trials.trials import candidate, run

LATE = "deepspeed.runtime.zero.muon.muon_optimizer"
STAGES = (0, 2, 3)
_SERVER = "from autotune.workers import fork_server; fork_server.PRELOADED = {}; fork_server.main()"


def without_late(python: str, module: str, *arguments: str) -> list[str]:
    """Return the command of a rank, or of a fork server that does not import `LATE`."""
    if module != "autotune.workers.fork_server":
        return bound_command(python, module, *arguments)
    return [python, "-c", _SERVER.format(tuple(name for name in PRELOADED if name != LATE)), *arguments]


def measured(stages: tuple[int, ...], rounds: int, folder: Path) -> list[dict[str, Any]]:
    job, hardware = Job(resolve_model("tiny-llama"), 1, 32, "fp32"), detect("cpu", 1)
    tried = [candidate(stage) for stage in stages]
    with ExitStack() as stack:
        ways: dict[str, LocalExecutor] = {"with": stack.enter_context(opened(job, hardware, folder / "with", tried))}
        with mock.patch.object(launchers, "bound_command", without_late):
            ways["without"] = stack.enter_context(opened(job, hardware, folder / "without", tried))
        rows = []
        for stage, one in zip(stages, tried, strict=True):
            seconds: dict[str, list[float]] = {way: [] for way in ways}
            for at in range(rounds):
                for way, executor in ways.items():
                    seconds[way].append(run(executor, one, f"z{stage}-{at}")[0].seconds)
            before, after = statistics.median(seconds["without"]), statistics.median(seconds["with"])
            rows.append(
                {"stage": stage, "without, s": before, "with, s": after, "saved, s": before - after, "trials": rounds}
            )
    return rows


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parse(parser, rounds=1)
    with tempfile.TemporaryDirectory() as name:
        rows = measured((2,) if arguments.small else STAGES, arguments.rounds, Path(name))
    print_table(
        "seconds of a trial on a CPU rank, with muon_optimizer imported before the fork and without", rows, keys=1
    )
    write_json(arguments.json, rows)


if __name__ == "__main__":
    main()
