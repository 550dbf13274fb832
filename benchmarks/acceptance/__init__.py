"""The steps of `gpu_acceptance.py`, one module each: `run(ground)` yields rows as they are measured."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))  # a lent machine has this checkout's autotune and none installed
