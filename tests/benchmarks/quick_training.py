"""A rank that trains nothing, twelve steps of it: it notes samples as tests/scripts/long_batches.py does, saves what Trainer
leaves of a checkpoint every five steps, and goes on from it as `autotune.rank.train_rank` would."""

import json
import os
import sys
import time
from pathlib import Path
from typing import NoReturn

from autotune.rank.base import connect_to_parent
from autotune.rank.checkpoints import CheckpointLedger, CheckpointShare, checkpoint_to_resume
from autotune.workers.protocol import Channel, Message

STEPS, BATCH, SAVE_STEPS = 12, 8, 5


def note(number: int, **entry: object) -> None:
    with open(f"seen.rank{number}.jsonl", "a") as file:
        file.write(json.dumps(entry) + "\n")


def save(step: int) -> None:
    folder = Path("out") / f"checkpoint-{step}"
    (folder / "shards").mkdir(parents=True, exist_ok=True)
    for file in ("rng_state_0.pth", "rng_state_1.pth", "shards/mp_rank_00_model_states.pt"):
        (folder / file).write_text("whole")
    (folder / "latest").write_text("shards")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))


def become(address: str, number: int) -> NoReturn:
    channel, spec = connect_to_parent(address, number)
    os.chdir(spec["job"]["script"]["cwd"])
    begin = resumed(channel, spec, number)
    if begin:
        channel.send("resumed", path=f"out/checkpoint-{begin}")
    note(number, started=True)
    for step in range(begin, STEPS):
        mine = range(BATCH * step + number, BATCH * (step + 1), 2)
        note(number, step=step, samples=list(mine))
        time.sleep(0.1)
        channel.send("progress", steps=step + 1)
        if number == 0 and (step + 1) % SAVE_STEPS == 0:
            save(step + 1)
    channel.send("bye", code=0)
    sys.stdout.flush()
    os._exit(0)


def resumed(channel: Channel, spec: Message, number: int) -> int:
    """The step of the newest checkpoint of this launch."""
    folder = Path("out").resolve()
    ledger = CheckpointLedger.of(folder, spec["earlier"].get(str(folder)))
    ledger.begin()
    if number == 0:
        channel.send("checkpoints", folder=str(folder), ledger=ledger.to_json())
    choice = checkpoint_to_resume([ledger.seen(CheckpointShare(rank, 2, rank), None) for rank in range(2)], ledger.call)
    return choice.step or 0 if choice else 0


if __name__ == "__main__":
    become(sys.argv[1], int(sys.argv[2]))
