"""What is counted while a model runs forward and backward once, and how two such runs make a Pass.

Models, modules and parameters are torch's, but nothing here imports torch.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from autotune.predict.passes import BACKWARD, FORWARD, Pass


class Counters:
    """Counters of one forward and backward; pairs hold an entry a phase."""

    def __init__(self) -> None:
        self.phase = FORWARD
        self.gradients = 0.0  # bytes that parameters hold by now
        self.in_use = 0.0  # bytes of parameters that running modules use
        self.base = 0.0  # bytes alive before the run: parameters and buffers
        self.section = 0  # of the model: what runs before an encoder's end, after it, and its own backward
        # phase, bytes beside gradients, gradients, in use, section
        self.events: list[tuple[int, float, float, float, int]] = []
        self.flops = [0.0, 0.0]
        self.attention = [0.0, 0.0]
        self.moved = [0.0, 0.0]
        self.operators = [0, 0]
        self.after_forward = 0.0
        self.last = 0
        self.allocations: list[tuple[int, int]] = []

    def forget_operators(self) -> None:
        """What building the model did is no part of a step."""
        self.operators, self.moved, self.flops = [0, 0], [0.0, 0.0], [0.0, 0.0]

    def saw(self, alive: int) -> None:
        """Hears the bytes alive after every change; only growth can be a peak."""
        grew, self.last = alive > self.last, alive
        if not grew:
            return
        self.events.append((self.phase, alive - self.base - self.gradients, self.gradients, self.in_use, self.section))


def joined(two: Counters, three: Counters) -> Pass:
    """The Pass of a model, from runs with micro-batches of two and three sequences, allocation by allocation."""
    events = [np.array(run.events, dtype=float) for run in (two, three)]
    if events[0].shape != events[1].shape or (events[0][:, [0, 4]] != events[1][:, [0, 4]]).any():
        events = [_phase_peaks(table) for table in events]
    first, second = events
    slope = second[:, 1] - first[:, 1]
    after = three.after_forward - two.after_forward
    moved: Any = tuple((3 * a - 2 * b, b - a) for a, b in zip(two.moved, three.moved, strict=True))
    flops: Any = tuple(b - a for a, b in zip(two.flops, three.flops, strict=True))
    attention: Any = tuple(b - a for a, b in zip(two.attention, three.attention, strict=True))
    return Pass(
        phase=[int(p) for p in first[:, 0]],
        fixed=list(first[:, 1] - 2 * slope),
        per_sequence=list(slope),
        gradients=list(first[:, 2]),
        in_use=list(first[:, 3]),
        section=[int(s) for s in first[:, 4]],
        after_forward=(two.after_forward - 2 * after, after),
        flops=flops,
        attention=attention,
        moved=moved,
        operators=(float(two.operators[0]), float(two.operators[1])),
    )


def _phase_peaks(table: Any) -> Any:
    """The highest entry of each phase, for two runs whose allocations cannot be matched one to one."""
    rows = [table[table[:, 0] == phase] for phase in (FORWARD, BACKWARD)]
    highest = np.array([row[(row[:, 1] + row[:, 2]).argmax()] for row in rows])
    highest[:, 4] = 0.0
    return highest


def follow(model: Any, counters: Counters) -> None:
    """Tells the counters which parameters the running modules use, which gradients parameters hold already, and where an
    encoder ends."""

    def accumulated(parameter: Any) -> None:
        counters.gradients += _bytes(parameter)

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(accumulated)
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        if own:
            _ModuleUse(module, own, counters)


def follow_encoder(encoder: Any, counters: Counters) -> None:
    """Begins a section after the encoder's forward, and another once the gradient of an output is there."""

    awaited = False

    def backward_begins(*_: Any) -> None:
        nonlocal awaited
        counters.section += awaited
        awaited = False

    def forward_ends(module: Any, args: Any, output: Any) -> None:
        nonlocal awaited
        counters.section += 1
        awaited = True
        found = output.values() if isinstance(output, dict) else output
        for one in [one for many in found for one in (many if isinstance(many, tuple) else (many,))]:
            if getattr(one, "requires_grad", False):
                one.register_hook(backward_begins)

    encoder.register_forward_hook(forward_ends)


class _ModuleUse:
    """Counts a module's own parameters as in use during its forward, and from the gradient of its output until as many
    gradients were made as it has parameters."""

    def __init__(self, module: Any, own: list[Any], counters: Counters) -> None:
        self._counters, self._parameters = counters, len(own)
        self._bytes = sum(_bytes(parameter) for parameter in own)
        self._awaited = 0  # gradients that backward has yet to make
        module.register_forward_pre_hook(self._begin_forward)
        module.register_forward_hook(self._end_forward)
        for parameter in own:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._made_gradient)

    def _begin_forward(self, *_: Any) -> None:
        self._counters.in_use += self._bytes

    def _end_forward(self, module: Any, args: Any, output: Any) -> None:
        self._counters.in_use -= self._bytes
        if hasattr(output, "register_hook") and output.requires_grad:
            output.register_hook(self._begin_backward)

    def _begin_backward(self, gradient: Any) -> None:
        if not self._awaited:
            self._counters.in_use += self._bytes
        self._awaited = self._parameters

    def _made_gradient(self, *_: Any) -> None:
        if self._awaited:
            self._awaited -= 1
            if not self._awaited:
                self._counters.in_use -= self._bytes


def _bytes(parameter: Any) -> float:
    return float(parameter.numel() * parameter.element_size())
