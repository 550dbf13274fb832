"""The benchmarks are commands that import each other by their bare names, as they do when run."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
