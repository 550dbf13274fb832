"""What a model's forward and backward allocate and compute: plain data, whether traced, extrapolated or estimated."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

FORWARD, BACKWARD = 0, 1
IMPORTED = "autotune: imported"  # a line of the tracer's, from which on its time counts


@dataclass
class Pass:
    """One forward and backward; arrays hold one entry an allocation (or the few that can be a peak).

    Bytes alive at an allocation are `fixed + per_sequence x micro_batch`, without parameters and without gradients that
    a parameter already holds: those are `gradients`, the bytes of parameters in use by the running module `in_use`.
    """

    phase: list[int]
    fixed: list[float]
    per_sequence: list[float]
    gradients: list[float]
    in_use: list[float]
    after_forward: tuple[float, float]  # fixed, per sequence: what forward leaves for backward
    flops: tuple[float, float]  # forward, backward with recomputation; of one sequence, matrix products
    attention: tuple[float, float]  # of fused attention kernels; bidirectional ones twice, as a causal mask halves it
    moved: tuple[tuple[float, float], tuple[float, float]]  # bytes of other operators: (fixed, a sequence) each phase
    operators: tuple[float, float]  # how many kernels each phase starts
    # fixed, per sequence: what only frozen linear layers read; torch drops it in forward, DeepSpeed's linear of stage 3 keeps it
    frozen_only: tuple[float, float] = (0.0, 0.0)
    # where in the model, as far as `depth.extrapolate` must know: before an encoder's end, after it, in its own backward
    section: list[int] = field(default_factory=list)

    @property
    def act_bytes_per_sequence(self) -> float:
        """By how much one more sequence raises the peak of the forward."""
        return self._forward_peak(2) - self._forward_peak(1)

    def _forward_peak(self, micro_batch: int) -> float:
        return max(
            f + p * micro_batch
            for f, p, at in zip(self.fixed, self.per_sequence, self.phase, strict=True)
            if at == FORWARD
        )

    def reduced(self) -> Pass:
        """Only the entries that can be the peak for some micro-batch, weight of gradients and of parameters in use."""
        keep: list[int] = []
        values = np.array([self.fixed, self.per_sequence, self.gradients, self.in_use])
        phases = np.array(self.phase)
        # DeepSpeed makes its buckets when the first gradient is there: moments before and after do not compete
        for phase, started in ((FORWARD, False), (BACKWARD, False), (BACKWARD, True)):
            at = np.flatnonzero((phases == phase) & ((values[2] > 0) == started))
            if not len(at):
                continue
            chosen: set[int] = set()
            for batch in (1, 1.5, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128, 256, 1024):
                for grads in (0.0, 0.25, 0.5, 1.0, 2.0):
                    for used in (0.0, 1.0, 2.0):
                        total = values[0, at] + batch * values[1, at] + grads * values[2, at] + used * values[3, at]
                        chosen.add(int(at[total.argmax()]))
            keep += sorted(chosen)
        return Pass(
            [self.phase[i] for i in keep],
            [self.fixed[i] for i in keep],
            [self.per_sequence[i] for i in keep],
            [self.gradients[i] for i in keep],
            [self.in_use[i] for i in keep],
            self.after_forward,
            self.flops,
            self.attention,
            self.moved,
            self.operators,
            self.frozen_only,
        )


@dataclass
class Trace:
    """What a job's model needs, whatever DeepSpeed does with it."""

    parameters: list[int]  # elements of each trainable parameter, in the model's order
    frozen: int  # elements of the others
    plain: Pass
    checkpointed: Pass | None
    exact: bool = True  # False: a closed-form estimate, with a reason
    note: str = ""
    counted: bool = True  # False: so are the parameters' sizes
    largest: int = field(default=0)  # elements of the largest trainable parameter
    frozen_sizes: list[int] = field(
        default_factory=list
    )  # elements of each frozen one; empty where only their sum is known

    @property
    def every_frozen_size(self) -> list[int]:
        """Elements of each frozen parameter; their sum as one where that is all that is known."""
        return self.frozen_sizes or ([self.frozen] if self.frozen else [])

    @property
    def every_size(self) -> list[int]:
        """Elements of each parameter, trainable or frozen."""
        return [*self.parameters, *self.every_frozen_size]

    def of(self, checkpointing: bool) -> Pass:
        return self.checkpointed if checkpointing and self.checkpointed is not None else self.plain

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Trace:
        def restore(value: dict[str, Any] | None) -> Pass | None:
            if value is None:
                return None
            pairs = ("after_forward", "flops", "attention", "operators", "frozen_only")
            return Pass(
                **{
                    **value,
                    **{k: tuple(value[k]) for k in pairs if k in value},
                    "moved": tuple(map(tuple, value["moved"])),
                }
            )

        plain = restore(data["plain"])
        assert plain is not None
        return cls(**{**data, "plain": plain, "checkpointed": restore(data["checkpointed"])})
