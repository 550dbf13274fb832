"""Predictions as they are read: arrays of many candidates, and one candidate with what its memory and time are made of."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from autotune.predict.knobs import Flags, Floats
from autotune.predict.prepared import Prepared
from autotune.predict.roofline import Spent, host_limit_bytes
from autotune.problem.candidate import Candidate
from autotune.problem.hardware import Hardware
from autotune.units import GIB

SIGMAS = 2.0  # half the width of an interval
SURE = 0.9  # the least probability of fitting at which a config is recommended
SURE_SIGMAS = 1.2816  # between what is expected and the ceiling, at that probability


@dataclass(frozen=True)
class Prediction:
    """What is expected of one candidate; intervals hold 95 %."""

    candidate: Candidate
    peak_bytes: float  # as NVML shows it: no more than the card, unless more is needed
    peak_interval: tuple[float, float]
    allocated_bytes: float  # by torch
    allocated_interval: tuple[float, float]
    needed_bytes: float  # what the card must have; what NVML shows beyond it is given back before memory runs out
    sure_bytes: float  # the same, with the probability SURE
    memory: dict[str, float]  # bytes by what they hold, at the peak
    moment: str  # of the peak: forward, backward, step or init
    host_bytes: float  # of one rank
    step_seconds: float
    step_interval: tuple[float, float]
    time: dict[str, float]  # seconds by cause
    samples_per_second: float
    binding: str  # what limits it
    fits: bool  # as it is expected, at even odds
    chance: float  # that it fits: that what it needs stays under the ceiling; 0 where main memory is too small
    exact: bool  # False where the model could not be traced

    @property
    def sure(self) -> bool:
        """Whether it fits with the probability SURE."""
        return self.chance >= SURE - 1e-4


@dataclass
class Table:
    """Predictions of many candidates as arrays, in their order."""

    peak: Floats  # as NVML shows it
    peak_sigma: Floats
    allocated: Floats  # by torch
    allocated_sigma: Floats
    needed: Floats  # of the card
    host: Floats
    step: Floats
    step_sigma: Floats  # of the logarithm
    samples: Floats  # a second, all ranks

    @property
    def sure(self) -> Floats:
        """Bytes of the card that are enough with the probability SURE."""
        return self.needed + SURE_SIGMAS * self.peak_sigma


@dataclass(frozen=True)
class Breakdowns:
    """All that describing each of many candidates takes; arrays in the candidates' order."""

    hardware: Hardware
    ranks: int
    prepared: Prepared
    table: Table
    fits: Flags
    margins: Floats  # as `Predictor.margins` gives them
    moments: Floats  # (moments, n) bytes, as `memory.moments` gives them
    memory_constants: dict[str, float]
    spent: Spent
    slower: Floats  # the table's step over that of `spent`
    exact: list[bool]  # whether each candidate's model was traced

    def of(self, candidate: Candidate, i: int) -> Prediction:
        """The prediction of the candidate at place `i`."""
        table, bill = self.table, self.prepared.bill
        at = int(self.moments[:, i].argmax())
        time = self._time(i)
        peak, sigma, host = float(table.peak[i]), float(table.peak_sigma[i]), float(bill.host[i])
        step, spread = float(table.step[i]), float(np.exp(SIGMAS * table.step_sigma[i]))
        return Prediction(
            candidate=candidate,
            peak_bytes=peak,
            peak_interval=self._shown(peak, sigma, float(table.needed[i])),
            allocated_bytes=float(table.allocated[i]),
            allocated_interval=_interval(float(table.allocated[i]), float(table.allocated_sigma[i])),
            needed_bytes=float(table.needed[i]),
            sure_bytes=float(table.sure[i]),
            memory=self._memory(candidate, i, at),
            moment=bill.moments[at],
            host_bytes=host,
            step_seconds=step,
            step_interval=(step / spread, step * spread),
            time=time,
            samples_per_second=float(table.samples[i]),
            binding=self._binding(float(table.needed[i]), host * self.ranks / self.hardware.nodes, time, i),
            fits=bool(self.fits[i]),
            chance=0.5 * math.erfc(-float(self.margins[i]) / math.sqrt(2)),
            exact=self.exact[i],
        )

    def _shown(self, peak: float, sigma: float, needed: float) -> tuple[float, float]:
        """Of what NVML shows: no more than the card, but where more may be needed."""
        low, high = _interval(peak, sigma)
        return low, max(min(high, float(self.hardware.capacity_bytes)), needed + SIGMAS * sigma, peak)

    def _memory(self, candidate: Candidate, i: int, at: int) -> dict[str, float]:
        """Bytes at moment `at` by what they hold; they add up to the peak. The allocator has what nothing else has."""
        k, b = self.memory_constants, self.prepared.bill
        memory = {
            "parameters": b.parameters[i],
            "gradients": b.gradients[i],
            "optimizer": b.optimizer[i],
            "activations": b.activations[at, i],
            "buckets": k["buckets"] * b.buckets[at, i],
            "gathered parameters": k["gathered"] * b.gathered[at, i],
            "temporaries": k["temporaries"] * b.temporaries[at, i],
        }
        if self.hardware.device == "cpu":
            memory["host"] = b.host[i]
        overhead = k["overhead"] * GIB
        tensors, whole = sum(float(size) for size in memory.values()), float(self.table.peak[i]) - overhead
        less = min(1.0, whole / tensors) if tensors > 0 else 1.0  # a calibration may believe that all is a bit less
        memory = {name: less * float(size) for name, size in memory.items()}
        return {**memory, "allocator": max(0.0, whole - tensors), "context and communication": float(overhead)}

    def _time(self, i: int) -> dict[str, float]:
        """Seconds by cause, scaled to the step that the table predicts."""
        causes = ("forward", "backward", "recompute", "communication", "optimizer", "offload", "loop")
        return {name: float(getattr(self.spent, name)[i]) * self.slower[i] for name in causes}

    def _binding(self, needed: float, host_of_all: float, time: dict[str, float], i: int) -> str:
        """What limits the candidate: memory that it exceeds, or what its step spends most time on."""
        if needed > self.hardware.ceiling_bytes:
            return "device memory"
        if host_of_all > host_limit_bytes(self.hardware):
            return "host memory"
        spent = self.spent
        compute = time["forward"] + time["backward"] + time["recompute"]
        causes = {
            "kernel launches": compute * float(spent.launch_bound[i]),
            "memory bandwidth": compute * float(spent.moved_share[i]) * (1 - float(spent.launch_bound[i])),
            "computation": compute * float(1 - spent.moved_share[i]) * (1 - float(spent.launch_bound[i])),
            "communication": time["communication"],
            "optimizer": time["optimizer"],
            "offload": time["offload"],
            "the training loop": time["loop"],
        }
        return max(causes, key=causes.__getitem__)


def _interval(size: float, sigma: float) -> tuple[float, float]:
    return max(0.0, size - SIGMAS * sigma), size + SIGMAS * sigma
