"""`python child.py MODULE ARGUMENTS`: calls `benchmarks.gpu.MODULE.child` with a JSON object and tells what it gives."""

import importlib
import json
import os
import sys
from pathlib import Path

if not __package__:  # started by its path: benchmarks import each other from the repository's root
    sys.path[0] = str(Path(__file__).parents[2])

from benchmarks.gpu.ground import tell

tell(importlib.import_module(f"benchmarks.gpu.{sys.argv[1]}").child(json.loads(sys.argv[2])))
sys.stderr.flush()
os._exit(0)  # a ruined context, or a process group that is open, may not end by itself
