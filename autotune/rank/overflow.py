"""Detect steps that DeepSpeed skips because fp16 gradients overflow. They run no optimizer and do not count."""

from __future__ import annotations

from typing import Any

# Limit of skipped steps in a row. DeepSpeed starts at a loss scale of 2^16 (2^32 in old configs), and halves it at
# every overflow except the first.
MOST_SKIPPED = 40


class Overflows:
    """Watch an engine from construction on. All its ranks skip the same steps, because an overflow is shared."""

    def __init__(self, engine: Any) -> None:
        self.in_a_row = 0
        self._engine, self._known = engine, _count(engine)  # a loaded checkpoint brings a count

    def skipped(self) -> bool:
        """Return True if the last step was skipped."""
        before, self._known = self._known, _count(self._engine)
        skipped = self._known > before
        self.in_a_row = self.in_a_row + 1 if skipped else 0
        return skipped

    @property
    def endless(self) -> str:
        """Reason why no step will ever count; empty while one still may."""
        if self.in_a_row < MOST_SKIPPED:
            return ""
        return (
            f"DeepSpeed skipped {self.in_a_row} steps in a row, since gradients overflow in fp16, and the optimizer has not run: "
            "the time of such steps says nothing of a training. Train in bf16, or look at the loss and at the config's "
            "fp16 section (a static loss_scale stays as it is; initial_scale_power may be too high)"
        )


def _count(engine: Any) -> int:
    return int(getattr(engine, "skipped_steps", 0))
