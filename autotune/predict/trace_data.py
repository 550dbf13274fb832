"""Allocations and FLOPs of a model's forward and backward: plain data, traced, extrapolated or estimated."""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from autotune.util.bounds import known_fields

FORWARD, BACKWARD = 0, 1
IMPORTED = "autotune: imported"  # a line that the tracer writes; its time limit counts from there
ENTRIES = ("fixed", "per_sequence", "gradients")  # fields of a Pass with the bytes of each allocation
# Weights of an allocation's bytes: fixed, per sequence (micro-batches), gradients.
_WEIGHTS = np.array(
    list(itertools.product((1.0,), (1, 1.5, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128, 256, 1024), (0.0, 0.25, 0.5, 1.0, 2.0)))
)


@dataclass
class Pass:
    """One forward and backward. Arrays hold one entry per allocation (or only the few that can be a peak).

    Bytes alive at an allocation are `fixed + per_sequence x micro_batch`. These exclude parameters, and gradients that a
    parameter already holds. The latter are `gradients`.
    """

    phase: list[int]
    fixed: list[float]
    per_sequence: list[float]
    gradients: list[float]
    after_forward: tuple[float, float]  # bytes that forward leaves for backward: (fixed, per sequence)
    flops: tuple[float, float]  # FLOPs of one sequence in matrix products: (forward, backward with recomputation)
    # FLOPs of fused attention kernels; bidirectional ones count twice, as a causal mask halves the work
    attention: tuple[float, float]
    # bytes of other operators in each phase: (fixed, per sequence)
    moved: tuple[tuple[float, float], tuple[float, float]]
    operators: tuple[float, float]  # number of kernels that each phase starts
    # bytes that only frozen linear layers read: (fixed, per sequence); torch drops them in forward, DeepSpeed's
    # linear of stage 3 keeps them
    frozen_only: tuple[float, float] = (0.0, 0.0)
    # position in the model, for `tracer.extrapolate`: before an encoder's end, after it, in its own backward
    section: list[int] = field(default_factory=list)

    def reduced(self) -> Pass:
        """Keep only the entries that can be the peak for some micro-batch and weight of gradients."""
        keep: list[int] = []
        values = np.array([getattr(self, name) for name in ENTRIES])
        phases, sizes = np.array(self.phase), _WEIGHTS @ values
        # DeepSpeed makes its buckets when the first gradient exists, so moments before and after do not compete.
        for phase, started in ((FORWARD, False), (BACKWARD, False), (BACKWARD, True)):
            at = np.flatnonzero((phases == phase) & ((values[2] > 0) == started))
            if len(at):
                keep += np.unique(at[sizes[:, at].argmax(axis=1)]).tolist()
        kept: dict[str, Any] = {name: [getattr(self, name)[i] for i in keep] for name in ("phase", *ENTRIES)}
        return replace(self, **kept, section=[])


@dataclass
class Trace:
    """Memory and FLOPs of a job's model, independent of DeepSpeed."""

    parameters: list[int]  # elements of each trainable parameter, in the model's order
    frozen: int  # elements of all frozen parameters
    plain: Pass
    checkpointed: Pass | None
    exact: bool = True  # False: a closed-form estimate; `note` gives the reason
    note: str = ""
    counted: bool = True  # False: the parameters' sizes are estimated, too
    largest: int = field(default=0)  # elements of the largest trainable parameter
    # elements of each frozen parameter; empty if only their sum is known
    frozen_sizes: list[int] = field(default_factory=list)
    # elements of each trainable matrix that DeepSpeed gives to Muon; None if only sizes are known
    matrices: list[int] | None = None

    @property
    def every_frozen_size(self) -> list[int]:
        """Return the elements of each frozen parameter, or their sum as one entry if only that is known."""
        return self.frozen_sizes or [self.frozen] * (self.frozen > 0)

    @property
    def every_size(self) -> list[int]:
        """Return the elements of each parameter, trainable or frozen."""
        return [*self.parameters, *self.every_frozen_size]

    def of(self, checkpointing: bool) -> Pass:
        """Return the checkpointed pass if requested and traced, else the plain one."""
        return self.checkpointed if checkpointing and self.checkpointed is not None else self.plain

    def to_json(self) -> dict[str, Any]:
        """Return the trace as JSON data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Trace:
        """Return the trace of JSON data."""

        def restore(value: dict[str, Any]) -> Pass:
            pairs = ("after_forward", "flops", "attention", "operators", "frozen_only")
            tuples: dict[str, Any] = {name: tuple(value[name]) for name in pairs}
            return Pass(**{**known_fields(Pass, value), **tuples, "moved": tuple(map(tuple, value["moved"]))})

        again = data["checkpointed"]
        return cls(**{**data, "plain": restore(data["plain"]), "checkpointed": again and restore(again)})
