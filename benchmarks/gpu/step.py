"""`python step.py SPEC`: runs one step in this process, see `benchmarks.gpu.runner.run_step`."""

import json
import sys
from pathlib import Path

if not __package__:  # started by its path: benchmarks import each other from the repository's root
    sys.path[0] = str(Path(__file__).parents[2])

from benchmarks.gpu.runner import run_step

raise SystemExit(run_step(json.loads(sys.argv[1])))
