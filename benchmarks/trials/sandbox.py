"""Cost of a trial's sandbox: `python benchmarks/trials/sandbox.py [--rounds 30] [--steps 1200] [--pairs 6] [--json FILE]`.

Entering is measured in forked processes of one thread, as ranks are: the first rank of a host makes the sandbox, a second one
joins it. A process that is forked and ends without a sandbox shows the machine's load. Steps train a small network on one thread,
read a file of the project and append a line to a log. Two processes, within a sandbox and without, take turns step by step, in
random order. Two processes of one kind may differ for good (memory layout), so steps are made in several pairs of new processes.
The interval of the ratio is a bootstrap over pairs, and then over their steps; a pair of two processes without a sandbox shows
what differs by itself. As root, an ordinary user is measured too, with the system's Python.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

if not __package__:  # started by its path: benchmarks import each other from the repository's root
    sys.path[0] = str(Path(__file__).parents[2])

from autotune.rank.sandbox import Protection, Sandbox, remove
from benchmarks.common import HERE, command_line, parse, print_table, write_json

ORDINARY = 1234  # a user that owns nothing else
SYSTEM_PYTHON = "/usr/bin/python3"
ENTER = """
import json, os, sys, time
from pathlib import Path
from autotune.rank.sandbox import Protection, Sandbox, remove
base, rounds = Path(sys.argv[1]), int(sys.argv[2])
os.environ["HOME"] = str(base)
def entered(sandbox, until):  # ms, measured in a process of its own
    here, there = os.pipe()
    if not os.fork():
        began = time.perf_counter()
        sandbox.enter(str(sandbox.files), os.environ)
        os.write(there, str(1000 * (time.perf_counter() - began)).encode())
        os.close(there)
        os.read(until, 1)
        os._exit(0)
    os.close(there)
    return float(os.read(here, 99))
found = []
for number in range(rounds + 1):
    for protection in (Protection.OVERLAY, Protection.LANDLOCK):
        began = time.perf_counter()
        if not os.fork():
            os._exit(0)
        os.wait()
        bare = 1000 * (time.perf_counter() - began)
        until, end = os.pipe()
        os.set_inheritable(end, False)
        sandbox = Sandbox(base / "runs/study/scratch", base, protection)
        began = time.perf_counter()
        sandbox.create(base / "runs/study")
        created = 1000 * (time.perf_counter() - began)
        first, joining = entered(sandbox, until), entered(sandbox, until)
        os.write(end, b"xx")
        os.wait(), os.wait()
        os.close(until), os.close(end)
        began = time.perf_counter()
        remove(sandbox.folder)
        if number:  # the first makes the caches' folders
            found.append([protection, bare, created, first, joining, 1000 * (time.perf_counter() - began)])
print(json.dumps(found))
"""
WARM_UP = 10  # steps that are not measured
DRAWS = 400  # of the bootstrap
COLUMNS = ("bare fork, ms", "created, ms", "first rank enters, ms", "joining rank enters, ms", "removed, ms")


def entering(base: Path, rounds: int, user: int) -> list[dict[str, Any]]:
    """Return medians of each protection's parts, for root (0) or an ordinary user."""
    folder = base / f"user-{user}"
    folder.mkdir()
    os.chown(folder, user or os.getuid(), -1)
    words = [SYSTEM_PYTHON if user else sys.executable, "-c", ENTER, str(folder), str(rounds)]
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(HERE.parent), "PYTHONDONTWRITEBYTECODE": "1"}
    if user:
        done = subprocess.check_output(words, env=environment, cwd="/", user=user, group=user, extra_groups=[])
    else:
        done = subprocess.check_output(words, env=environment, cwd="/")
    found = json.loads(done)
    rows = []
    for protection in (Protection.OVERLAY, Protection.LANDLOCK):
        parts = zip(*(row[1:] for row in found if row[0] == protection), strict=True)
        medians = dict(zip(COLUMNS, map(statistics.median, parts), strict=True))
        rows.append({"protection": str(protection), "user": user or os.getuid(), "rounds": rounds, **medians})
    return rows


STEPS = """
import json, os, sys, time
from pathlib import Path
from autotune.rank.sandbox import Sandbox
sandbox = json.loads(sys.argv[1])
if sandbox["protection"] == "none":
    os.chdir(sandbox["cwd"])
else:
    Sandbox.from_json(sandbox).enter(sandbox["folder"] + "/files", os.environ)
import torch
torch.set_num_threads(1)
net, data = torch.nn.Linear(1024, 1024), torch.ones(256, 1024)
optimizer = torch.optim.SGD(net.parameters(), 0.01)
print(0.0, flush=True)
for _ in sys.stdin:
    began = time.perf_counter()
    Path("data.bin").read_bytes()
    net(data).sum().backward()
    optimizer.step()
    with open("log.txt", "a") as log:
        log.write("step")
    print(time.perf_counter() - began, flush=True)
"""


def step(training: subprocess.Popen[str], *, print_line: bool = True) -> float:
    """Have a training make a step; return its seconds. Without `print_line` wait until the training is ready."""
    assert training.stdin is not None
    assert training.stdout is not None
    if print_line:
        training.stdin.write("\n")
    return float(training.stdout.readline())


def pair_ratios(base: Path, protection: Protection, steps: int) -> list[tuple[float, float]]:
    """Return the seconds of steps without a sandbox and within one, of two new processes."""
    boxes = [
        Sandbox(base / f"runs/study/{index}", base, kind) for index, kind in enumerate((Protection.NONE, protection))
    ]
    trainings = []
    for box in boxes:
        box.create(base / "runs/study")
        words = [sys.executable, "-c", STEPS, json.dumps(box.to_json())]
        environment = {**os.environ, "PYTHONPATH": str(HERE.parent)}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
        trainings.append(subprocess.Popen(words, env=environment, **pipes))
    for training in trainings:
        step(training, print_line=False)
    pairs = []
    for _ in range(steps + WARM_UP):
        order = random.sample((0, 1), 2)
        found = {index: step(trainings[index]) for index in order}
        pairs.append((found[0], found[1]))
    for training, box in zip(trainings, boxes, strict=True):
        training.communicate()
        remove(box.folder)
    (base / "log.txt").unlink(missing_ok=True)
    return pairs[WARM_UP:]


def interval(pairs: list[list[float]]) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the mean over pairs of their median ratios: pairs are drawn, then their steps."""
    means = []
    for _ in range(DRAWS):
        drawn = random.choices(pairs, k=len(pairs))
        means.append(statistics.fmean(statistics.median(random.choices(steps, k=len(steps))) for steps in drawn))
    cuts = statistics.quantiles(means, n=40)
    return cuts[0], cuts[-1]


def stepping(base: Path, steps: int, pairs: int) -> list[dict[str, Any]]:
    """Return median steps with and without each protection, and the ratio with its interval."""
    (base / "data.bin").write_bytes(bytes(65536))
    kinds = (Protection.NONE, Protection.OVERLAY, Protection.LANDLOCK)
    seconds: dict[Protection, list[list[tuple[float, float]]]] = {kind: [] for kind in kinds}
    for _ in range(pairs):
        for kind in random.sample(kinds, len(kinds)):
            seconds[kind].append(pair_ratios(base, kind, steps // pairs))
    rows = []
    for kind, found in seconds.items():
        ratios = [[within / without for without, within in one] for one in found]
        free, confined = (1000 * statistics.median(row[index] for one in found for row in one) for index in (0, 1))
        low, high = interval(ratios)
        row = {
            "protection": str(kind),
            "pairs": pairs,
            "steps": steps,
            "step without, ms": free,
            "step within, ms": confined,
        }
        ratio = statistics.fmean(map(statistics.median, ratios))
        rows.append({**row, "ratio": ratio, "from (95 %)": low, "to (95 %)": high})
    return rows


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--pairs", type=int, default=6, help="pairs of processes that share the steps")
    arguments = parse(parser, rounds=1, steps=4, pairs=2)
    users = [0, ORDINARY] if os.getuid() == 0 and Path(SYSTEM_PYTHON).exists() else [0]
    base = Path(tempfile.mkdtemp(prefix="sandbox-", dir="/var/tmp"))
    try:
        base.chmod(0o755)
        rows = [row for user in users for row in entering(base, arguments.rounds, user)]
        print_table("what entering a sandbox takes", rows, keys=2)
        steps = stepping(base, arguments.steps, arguments.pairs)
        print_table("what a step takes in a sandbox", steps)
    finally:
        shutil.rmtree(base, ignore_errors=True)
    write_json(arguments.json, {"entering": rows, "steps": steps})


if __name__ == "__main__":
    main()
