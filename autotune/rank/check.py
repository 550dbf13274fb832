"""A rank that trains nothing: it takes its device, joins its process group and adds 64 MiB up over all ranks.

What fails here is the machine's: no candidate is in it yet.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

from autotune.problem.outcome import Phase
from autotune.rank.base import BaseRank
from autotune.rank.measuring import measure_as, run_as

if TYPE_CHECKING:
    from autotune.rank.devices import Device

ELEMENTS = 16 * 2**20  # of fp32: more than any protocol for small messages takes


class CheckRank(BaseRank):
    """Says `imported` once all is, and answers with one `measured` message: the seconds of an all-reduce."""

    def _join_group(self, device: Device) -> None:
        import deepspeed  # noqa: F401  # what meeting the others takes begins after it: a network's disk may take minutes

        self.channel.send("imported")
        super()._join_group(device)

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


become = partial(measure_as, CheckRank)  # address, number


if __name__ == "__main__":
    run_as(CheckRank)
