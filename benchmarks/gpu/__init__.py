"""Steps on a GPU: `steps.py` lists them, `runner.py` runs them, and each is a module whose `run(ground)` yields rows."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))  # a lent machine has this checkout's autotune and none installed
