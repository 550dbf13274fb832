"""A rank that measures nothing: it does what the tuner asks at once, imports no torch, and meets the faults that are planted.

The harness of faults is tested with it; what it finds is told by real ranks.
"""

import time
import types
from typing import Any, NoReturn

from autotune.problem.outcome import Phase
from autotune.rank.base import BaseRank
from autotune.rank.measure import measure_as


def none_left(size: int) -> None:
    raise RuntimeError(
        f"[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate {4 * size} bytes."
    )


class QuickRank(BaseRank):
    torch: Any = types.SimpleNamespace(ones=none_left)

    def run(self) -> None:
        for phase in (Phase.START, Phase.INIT, *([Phase.LOAD] if self.spec.get("resume") else [])):
            self.enter(phase)
            self.fault(phase)
        self.channel.send("phase", phase="ready")
        while (message := self.channel.receive()) is not None and message["type"] != "stop":
            for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.STEP):
                self.phase = phase
                self.fault(phase)
            if message["type"] == "certify":
                self.phase = Phase.SAVE
                self.fault(Phase.SAVE)
                time.sleep(0.2)  # to be struck in
            answer = {"step_seconds": [0.01, 0.01], "measured_seconds": 0.02, "data_bytes": 2**20}
            self.channel.send("measured", **answer, checkpointed=message["type"] == "checkpoint")


def become(address: str, number: int) -> NoReturn:
    measure_as(QuickRank, address, number)
