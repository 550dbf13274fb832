"""The first minutes with a GPU: the steps that are worth most, in one command that may be killed at any moment.

`python benchmarks/gpu/gpu_first.py --out FOLDER [--seconds 470] [--steps facts,launch,...] [--rehearse]`. On a bare machine
`gpu_first.sh` installs what it needs and calls it. FOLDER/first.json is rewritten with each row.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

if not __package__:
    # started by its path: benchmarks import each other from the repository's root; such a machine has autotune only there
    sys.path[0] = str(Path(__file__).parents[2])

from autotune.errors import UserError
from autotune.workers.launchers import trial_environment
from benchmarks.gpu.ground import Row
from benchmarks.gpu.runner import EXIT_REFUSED, Call, run_steps, show, summary
from benchmarks.gpu.steps import FIRST, Step, chosen
from benchmarks.trials.ranks import end_tree

_LARGEST_BYTES = 4 * 2**20  # of a file that is packed
_OPS = ("FusedAdamBuilder", "CPUAdamBuilder")
_BUILD = """
import os, sys, time
began = time.time()
from autotune.workers.jit_ops import load_ops
asked = os.environ.get("TORCH_CUDA_ARCH_LIST")
print(sys.argv[1], "for", asked, load_ops(sys.argv[1:]) or "loaded", round(time.time() - began, 1), flush=True)
"""


def command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FOLDER", help="first.json, study.tgz, logs.tgz, ops.txt"
    )
    parser.add_argument(
        "--seconds", type=float, default=470.0, help="of the whole call: what it cannot hold is left out"
    )
    parser.add_argument("--steps", default=",".join(FIRST), help="of `gpu_acceptance.py --list`; default: %(default)s")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "gpu_first", help="folders of steps")
    parser.add_argument("--rehearse", action="store_true", help="on one CPU rank with a tiny model: measures nothing")
    return parser


def run(arguments: argparse.Namespace) -> int:
    steps = chosen(arguments.steps.split(","), f"--steps {arguments.steps}")
    out: Path = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    with Builds(out / "ops.txt", () if arguments.rehearse else _OPS) as builds:
        call = Call(
            out / "first.json",
            arguments.work.resolve(),
            arguments.seconds,
            rehearse=arguments.rehearse,
            await_builds=builds.wait,
        )

        def after(step: Step, found: Row) -> None:
            show(step, found)
            pack(call.work, out / "logs.tgz", "*.log")
            pack(call.work / "study" / "runs", out / "study.tgz", "*")

        return summary(steps, run_steps(steps, call, after), call.path)


class Builds:
    """Builds of DeepSpeed's ops beside the first steps, which time nothing. Steps that time wait for their end."""

    def __init__(self, log: Path, ops: Sequence[str]) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        with log.open("ab") as file:
            for op in ops:
                command = [sys.executable, "-c", _BUILD, op]
                environment = trial_environment("cuda", 8)
                self._processes.append(subprocess.Popen(command, env=environment, stdout=file, stderr=file))

    def __enter__(self) -> Builds:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._processes:
            if process.poll() is None:
                end_tree(process)

    def wait(self, seconds: float) -> None:
        """Wait for the builds' ends, for so many seconds at most."""
        until, began = time.monotonic() + seconds, time.monotonic()
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=max(0.0, until - time.monotonic()))
        if (waited := time.monotonic() - began) > 1.0:
            print(f"waited {waited:.0f} s until the ops were built", flush=True)


def pack(folder: Path, into: Path, pattern: str) -> None:
    """Pack the small files of a folder whose names match."""
    with suppress(OSError), tarfile.open(into, "w:gz") as tar:
        for path in sorted(folder.rglob(pattern)):
            if path.is_file() and path.stat().st_size < _LARGEST_BYTES:
                tar.add(path, str(path.relative_to(folder)))


def main() -> None:
    arguments = command_line().parse_args()
    try:
        raise SystemExit(run(arguments))
    except UserError as error:
        print(f"gpu_first.py: {error}", file=sys.stderr)
        raise SystemExit(EXIT_REFUSED) from None


if __name__ == "__main__":
    main()
