"""A rank that trains nothing: it speaks the protocol, and ends as the variable FAKE_RANK says.

FAKE_RANK is JSON: {"rank": 1, "where": "hello" or a phase, "what": ...}; all other ranks do as they are told. `what`:
`hang`, a signal's name, `exit N` (without a word), `bye N SIGNAL` (its script is over with exit code N, then it dies),
`error TEXT`, `worker` (starts a process in a session of its own and goes on), `worker SIGNAL` (the same, and dies), `task` (a
worker in the rank's own session), `compute` (says nothing more, and computes), `beat` (says nothing, computes nothing, and its pulse goes). `device` and `numbers` are what the
rank tells of its GPU, and with its error.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time

from autotune.workers.protocol import Channel


def misbehave(channel: Channel | None, what: str, numbers: dict[str, int] | None = None) -> None:
    word, *rest = what.split()
    if word == "hang":
        time.sleep(3600)
    elif word == "exit":
        os._exit(int(rest[0]))
    elif word == "bye":
        channel.send("bye", code=int(rest[0]))
        os.kill(os.getpid(), getattr(signal, rest[1]))
    elif word == "error":
        channel.send(
            "error", kinds=["builtins.RuntimeError"], text=" ".join(rest), phase="forward", rank=1, numbers=numbers
        )
        time.sleep(3600)
    elif word == "compute":
        while True:
            pass
    elif word == "beat":
        assert channel is not None
        while True:
            channel.send("pulse", moved=True, where="fake_rank.py", waits=False)
            time.sleep(0.1)
    elif word in ("worker", "task"):
        subprocess.Popen(["sleep", "3600"], start_new_session=word == "worker")
        if rest:
            os.kill(os.getpid(), getattr(signal, rest[0]))
    else:
        os.kill(os.getpid(), getattr(signal, word))


def main(address: str, number: int) -> None:
    plan = json.loads(os.environ.get("FAKE_RANK", "{}"))
    mine = plan.get("where") if plan.get("rank") in (number, None) else None
    if mine == "hello":
        misbehave(None, plan["what"])
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(address)
    channel = Channel(sock)
    channel.send("hello", rank=number, pid=os.getpid())
    spec = channel.receive()
    assert spec is not None
    assert spec["rank"] == number
    if isinstance(spec["store"], dict) and spec["store"]["port"] is None:  # of several machines
        channel.send("store", port=1, scripts_port=2)
    if "note" in plan:
        channel.send("note", spec=spec, env={name: os.environ.get(name) for name in plan["note"]})
    if number in (plan.get("rank"), None) and "device" in plan:
        channel.send("device", **plan["device"])
    for phase in ("start", "init", "load", "forward", "backward", "step", "save"):
        channel.send("phase", phase=phase)
        if mine == phase:
            misbehave(channel, plan["what"], plan.get("numbers"))
    channel.send("phase", phase="ready")
    while (message := channel.receive()) is not None and message["type"] != "leave":
        channel.send("progress")
    channel.send("bye", code=0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
