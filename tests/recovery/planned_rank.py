"""A rank that trains nothing: it ends as `plan.json` says, in the folder that it starts in: a list, by attempt, of which the last
entry stands for all that follow. An entry has `hello` (`exit N` or a signal before the first word), `steps`, `kinds` and `error`
(a report of the failure; `unloaded`: a checkpoint upon which), `signal`, `code` (the script's own), `traced` (a trace to report), `run` (words of a process that is left running at the end); `wait`
has it write `waiting` and wait for a file `go`, `caught` are signals that it catches: it writes their names into `caught` and waits
on, and after SIGTERM no more; `output` is a folder of Trainer's, `resumed`
a checkpoint, and `written` when it was. What it is told of bad checkpoints it adds to the file `bad`, a line
an attempt, and of output folders that earlier attempts have begun with to `begun`.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

from autotune.rank.base import connect_to_parent

PLAN = "plan.json"


def leave(what: str) -> NoReturn:
    word, *rest = what.split()
    if word == "exit":
        os._exit(int(rest[0]))
    os.kill(os.getpid(), getattr(signal, word))
    time.sleep(3600)
    os._exit(1)


def mine(number: int) -> dict:
    count = Path(f"attempts.rank{number}")
    attempt = len(count.read_text()) if count.exists() else 0
    count.write_text("x" * (attempt + 1))
    plan = json.loads(Path(PLAN).read_text())
    return plan[min(attempt, len(plan) - 1)]


def catch(number: int, _: object) -> None:
    name = signal.Signals(number).name
    with Path("caught").open("a") as file:
        file.write(f"{name} ")
    if name == "SIGTERM":
        Path("go").touch()


def main(address: str, number: int) -> None:
    plan = mine(number)
    if "hello" in plan:
        leave(plan["hello"])
    for name in plan.get("caught", ()):
        signal.signal(getattr(signal, name), catch)
    channel, spec = connect_to_parent(address, number)
    for what in ("bad", "begun"):
        with Path(what).open("a") as file:
            file.write(json.dumps(spec[what]) + "\n")
    channel.send("phase", phase="forward")
    if "output" in plan:
        channel.send("output", folder=plan["output"])
    if "resumed" in plan:
        channel.send("resumed", path=plan["resumed"], written=plan.get("written"))
    for step in range(plan.get("steps", 0)):
        channel.send("progress", steps=step + 1)
    if "traced" in plan:
        channel.send("traced", trace=plan["traced"])
    if plan.get("wait"):
        Path("waiting").write_text(str(os.getpid()))
        while not Path("go").exists():
            time.sleep(0.02)
    if "run" in plan:
        Path("left").write_text(str(subprocess.Popen(plan["run"]).pid))
    if "error" in plan:
        kinds = plan.get("kinds", ["builtins.RuntimeError"])
        channel.send(
            "error", kinds=kinds, text=plan["error"], phase="forward", rank=number, unloaded=plan.get("unloaded")
        )
        os._exit(13)
    if "signal" in plan:
        leave(plan["signal"])
    code = plan.get("code", 0)
    channel.send("bye", code=code, steps=plan.get("steps", 0))
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
