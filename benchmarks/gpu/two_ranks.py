"""A study of two ranks on one card: NCCL between them, at all stages.

Each is a peer of its own, with an own host for NCCL, which refuses two ranks of one host on a card.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.gpu.ground import EXPECTED, Ground, Row
from benchmarks.gpu.study import tuned, words_of
from benchmarks.trials.ranks import end_tree

_MEASURED = ("--model", "smollm2-360m", "--seq-len", "512", "--global-batch-size", "32", "--budget", "120s")
# the tuner's peer holds the card's lock already
_LOCKS = "import autotune.workers.gpu_locks as locks\nlocks._name = 'peer-{}'.format\n"


def run(ground: Ground) -> Iterator[Row]:
    os.chdir(ground.folder)
    Path("sitecustomize.py").write_text(_LOCKS, encoding="utf-8")
    words = words_of(ground, _MEASURED)
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29577",
        "WORLD_SIZE": "2",
        "RANK": "0",
        "NCCL_HOSTID": "0",
    }
    path = os.pathsep.join([str(ground.folder), os.environ["PYTHONPATH"]])
    peer = {"RANK": "1", "NCCL_HOSTID": "1", "PYTHONPATH": path}
    command = [sys.executable, "-m", "autotune", "run", *words, "--study", "peer"]
    with open("peer.log", "w", encoding="utf-8") as log:
        process = subprocess.Popen(command, env=os.environ | peer, stdout=log, stderr=log)
    try:
        row = tuned(words, "peers")
    finally:
        end_tree(process)
    yield {**row, EXPECTED: bool(row["verified"])}
