"""Caches that libraries keep between runs, by the variables that they document."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

OPS = "TORCH_EXTENSIONS_DIR"  # variable of the folder from which torch loads C++ extensions
TABLE = Path(__file__).parents[1] / "data" / "caches.json"


def library_caches(environment: Mapping[str, str], cwd: str) -> Iterator[str]:
    """Make and yield the caches of libraries by their variables.

    A folder that holds the user's current one, home, or the ops that the fork server loads, is none.
    """
    paths, caches = dict[str, str](), dict[str, str]()
    users = [f"{os.path.realpath(one)}/" for one in (cwd, os.path.expanduser("~"), environment.get(OPS) or cwd)]
    for name, row in json.loads(TABLE.read_text(encoding="utf-8")).items():
        path = environment.get(name) or re.sub(r"\$(\w+)", lambda found: paths[found[1]], row["default"])
        paths[name] = path = os.path.expanduser(path)  # later rows may begin with it
        real = os.path.realpath(path)
        made = row["use"] == "cache" or (row["use"] == "pipe" and os.path.isdir(path))  # NVIDIA's daemon makes its own
        if made and path.startswith("/") and not any(one.startswith(f"{real.rstrip('/')}/") for one in users):
            caches[path] = real
    for path in caches:
        # in another cache a trial can put a link to any folder in its place
        if not {os.path.realpath(one) for one in Path(path).parents}.intersection(caches.values()):
            with suppress(OSError):
                os.makedirs(path, exist_ok=True)
                yield path
