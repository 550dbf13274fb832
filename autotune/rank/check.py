"""A rank that trains nothing: it takes its device, joins its process group and adds 64 MiB up over all ranks.

What fails here is the machine's: no candidate is in it yet.
"""

from __future__ import annotations

import sys
import time
from typing import NoReturn

from autotune.group.ending import die_with_parent
from autotune.problem.outcome import Phase
from autotune.rank.base import BaseRank
from autotune.rank.measuring import measure_as

ELEMENTS = 16 * 2**20  # of fp32: more than any protocol for small messages takes


class CheckRank(BaseRank):
    """Answers with one `measured` message: the seconds of an all-reduce."""

    def run(self) -> None:
        self.begin()
        self.enter(Phase.INIT)
        self.fault(Phase.INIT)
        device = self.own_device
        summed = self.torch.ones(ELEMENTS, device=device.torch_device())
        seconds = 0.0
        for _ in range(2):  # the first one makes the connections
            summed.fill_(1.0)
            began = time.perf_counter()
            if self.world > 1:
                self.torch.distributed.all_reduce(summed)
            device.synchronize()
            seconds = time.perf_counter() - began
        if (got := float(summed.mean())) != self.world:
            raise RuntimeError(f"an all-reduce of ones over {self.world} ranks gave {got:g}")
        self.channel.send("measured", seconds=seconds)
        self.channel.receive()  # until told to leave: a rank that is gone has failed


def become(address: str, number: int) -> NoReturn:
    """Turns this process into rank `number` of the group whose parent listens at `address`, a Unix socket."""
    measure_as(CheckRank, address, number)


def main() -> None:
    die_with_parent()
    become(sys.argv[1], int(sys.argv[2]))


if __name__ == "__main__":
    main()
