"""Rank that trains nothing: it takes its device, joins the process group and all-reduces 64 MiB.

A failure here is attributable to the machine, because no candidate is involved.
"""

from __future__ import annotations

import time
from functools import partial

from autotune.problem.outcome import Phase
from autotune.rank.base import BaseRank
from autotune.rank.measure import measure_as, run_as

ELEMENTS = 16 * 2**20  # fp32 elements; above the limit of every small-message protocol


class CheckRank(BaseRank):
    """Send `imported` after the imports, and then the rate of an all-reduce as one `measured` message."""

    def _join_group(self, backend: str) -> None:
        import deepspeed  # noqa: F401  # imported first: rendezvous is timed without it, and a disk may take minutes

        self.channel.send("imported")
        super()._join_group(backend)

    def run(self) -> None:
        """Join the process group, all-reduce, and report the rate in GB/s."""
        self.begin()
        self.enter(Phase.INIT)
        self.fault(Phase.INIT)
        device = self.own_device
        for _ in range(2):  # the first all-reduce opens the connections
            summed = self.torch.ones(ELEMENTS, device=device.torch_device())
            began = time.perf_counter()
            self.torch.distributed.all_reduce(summed)
            device.synchronize()
            seconds = time.perf_counter() - began
        if (got := float(summed.mean())) != self.world:
            raise RuntimeError(f"an all-reduce of ones over {self.world} ranks gave {got:g}")
        # a ring sends these GB through each rank's link
        self.channel.send("measured", gb_per_s=2e-9 * (1 - 1 / self.world) * summed.nbytes / seconds)
        self.channel.receive()  # wait for the order to leave: the parent counts a rank that ends earlier as failed


become = partial(measure_as, CheckRank)  # arguments: address, number


if __name__ == "__main__":
    run_as(CheckRank)
