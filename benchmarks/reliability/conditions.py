"""A study on a hostile machine: `python benchmarks/reliability/conditions.py [--only CASE…] [--json FILE]`, on two CPU ranks.

- `terminal`: the pseudo-terminal of the call is closed while a trial runs (SIGHUP).
- `shm`: `/dev/shm` has no free byte, in a mount namespace of the call.
- `ports`: 29500 to 29509 are taken, and nearly all ephemeral ports, in a network namespace of the call.
- `clock +` and `clock -`: the wall clock jumps by ten hours in a trial (`clock_shift.c`, preloaded into every process).

Each call must end as it should, in one line where it cannot go on; no process, shared memory or temporary folder is left, what
was stored is intact, and the next call on a sound machine measures. What this machine does not permit is a row with its reason.
"""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if not __package__:  # started by its path: benchmarks import each other from the repository's root
    sys.path[0] = str(Path(__file__).parents[2])

from autotune.search.study import StudyStore
from benchmarks.common import command_line, kept_rows, parse, print_table, write_json
from benchmarks.reliability.fault_ground import Ground
from benchmarks.reliability.planting import SPACE, lost
from benchmarks.reliability.study_calls import COMMAND, RUN, last_line, start, trial_folders, wait_for

HOUR = 3600
END_SECONDS = 120.0
BUDGET_SECONDS = 40.0  # of a call whose clock jumps
LATE_SECONDS = 45.0  # that a call may take beyond its budget: it loads ops before, and writes its report after
FULL_SHM = 'mount -t tmpfs -o size=64k shm /dev/shm && (cat /dev/zero > /dev/shm/full; true) 2> /dev/null; exec "$@"'
# Of 64 ephemeral ports 16 stay free; DeepSpeed's and torchrun's default and its neighbours are taken.
TAKE_PORTS = """
import fcntl, os, socket, struct, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
    fcntl.ioctl(s, 0x8914, struct.pack("16sH14s", b"lo", 1, b""))  # SIOCSIFFLAGS: the loopback is up
with open("/proc/sys/net/ipv4/ip_local_port_range", "w") as file:
    file.write("40000 40063")
held = []
for port in [*range(29500, 29510), *range(40000, 40048)]:
    held.append(socket.socket())
    held[-1].bind(("0.0.0.0", port))
    held[-1].listen()
    os.set_inheritable(held[-1].fileno(), True)
os.execvp(sys.argv[1], sys.argv[1:])
"""


class NotPermitted(Exception):
    """This machine lacks what a case needs."""


def require(words: list[str], what: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise NotPermitted(f"{what}: {(done.stderr.strip().splitlines() or ['refused'])[-1][:120]}")


def ended(call: subprocess.Popen[bytes], seconds: float = END_SECONDS) -> int | None:
    try:
        return call.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        call.kill()
        call.wait()
        return None


def in_a_trial(call: subprocess.Popen[bytes], folder: Path) -> None:
    if not wait_for(lambda: trial_folders(folder) or call.poll() is not None) or call.poll() is not None:
        raise RuntimeError(f"the call starts no trial: {last_line(folder)}")


def terminal(ground: Ground, folder: Path) -> tuple[str, list[str]]:
    ours, theirs = pty.openpty()
    call = subprocess.Popen(
        ["setsid", "--ctty", "--wait", *COMMAND, "run", *RUN, "--max-trials", "60"],
        cwd=folder,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    (folder / "call.log").touch()
    closing = threading.Event()

    def read() -> None:
        """Take what the call shows: it would wait for a terminal that is full."""
        while not closing.is_set():
            if select.select([ours], [], [], 0.1)[0]:
                os.read(ours, 65536)

    reading = threading.Thread(target=read, daemon=True)
    reading.start()
    in_a_trial(call, folder)
    time.sleep(1.0)
    closing.set()
    reading.join()
    began = time.monotonic()
    os.close(ours)
    code = ended(call)
    wrong = [] if code in (0, 130) else [f"exit code {code}"]
    return f"exit {code} after {time.monotonic() - began:.1f} s", wrong


def hindered(ground: Ground, folder: Path, wrapper: list[str]) -> tuple[str, list[str]]:
    """A call under a wrapper, which has to find a winner or to end in one line with exit code 4."""
    log = folder / "call.log"
    with log.open("ab") as out:
        call = subprocess.Popen(
            [*wrapper, *COMMAND, "run", *RUN, "--max-trials", "2"], cwd=folder, stdout=out, stderr=out
        )
    code = ended(call)
    text = log.read_text(errors="replace")
    wrong = [] if code in (0, 4) else [f"exit code {code}: {last_line(folder)}"]
    wrong += ["a traceback is shown"] if "Traceback" in text else []
    stored = StudyStore.load(str(folder / "runs/s")).records() if (folder / "runs/s").exists() else []
    measured = sum(one.outcome is not None and one.outcome.ok for one in stored)
    return f"exit {code}, {measured} of {len(stored)} trials measured", wrong


def shm(ground: Ground, folder: Path) -> tuple[str, list[str]]:
    wrapper = ["unshare", "-m", "--propagation", "private", "sh", "-c", FULL_SHM, "sh"]
    require([*wrapper, "true"], "a mount namespace")
    return hindered(ground, folder, wrapper)


def ports(ground: Ground, folder: Path) -> tuple[str, list[str]]:
    wrapper = ["unshare", "-n", sys.executable, "-c", TAKE_PORTS]
    require([*wrapper, "true"], "a network namespace")
    return hindered(ground, folder, wrapper)


def clock(seconds: int) -> Callable[[Ground, Path], tuple[str, list[str]]]:
    def jumps(ground: Ground, folder: Path) -> tuple[str, list[str]]:
        compiler = shutil.which("gcc") or shutil.which("cc")
        if compiler is None:
            raise NotPermitted("a C compiler: none is installed")
        library, now = folder / "clock_shift.so", folder / "clock"
        source = Path(__file__).with_name("clock_shift.c")
        require([compiler, "-shared", "-fPIC", "-O2", "-o", str(library), str(source), "-ldl"], "a C compiler")
        now.write_text("0")
        env = {"LD_PRELOAD": str(library), "RELIABILITY_CLOCK": str(now)}
        began = time.monotonic()
        with start(folder, "--budget", f"{BUDGET_SECONDS:.0f}s", **env) as call:
            in_a_trial(call, folder)
            now.write_text(str(seconds))
            code = ended(call)
        took = time.monotonic() - began
        last = StudyStore.load(str(folder / "runs/s")).calls()[-1]
        wrong = [] if code == 0 else [f"exit code {code}: {last_line(folder)}"]
        if took > BUDGET_SECONDS + LATE_SECONDS or last.used_seconds > took:
            wrong.append(f"{last.used_seconds} s are stored of {took:.0f} s, budget {BUDGET_SECONDS:.0f} s")
        if last.used_seconds < 0.5 * BUDGET_SECONDS:
            wrong.append(f"ended early: {last.ended}")
        return f"exit {code} after {took:.1f} s, {last.used_seconds} s stored, {last.ended}", wrong

    return jumps


CASES: dict[str, Callable[[Ground, Path], tuple[str, list[str]]]] = {
    "ports": ports,
    "shm": shm,
    "terminal": terminal,
    "clock +": clock(10 * HOUR),
    "clock -": clock(-10 * HOUR),
}


def row(ground: Ground, case: str) -> dict[str, Any]:
    folder = ground.root / case.replace(" ", "")
    folder.mkdir()
    (folder / "faults.yaml").write_text(SPACE)
    result: dict[str, Any] = {"case": case, "skipped": "", "seen": "", "next call": "", "violations": ""}
    try:
        result["seen"], violations = CASES[case](ground, folder)
    except NotPermitted as why:
        return {**result, "skipped": str(why)}
    violations += ground.leftovers(set(), sockets=True)
    study = str(folder / "runs/s")
    stored = StudyStore.load(study).records() if (folder / "runs/s").exists() else []
    told = {record.number: record.outcome for record in stored if record.outcome is not None}
    with start(folder, "--max-trials", "1", "--force") as call:  # LD_PRELOAD is part of what a study was measured under
        code = ended(call)
    violations += [] if code == 0 else [f"the next call ended with {code}: {last_line(folder)}"]
    store = StudyStore.load(study)
    violations += [*lost(told, store), *([] if store.winner else ["no winner"])]
    violations += ground.leftovers(set(), folder / "runs/s/trials")
    shutil.rmtree(folder)
    return {**result, "next call": f"exit {code}", "violations": "; ".join(violations)}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES), metavar="CASE")
    arguments = parse(parser, only=["ports"])
    rows = kept_rows(arguments.json, "case", arguments.only)
    ground = Ground()
    try:
        for case in arguments.only:
            rows.append(row(ground, case))
            print(rows[-1], flush=True)
            write_json(arguments.json, rows)
    finally:
        ground.close()
    print_table("a study on a hostile machine", rows)
    if bad := [one for one in rows if one["violations"]]:
        raise SystemExit(f"{len(bad)} cases with violations")


if __name__ == "__main__":
    main()
