"""Faults whose victim is a whole process of autotune: calls of `autotune run`, and trainings under `autotune launch`."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from autotune.problem.hardware import detect
from autotune.problem.job import Job, Script
from autotune.problem.models import ModelSpec
from autotune.recovery.supervisor import LaunchSummary, Supervisor
from autotune.search.study import StudyStore
from autotune.workers.launchers import ForkLauncher
from benchmarks.reliability.fault_ground import Found, Ground, gone, limited_group
from benchmarks.reliability.planting import SPACE, lost
from benchmarks.reliability.recovery import AUTO, BATCH, SCRIPT, argv, rung, seen_samples, trained
from benchmarks.reliability.study_calls import WAIT_SECONDS, last_line, start, trial_folders, wait_for
from benchmarks.trials.ranks import LocalExecutor

CALLS = ("tuner: SIGKILL", "tuner and its group: SIGKILL", "everything: SIGKILL", "tuner: clock jumps", "NVML: gone")
KILLS = 3  # of one study
STEPS = 12
TRAININGS = (
    "training rank: SIGKILL",
    "training ranks, all: SIGKILL",
    "training rank: host memory",
    "training rank: SIGSTOP",
    "training rank: SIGSEGV",
    "training: clock jumps",
    "launch: SIGKILL",
)
RESTARTED = (
    "training rank: SIGKILL",
    "training ranks, all: SIGKILL",
    "training rank: host memory",
    "training rank: SIGSTOP",
    "training: clock jumps",
)
SILENT_SECONDS = 20.0  # until a training that is stopped hangs


# -- calls of `autotune run` ---------------------------------------------------------------------------------------------


def stricken_calls(ground: Ground, executor: LocalExecutor, folder: Path, chosen: random.Random, found: Found) -> None:
    """Calls on one study, each killed at a random moment; the last is left in peace, and must find a winner."""
    (folder / "faults.yaml").write_text(SPACE)
    besides, told = {server_of(executor).pid}, dict[int, Any]()
    for _ in range(KILLS):
        stricken_call(ground, folder, chosen, found, besides)
        found.violations += ground.leftovers(besides, sockets=False)
        if found.faults[-1]["phase"] == "in a trial":
            store = StudyStore.load(str(folder / "runs/s"))
            found.violations += lost(told, store)
            told = {r.number: r.outcome for r in store.records() if r.outcome is not None}
    last_call(folder, chosen.random() < 0.5, told, found)
    found.violations += ground.leftovers(besides, folder / "runs/s/trials")


def stricken_call(ground: Ground, folder: Path, chosen: random.Random, found: Found, besides: set[int]) -> None:
    """One call, and its end."""
    kind, early, delay = chosen.choice(CALLS[:4]), chosen.random() < 0.2, chosen.uniform(0.0, 3.0)
    before, began = trial_folders(folder), time.monotonic()
    with start(folder, "--max-trials", "50") as call:
        if not early:
            wait_for(lambda: trial_folders(folder) > before or call.poll() is not None)
            if call.poll() is not None or trial_folders(folder) == before:
                found.violations.append(f"a call starts no trial: {last_line(folder)}")
            if found.faults:
                found.faults[-1]["seconds"] = round(time.monotonic() - began, 3)
        time.sleep(delay)
        if kind == "tuner: clock jumps":
            ground.shift_clock(chosen.uniform(-3e8, 3e8))
            time.sleep(1.0)
        strike_call(ground, call, kind, besides)
    ground.shift_clock(0.0)
    phase = "before a trial" if trial_folders(folder) == before else "in a trial"
    found.add(kind, phase, "killed")


def server_of(executor: LocalExecutor) -> psutil.Process:
    executor.ensure_launcher()
    assert isinstance(executor.launcher, ForkLauncher)
    return psutil.Process(executor.launcher.server)


def strike_call(ground: Ground, call: subprocess.Popen[bytes], kind: str, besides: set[int]) -> None:
    if kind == "tuner and its group: SIGKILL":
        with contextlib.suppress(ProcessLookupError):
            os.killpg(call.pid, signal.SIGKILL)
    call.kill()
    if kind == "everything: SIGKILL":  # as a container's out-of-memory does
        for process in ground.processes(besides):
            with contextlib.suppress(psutil.Error):
                process.kill()


def last_call(folder: Path, broken: bool, told: dict[int, Any], found: Found) -> None:
    """The call that is left in peace, but for a driver's library that is no library."""
    env: dict[str, str] = {}
    before, began, killed = trial_folders(folder), time.monotonic(), found.faults[-1]
    if broken:
        (folder / "libnvidia-ml.so.1").write_text("no library")
        env["LD_LIBRARY_PATH"] = str(folder)
        found.add("NVML: gone", "in a call")
    with start(folder, "--max-trials", "2", **env) as call:
        if wait_for(lambda: trial_folders(folder) > before):
            killed["seconds"] = round(time.monotonic() - began, 3)
        try:
            code: int | None = call.wait(timeout=WAIT_SECONDS * 2)
        except subprocess.TimeoutExpired:
            code = None
            call.kill()
    if code != 0:
        found.violations.append(f"the call after the kills ended with {code}: {last_line(folder)}")
        return
    store = StudyStore.load(str(folder / "runs/s"))
    found.violations += lost(told, store)
    if store.winner is None:
        found.violations.append("the call after the kills has no winner")


# -- trainings -----------------------------------------------------------------------------------------------------------


def stricken_training(
    ground: Ground, executor: LocalExecutor, folder: Path, chosen: random.Random, found: Found
) -> None:
    """A training that is struck once, then one to its end where that has ended it."""
    kinds = [
        kind
        for kind in TRAININGS
        if kind != "training rank: host memory" or "host memory: cgroup" not in ground.forbidden
    ]
    kind, steps = chosen.choice(kinds), chosen.randint(0, 9)
    (folder / "ds.json").write_text(json.dumps(AUTO))
    server = server_of(executor)
    row, over = found.add(kind, f"step {steps}"), threading.Event()
    if kind == "launch: SIGKILL":
        launch_killed(folder, steps, chosen.uniform(0.0, 0.5))
        row["outcome"] = "killed"
        found.violations += ground.leftovers({server.pid}, sockets=False)
        summary = None
    else:
        if kind == "training: clock jumps":
            ground.shift_clock(chosen.choice([-1, 1]) * chosen.uniform(3600, 3e8))
        striking = threading.Thread(
            target=strike_training, args=(kind, folder, server, steps, chosen.randrange(2), row, over), daemon=True
        )
        striking.start()
        summary = launch(executor, folder, restarts=3)
        over.set()
        striking.join(timeout=WAIT_SECONDS)
        ground.shift_clock(0.0)
        row["outcome"] = f"exit code {summary.code} after {len(summary.attempts)} attempts"
        found.violations += ground.leftovers({server.pid})
        found.violations += judge_training(kind, steps, summary)
    if summary is None or summary.code:
        for file in folder.glob("seen.*"):
            file.unlink()
        again = launch(executor, folder, restarts=0)
        if again.code:
            found.violations.append(f"the training after {kind} ended with {again.code}: {again.attempts[-1].ended}")
        found.violations += ground.leftovers({server.pid})
    if seen_samples(folder) != {step: set(range(BATCH * step, BATCH * (step + 1))) for step in range(STEPS)}:
        found.violations.append(f"{kind} at step {steps}: other samples than undisturbed")


def training_job(folder: Path) -> Job:
    return Job(ModelSpec("long", {}, str(SCRIPT)), 2, 32, "fp32", script=Script(tuple(argv(STEPS)), str(folder)))


def launch(executor: LocalExecutor | None, folder: Path, restarts: int) -> LaunchSummary:
    """Trains to the end, or until it fails for good; ranks are forked from the executor's server, where there is one."""
    return Supervisor(
        training_job(folder),
        detect("cpu", 2),
        [rung(4), rung(2), rung(1)],
        folder,
        max_restarts=restarts,
        silent_seconds=SILENT_SECONDS,
        print_line=lambda text: None,
        machine=executor.target if executor is not None else None,
    ).run()


def strike_training(
    kind: str, folder: Path, server: psutil.Process, steps: int, rank: int, row: dict[str, Any], over: threading.Event
) -> None:
    """Strikes once the training has done so many steps, and times how long it is until it steps again."""
    wait_for(lambda: over.is_set() or (server.children() and trained(folder)[1] >= steps))
    ranks = sorted(server.children(), key=lambda process: process.pid)
    attempts, struck = trained(folder)[0], time.monotonic()
    group = None
    with contextlib.suppress(psutil.Error, IndexError, OSError):
        if kind == "training ranks, all: SIGKILL":
            for process in ranks:
                process.kill()
        elif kind == "training rank: host memory":
            group = limited_group("training", 4 * 2**20)
            (group / "cgroup.procs").write_text(str(ranks[rank].pid))
        elif kind in ("training rank: SIGSTOP", "training rank: SIGSEGV"):
            ranks[rank].send_signal(signal.SIGSTOP if kind.endswith("STOP") else signal.SIGSEGV)
        else:
            ranks[rank].kill()
    wait_for(lambda: over.is_set() or trained(folder) >= (attempts + 1, 1))
    if trained(folder)[0] > attempts:
        row["seconds"] = round(time.monotonic() - struck, 3)
    if group is not None:
        gone(group)


def judge_training(kind: str, steps: int, summary: LaunchSummary) -> list[str]:
    """What a training must have come to."""
    if kind not in RESTARTED:
        return [] if summary.code else [f"{kind}: the training ended as if nothing had been"]
    ended = "; ".join(attempt.ended for attempt in summary.attempts)
    if summary.code:
        return [f"{kind} at step {steps}: the training ended with {summary.code}: {ended}"]
    if steps > 6 and len(summary.attempts) > 1 and not summary.attempts[1].resumed_from:  # it saves at step 5
        return [f"{kind} at step {steps}: begun anew, with a checkpoint there"]
    return []


def launch_killed(folder: Path, steps: int, delay: float) -> None:
    """A launch of its own process with cold ranks, killed."""
    process = multiprocessing.get_context("fork").Process(target=launch, args=(None, folder, 0))
    process.start()
    wait_for(lambda: trained(folder)[1] >= steps or not process.is_alive())
    time.sleep(delay)
    process.kill()
    process.join()
