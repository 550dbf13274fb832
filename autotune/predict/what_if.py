"""Predictions of a job on other machines, from one trace and a thinned space."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from autotune.errors import UserError
from autotune.predict.features import selected
from autotune.predict.predictor import SURE_SIGMAS, Prediction, Predictor, Prepared, Table
from autotune.predict.step_time import host_limit_bytes
from autotune.problem.candidate import ACCUMULATION, CHECKPOINTING, MICRO_BATCH, TRACED_KNOBS, Candidate, Value
from autotune.problem.hardware import Hardware
from autotune.problem.job import Job
from autotune.problem.space import SearchSpace
from autotune.util.files import shipped_json

PLENTY = 2**50  # bytes of main memory that hold any offload
_DECIDING = ("zero_stage", CHECKPOINTING, "offload_optimizer", "offload_param", *TRACED_KNOBS)
Family = tuple[tuple[str, Value], ...]


class OtherHardware:
    """Predict one job on machines other than the first.

    `batch_assumed`: a global batch that cannot be split over the ranks is rounded to the nearest that can.

    For each stage, checkpointing and offload it keeps two of the space's families: the fastest on the first machine, and the
    one that took the least memory there. The families left out move a prediction by a few per cent.
    """

    def __init__(
        self,
        space: SearchSpace,
        predictor: Predictor,
        candidates: Sequence[Candidate],
        table: Table,
        *,
        batch_assumed: bool = False,
    ) -> None:
        self.space, self.first, self.batch_assumed = space, predictor, batch_assumed
        self.families = _families(candidates, table)
        self._prepared: dict[tuple[object, ...], tuple[list[Candidate], Prepared]] = {}

    def candidates(self, job: Job) -> list[Candidate]:
        """Return the candidates to try for this job; none if its global batch cannot be split.

        Without a global batch two kinds remain: the most micro-batches a step, which are fastest, and the fewest, which take
        the least memory. The latter have only the fewest sequences, as these decide what fits at all.
        """
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

    def on(self, hardware: Hardware, job: Job | None = None) -> JobPredictions | None:
        """Predict all candidates on this hardware, for the job (default: the first one) with as many ranks.

        None if the global batch cannot be split over so many ranks; a batch that was only assumed is rounded. Sizes are equal
        in bf16 and fp16, so the first machine's trace serves cards without bf16 too.
        """
        job = job or self.first.job
        batch = job.global_batch_size
        if self.batch_assumed and batch is not None:
            at_once = max(1, hardware.count // job.sequence_ranks)
            batch = at_once * max(1, round(batch / at_once))
        try:
            job = dataclasses.replace(job, ranks=hardware.count, global_batch_size=batch)
        except UserError:
            return None
        predictor = Predictor(
            job,
            dataclasses.replace(hardware, host_memory_bytes=PLENTY),
            self.first.trace,
            self.first.tracer,
            widened=self.first.widened,
        )
        key = job.ranks, job.precision, job.sequence_ranks, hardware.device  # in which its jobs differ
        if key not in self._prepared:
            found = self.candidates(job)
            self._prepared[key] = found, predictor.prepare(found)
        candidates, prepared = self._prepared[key]
        if not candidates:
            return None
        return JobPredictions(hardware, predictor, candidates, prepared, predictor.prepared_table(prepared))


class JobPredictions:
    """Predictions of one job on one machine. Main memory limits nothing until `fastest` checks it."""

    def __init__(
        self, hardware: Hardware, predictor: Predictor, candidates: list[Candidate], prepared: Prepared, table: Table
    ) -> None:
        self.hardware, self.job, self.table = hardware, predictor.job, table
        self._predictor, self._candidates, self._prepared = predictor, candidates, prepared
        self._sure = predictor.margins(table) >= SURE_SIGMAS

    def fastest(self, *, offload: bool = True) -> int | None:
        """Return the index of the fastest candidate that fits with the probability SURE, or None.

        Args:
            offload: allow candidates that offload to the host, as far as its main memory holds them.
        """
        host_bytes = host_limit_bytes(self.hardware) * offload
        fits = self._sure & (self.table.host_bytes * self.hardware.per_node <= host_bytes)
        return int(np.where(fits, self.table.samples, -np.inf).argmax()) if fits.any() else None

    def prediction(self, place: int) -> Prediction:
        """Return the prediction of one candidate with its breakdowns."""
        at = np.array([place])
        row = selected(self.table, at)
        candidates = [self._candidates[place]]
        return self._predictor.prepared_predictions(candidates, selected(self._prepared, at), row)[0]


def host_bytes_per_node(host_bytes_per_rank: float, hardware: Hardware) -> float:
    """Return the main memory that a node needs: offload of its ranks, pinning included, and the processes' own memory."""
    own = PLENTY - host_limit_bytes(dataclasses.replace(hardware, host_memory_bytes=PLENTY))
    return host_bytes_per_rank * hardware.per_node + own


def loading_bytes_per_node(job: Job, parameters: int, hardware: Hardware, *, zero_init: bool = False) -> float:
    """Return the main memory that a node needs while its ranks load a checkpoint.

    Without `zero.Init`, `from_pretrained` makes a full copy of the weights in each rank, in the model's precision, before
    anything moves to a GPU; the processes' own memory is included. This is an upper bound: tensors of a safetensors file
    that need no cast stay mapped, and are not copied.

    Args:
        parameters: elements of the model.
        zero_init: rank 0 alone reads the checkpoint, and every rank keeps its part on its GPU (transformers 5.23,
            integrations/deepspeed.py, `_load_state_dict_into_zero3_model`). The figure is that of rank 0's node.

    Returns:
        0 if the base weights are quantized: transformers puts each on the GPU as it is read (`quantizer_bnb_4bit.py` sets the
            device map), and no copy is made.
    """
    if job.lora is not None and job.lora.quantize:
        return 0.0
    return host_bytes_per_node(job.element_bytes * parameters / (hardware.per_node if zero_init else 1), hardware)


def whole_bytes(job: Job, parameters: int, candidate: Candidate) -> float:
    """Return the bytes of each GPU while stage 3 partitions a model that was made without `zero.Init`; 0 at other stages.

    The engine first moves the whole model to the GPU, whatever is offloaded later (deepspeed 0.19.8, runtime/engine.py,
    `_configure_distributed_model`: `self.module.to(self.device)` unless parameters have a `ds_id`).
    """
    return job.element_bytes * parameters if candidate.stage == 3 else 0.0


def is_published(name: str) -> bool:
    """Check that a figure of the card was compared with its prediction."""
    return name in shipped_json("gpus.json")["published"]


def _families(candidates: Sequence[Candidate], table: Table) -> list[Family]:
    """Return the fastest and the smallest family per stage, checkpointing, offload and way of making the model."""
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
