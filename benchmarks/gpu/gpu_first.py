"""The first minutes with a GPU: the steps that are worth most, in one command that may be killed at any moment.

`python benchmarks/gpu/gpu_first.py --out FOLDER [--seconds 470] [--steps facts,trials,...] [--rehearse]`. On a bare machine
`gpu_first.sh` installs what it needs and calls it. FOLDER/first.json is rewritten with each row.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

if not __package__:
    # started by its path: benchmarks import each other from the repository's root; a lent machine has autotune only there
    sys.path[0] = str(Path(__file__).parents[2])

from autotune.errors import UserError
from autotune.workers.launchers import trial_environment
from benchmarks.gpu.ground import Row
from benchmarks.gpu.runner import EXIT_REFUSED, Call, run_steps, show, summary
from benchmarks.gpu.steps import FIRST, Step, chosen

_LARGEST_BYTES = 4 * 2**20  # of a file that is packed
_BUILD = """
import time
began = time.time()
from autotune.workers.jit_ops import load_ops
for name in ("CPUAdamBuilder", "FusedAdamBuilder"):
    print(name, load_ops([name]), round(time.time() - began, 1), flush=True)
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
    steps = chosen(arguments.steps.split(","), f"--steps {arguments.steps}", arguments.work)
    out: Path = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    call = Call(out / "first.json", arguments.work.resolve(), arguments.seconds, rehearse=arguments.rehearse)

    def after(step: Step, found: Row) -> None:
        show(step, found)
        pack(call.work, out / "logs.tgz", "*.log")
        pack(call.work / "study" / "runs", out / "study.tgz", "*")

    with build_ops(out / "ops.txt", arguments.rehearse):
        return summary(steps, run_steps(steps, call, after), call.path)


@contextmanager
def build_ops(log: Path, rehearse: bool) -> Iterator[None]:
    """Build DeepSpeed's ops beside the first trials, which need none: the study then finds CPUAdam."""
    if rehearse:
        yield
        return
    with log.open("wb") as file:
        builder = subprocess.Popen(
            [sys.executable, "-c", _BUILD], env=trial_environment("cuda", 8), stdout=file, stderr=file
        )
    try:
        yield
    finally:
        builder.kill()


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
