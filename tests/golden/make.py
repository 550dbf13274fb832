"""Write `expected/` again: `python -m tests.golden.make GROUP…`."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from tests.golden.pins import EXPECTED, GROUPS


def write(group: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        texts = GROUPS[group](Path(folder))
    shutil.rmtree(EXPECTED / group, ignore_errors=True)
    for name, text in texts.items():
        path = EXPECTED / group / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def main() -> None:
    groups = sys.argv[1:]
    if not groups or set(groups) - set(GROUPS):
        sys.exit(f"expected groups of {', '.join(GROUPS)}; found {' '.join(groups) or 'none'}")
    for group in groups:
        print(group, flush=True)
        write(group)


if __name__ == "__main__":
    main()
