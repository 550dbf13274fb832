"""Entry point of `python -m autotune`, and of `python PATH/autotune` without an installed package, as for an agent on a node."""

import sys
from pathlib import Path

if not __package__:  # Run by path: Python puts the package's own folder first, whose modules are not top-level modules.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
elif sys.path[0] in ("", str(Path.cwd())) and Path.cwd() != Path(__file__).resolve().parent.parent:
    del sys.path[0]  # run by -m: Python puts the current folder first, which may have an unrelated typer.py

from autotune.cli.app import main

if __name__ == "__main__":
    main()
