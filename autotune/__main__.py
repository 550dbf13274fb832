"""`python -m autotune`, and `python PATH/autotune` where the package is not installed: so is an agent started on a node."""

import sys
from pathlib import Path

if (
    not __package__
):  # run by its path: Python has put the package's own folder first, whose modules are no top-level ones
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
elif sys.path[0] in ("", str(Path.cwd())) and Path.cwd() != Path(__file__).resolve().parent.parent:
    del sys.path[0]  # run by -m: Python has put the current folder first, whose typer.py may be a stranger's

from autotune.cli import main

if __name__ == "__main__":
    main()
