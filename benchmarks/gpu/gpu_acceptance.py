"""All that only a GPU can prove: `make gpu-acceptance`, or a few steps of it by `--only`, from most to least worth.

The long form of `benchmarks/gpu/gpu_first.py`: the same steps, as tables. Results are gathered in one JSON file
(benchmarks/results/gpu-NAME.json), each row as soon as it is measured; a later call puts its steps in place of the same.
`--rehearse` runs the same code on one CPU rank with a tiny model: it shows that every step runs, and measures nothing.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

if not __package__:  # started by its path: benchmarks import each other from the repository's root
    sys.path[0] = str(Path(__file__).parents[2])

from autotune.errors import UserError
from autotune.problem.hardware import detect
from benchmarks.common import RESULTS, print_table
from benchmarks.gpu.machine import describe
from benchmarks.gpu.runner import EXIT_REFUSED, Call, run_steps, show, summary
from benchmarks.gpu.steps import STEPS, chosen


def result_name(hardware: dict[str, Any]) -> str:
    return "gpu-" + re.sub(r"[^a-z0-9]+", "-", str(hardware["name"]).lower()).strip("-")


def command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the steps, their purpose and expected minutes")
    parser.add_argument("--only", metavar="STEP[,STEP]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="default: benchmarks/results/gpu-NAME.json")
    parser.add_argument("--rehearse", action="store_true", help="on one CPU rank with a tiny model: measures nothing")
    parser.add_argument(
        "--seconds", type=float, default=7200.0, help="of the whole call: what it cannot hold is left out"
    )
    parser.add_argument("--limit", type=float, default=float("inf"), metavar="SECONDS", help="of each step, at most")
    return parser


def accept(arguments: argparse.Namespace) -> int:
    steps = chosen(arguments.only.split(",") if arguments.only is not None else None, f"--only {arguments.only}")
    path: Path | None = arguments.json
    if arguments.rehearse and (path is None or path.resolve().parent == RESULTS.resolve()):
        raise UserError(f"--rehearse measures nothing: give --json FILE outside of {RESULTS}")
    if not arguments.rehearse:
        detect("cuda", 1)
    path = path or RESULTS / f"{result_name(describe('cuda'))}.json"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as work:
        call = Call(path, Path(work), arguments.seconds, arguments.limit, arguments.rehearse)
        return summary(steps, run_steps(steps, call, show), path)


def main() -> None:
    arguments = command_line().parse_args()
    if arguments.list:
        rows = [{"step": one.name, "minutes": one.expected_seconds / 60, "purpose": one.purpose} for one in STEPS]
        print_table("from most to least worth; minutes are expected, not measured", rows)
        return
    try:
        raise SystemExit(accept(arguments))
    except UserError as error:
        print(f"gpu_acceptance.py: {error}", file=sys.stderr)
        raise SystemExit(EXIT_REFUSED) from None


if __name__ == "__main__":
    main()
