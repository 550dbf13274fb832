"""The command of a made-up framework: it reads nothing itself and starts its ranks by torchrun, in an environment of its own."""

import os
import subprocess
import sys


def main() -> None:
    if sys.argv[1] != "train":
        raise SystemExit("usage: madeup train FILE")
    inner = os.path.join(os.path.dirname(__file__), "train.py")
    command = ["torchrun", "--nproc-per-node", "2", "--master-port", os.environ.get("MADEUP_PORT", "29500"), inner]
    done = subprocess.run([*command, *sys.argv[2:]], env={**os.environ, "MINE": "1"})
    sys.exit(done.returncode)
