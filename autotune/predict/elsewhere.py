"""The same job on other machines: predictions from one trace and a space thinned to what decides."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from autotune.errors import UserError
from autotune.predict.prediction import SURE_SIGMAS, Prediction, Table
from autotune.predict.predictor import Predictor
from autotune.predict.roofline import host_limit_bytes
from autotune.problem.candidate import ACCUMULATION, CHECKPOINTING, MICRO_BATCH, TRACED_KNOBS, Candidate, Value
from autotune.problem.hardware import Hardware
from autotune.problem.job import Job
from autotune.problem.space import SearchSpace

PLENTY = 2**50  # bytes of main memory that hold whatever is offloaded
_DECIDING = ("zero_stage", CHECKPOINTING, "offload_optimizer", "offload_param", *TRACED_KNOBS)
Family = tuple[tuple[str, Value], ...]


class Elsewhere:
    """Predicts one job on machines other than the one it was first predicted for.

    Of the space's families it keeps, for each stage, checkpointing and offload, the one that was fastest on the first
    machine and the one that took the least memory there: what is left out moves a prediction by a few per cent.
    """

    def __init__(self, space: SearchSpace, predictor: Predictor, candidates: Sequence[Candidate], table: Table) -> None:
        self.space, self.first = space, predictor
        self.families = _families(candidates, table)
        self._known: dict[int | None, list[Candidate]] = {}  # by a rank's share of the global batch

    def candidates(self, job: Job) -> list[Candidate]:
        """What is tried of the space for this job; none where its global batch cannot be split.

        Without a global batch those of the most micro-batches a step, which are fastest, and of the fewest, which take the
        least memory, only those of the fewest sequences: they decide what fits at all.
        """
        share = None if job.global_batch_size is None else job.global_batch_size // job.ranks
        if share not in self._known:
            self._known[share] = self._candidates(job)
        return self._known[share]

    def _candidates(self, job: Job) -> list[Candidate]:
        try:
            pairs = self.space.rungs(job)
        except UserError:
            return []
        if job.global_batch_size is None:
            most = max(steps for _, steps in pairs)
            pairs = [pair for pair in pairs if pair[1] == most or pair == pairs[0]]
        return [
            Candidate(tuple(sorted([*family, (MICRO_BATCH, micro_batch), (ACCUMULATION, accumulation)])))
            for family in self.families
            for micro_batch, accumulation in pairs
        ]

    def on(self, hardware: Hardware, job: Job | None = None) -> Tried | None:
        """Everything that is tried, on this hardware, of the job (default: the first one) with as many ranks.

        None where the global batch cannot be split over so many. Precision changes no sizes between bf16 and fp16, so the
        first machine's trace serves cards without bf16 too.
        """
        try:
            job = dataclasses.replace(job or self.first.job, ranks=hardware.count)
        except UserError:
            return None
        candidates = self.candidates(job)
        if not candidates:
            return None
        predictor = Predictor(
            job, dataclasses.replace(hardware, host_memory_bytes=PLENTY), self.first.trace, self.first.tracer
        )
        return Tried(hardware, predictor, candidates, predictor.table(candidates))


class Tried:
    """Predictions of one job on one machine, main memory left out of what fits until it is asked for."""

    def __init__(self, hardware: Hardware, predictor: Predictor, candidates: list[Candidate], table: Table) -> None:
        self.hardware, self.job, self.table = hardware, predictor.job, table
        self._predictor, self._candidates = predictor, candidates
        self._sure = predictor.margins(table) >= SURE_SIGMAS
        self._told: dict[int, Prediction] = {}

    def fastest(self, *, offload: bool = True, any_host: bool = False) -> int | None:
        """The place of the fastest that fits with the probability SURE, or None.

        Args:
            offload: whether it may offload to the host.
            any_host: take it that main memory holds whatever is offloaded.
        """
        fits = self._sure
        if not offload:
            fits = fits & (self.table.host == 0)
        elif not any_host:
            fits = fits & (self.table.host * self.hardware.per_node <= host_limit_bytes(self.hardware))
        return int(np.where(fits, self.table.samples, -np.inf).argmax()) if fits.any() else None

    def prediction(self, place: int) -> Prediction:
        """With its breakdowns."""
        if place not in self._told:
            self._told[place] = self._predictor.predict(self._candidates[place])
        return self._told[place]


def host_bytes_per_node(host_bytes_per_rank: float, hardware: Hardware) -> float:
    """Main memory that a node needs: what its ranks offload, pinning included, and what their processes hold besides."""
    own = PLENTY - host_limit_bytes(dataclasses.replace(hardware, host_memory_bytes=PLENTY))
    return host_bytes_per_rank * hardware.per_node + own


def _families(candidates: Sequence[Candidate], table: Table) -> list[Family]:
    """Of the candidates' families, per stage, checkpointing, offload and way of making the model: fastest and smallest."""
    speed: dict[Family, float] = {}
    size: dict[Family, float] = {}
    for candidate, samples, peak in zip(candidates, table.samples.tolist(), table.peak.tolist(), strict=True):
        family = candidate.family
        speed[family] = max(speed.get(family, 0.0), samples)
        size[family] = min(size.get(family, peak), peak)
    groups: dict[tuple[object, ...], list[Family]] = {}
    for family in speed:
        knobs = dict(family)
        groups.setdefault(tuple(knobs.get(name) for name in _DECIDING), []).append(family)
    both = ((max(group, key=speed.__getitem__), min(group, key=size.__getitem__)) for group in groups.values())
    return list(dict.fromkeys(family for pair in both for family in pair))
