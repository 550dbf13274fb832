"""`python -m autotune`, and `python PATH/autotune` where the package is not installed: so is an agent started on a node."""

import sys
from pathlib import Path

if (
    not __package__
):  # run by its path: Python has put the package's own folder first, whose modules are no top-level ones
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from autotune.cli import main

if __name__ == "__main__":
    main()
