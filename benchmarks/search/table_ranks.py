"""Ranks of a training as torchrun starts them, but forked from a process that has imported everything already.

Started by real_tables.py as `python benchmarks/search/table_ranks.py`. Each line of its input is `{"argv": […], "ranks":
N}`, a script and its arguments; each line of its output is that training's `step_seconds`, `startup_seconds` and
`data_bytes` (of the rank that has most), or `failed` and why. Nothing of autotune runs in a rank, and the environment is
the caller's: a training's, with torchrun's variables.
"""

from __future__ import annotations

import itertools
import json
import os
import runpy
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed  # noqa: F401  imported before a rank is forked, as the next three are
import peft  # noqa: F401
import torch
import torch.distributed
import transformers  # noqa: F401
from deepspeed.runtime.engine import DeepSpeedEngine

WARMUP_STEPS, LEAST_STEPS, LEAST_SECONDS = 2, 4, 0.8
LIMIT_SECONDS = 120.0


class Watch:
    """Sees every optimizer step of the rank that it is in, and ends the rank once enough of them were timed."""

    def __init__(self, began: float, out: Path) -> None:
        self.began, self.out = began, out
        self.ends: list[float] = []
        self._inner: Callable[..., Any] = DeepSpeedEngine.step
        self._steps = LEAST_STEPS

    def install(self) -> None:
        watch = self

        def step(engine: Any, *args: Any, **kwargs: Any) -> Any:
            boundary = engine.is_gradient_accumulation_boundary()
            result = watch._inner(engine, *args, **kwargs)
            if boundary:
                watch._stepped()
            return result

        DeepSpeedEngine.step = step

    def _stepped(self) -> None:
        self.ends.append(time.perf_counter())
        if len(self.ends) == WARMUP_STEPS:  # all ranks do as many steps as the slowest needs
            pace = torch.tensor([LEAST_SECONDS / (self.ends[-1] - self.ends[-2])])
            torch.distributed.all_reduce(pace, torch.distributed.ReduceOp.MAX)
            self._steps = max(LEAST_STEPS, int(pace) + 1)
            self.ends[-1] = time.perf_counter()
        if len(self.ends) == WARMUP_STEPS + self._steps:
            steps = [b - a for a, b in itertools.pairwise(self.ends[WARMUP_STEPS - 1 :])]
            found = {
                "step_seconds": statistics.median(steps),
                "startup_seconds": self.ends[0] - self.began,
                "data_bytes": data_bytes(),
            }
            self.out.write_text(json.dumps(found))
            torch.distributed.barrier()
            os._exit(0)


def data_bytes() -> int:
    """The most private memory that this process had: what was touched of it, and what is mapped and untouched now."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines) if "kB" in rest}
    touched = kib["VmHWM"] - kib["RssFile"] - kib["RssShmem"]
    return 1024 * (touched + max(0, kib["VmData"] - kib["RssAnon"]))


def rank(argv: list[str], at: int, ranks: int, port: int, began: float, folder: Path) -> None:
    """Becomes a rank; does not return."""
    os.environ |= {"RANK": str(at), "LOCAL_RANK": str(at), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    log = os.open(folder / f"{at}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    Watch(began, folder / f"{at}.json").install()
    sys.argv = argv
    sys.path.insert(0, str(Path(argv[0]).parent))
    try:
        runpy.run_path(argv[0], run_name="__main__")
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", flush=True)
    os._exit(1)


def train(argv: list[str], ranks: int) -> dict[str, Any]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as name:
        folder, began, pids = Path(name), time.perf_counter(), []
        for at in range(ranks):
            pid = os.fork()
            if pid == 0:
                rank(argv, at, ranks, port, began, folder)
            pids.append(pid)
        codes = ended(pids)
        if codes != [0] * ranks:
            said = [(folder / f"{at}.log").read_text()[-500:] for at in range(ranks)]
            return {"failed": f"{codes}: {said}"}
        found = [json.loads((folder / f"{at}.json").read_text()) for at in range(ranks)]
    return {name: max(one[name] for one in found) for name in found[0]}


def ended(pids: list[int]) -> list[int | None]:
    """Their exit codes; None of what had to be killed, since another had failed or the time was up."""
    codes: dict[int, int] = {}
    limit = time.monotonic() + LIMIT_SECONDS
    while len(codes) < len(pids) and time.monotonic() < limit and not any(codes.values()):
        for pid in set(pids) - codes.keys():
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[pid] = os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    for pid in set(pids) - codes.keys():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return [codes.get(pid) for pid in pids]


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        asked = json.loads(line)
        answers.write(json.dumps(train(asked["argv"], asked["ranks"])) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
