"""`python step.py SPEC`: runs one step in this process, see `gpu.runner.run_step`."""

import json
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).parents[1])  # the benchmarks import each other by their bare names

from gpu.runner import run_step  # noqa: E402

raise SystemExit(run_step(json.loads(sys.argv[1])))
