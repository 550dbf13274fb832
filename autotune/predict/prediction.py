"""Predictions for their readers: arrays of many candidates, and one candidate with its memory and time broken down."""

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

SIGMAS = 2.0  # half the width of an interval, in standard deviations
SURE = 0.9  # smallest probability of fitting at which a config is recommended
SURE_SIGMAS = 1.2816  # standard deviations between the expected need and the ceiling, at that probability


@dataclass(frozen=True)
class Prediction:
    """Prediction of one candidate; intervals hold 95 %."""

    candidate: Candidate
    peak_bytes: float  # as NVML shows it: at most the card's capacity, unless more is needed
    peak_interval: tuple[float, float]
    allocated_bytes: float  # by torch
    allocated_interval: tuple[float, float]
    # bytes that the card must have; the allocator returns the rest of what NVML shows before an OOM
    needed_bytes: float
    sure_bytes: float  # bytes that are enough with the probability SURE
    memory: dict[str, float]  # bytes by content, at the peak
    moment: str  # moment of the peak: forward, backward, step or init
    host_bytes: float  # of one rank
    step_seconds: float
    step_interval: tuple[float, float]
    time: dict[str, float]  # seconds by cause
    samples_per_second: float
    binding: str  # the limit: device memory, host memory, or the largest cause of step time
    fits: bool  # as expected, at even odds
    chance: float  # probability that the need stays under the ceiling; 0 if main memory is too small
    exact: bool  # False if the model could not be traced

    @property
    def sure(self) -> bool:
        """Check that it fits with the probability SURE."""
        return self.chance >= SURE - 1e-4


@dataclass
class Table:
    """Predictions of many candidates as arrays, in their order."""

    peak: Floats  # as NVML shows it
    peak_sigma: Floats
    allocated: Floats  # by torch
    allocated_sigma: Floats
    needed: Floats  # bytes of the card
    host: Floats
    step: Floats
    step_sigma: Floats  # in the logarithm
    samples: Floats  # per second, all ranks together

    @property
    def sure(self) -> Floats:
        """Return the bytes of the card that are enough with the probability SURE."""
        return self.needed + SURE_SIGMAS * self.peak_sigma


@dataclass(frozen=True)
class Breakdowns:
    """Data needed to describe each of many candidates. Arrays are in the candidates' order."""

    hardware: Hardware
    ranks: int
    prepared: Prepared
    table: Table
    fits: Flags
    margins: Floats  # standard deviations, from `Predictor.margins`
    moments: Floats  # (moments, n) bytes, from `memory.moments`
    memory_constants: dict[str, float]
    spent: Spent
    slower: Floats  # the table's step divided by that of `spent`
    exact: list[bool]  # each candidate's model was traced

    def of(self, candidate: Candidate, i: int) -> Prediction:
        """Return the prediction of the candidate at index `i`."""
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
        """Return the interval of NVML's bytes, capped at the card's capacity unless more may be needed."""
        low, high = _interval(peak, sigma)
        return low, max(min(high, float(self.hardware.capacity_bytes)), needed + SIGMAS * sigma, peak)

    def _memory(self, candidate: Candidate, i: int, at: int) -> dict[str, float]:
        """Return the bytes at moment `at` by content; they add up to the peak. The allocator gets the rest."""
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
        # a calibration may find slightly less than the tensors' sum
        less = min(1.0, whole / tensors) if tensors > 0 else 1.0
        memory = {name: less * float(size) for name, size in memory.items()}
        return {**memory, "allocator": max(0.0, whole - tensors), "context and communication": float(overhead)}

    def _time(self, i: int) -> dict[str, float]:
        """Return seconds by cause, scaled to the step that the table predicts."""
        causes = ("forward", "backward", "recompute", "communication", "optimizer", "offload", "loop")
        return {name: float(getattr(self.spent, name)[i]) * self.slower[i] for name in causes}

    def _binding(self, needed: float, host_of_all: float, time: dict[str, float], i: int) -> str:
        """Return the limit of the candidate: memory that it exceeds, or the cause that takes most of its step."""
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
