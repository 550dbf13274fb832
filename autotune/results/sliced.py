"""What a study of a slice says of itself: which of its figures were measured, and which were not."""

from __future__ import annotations

from autotune.problem.hardware import Hardware
from autotune.problem.outcome import Measurement


def slice_line(measured: Measurement, hardware: Hardware) -> str:
    """What of a Measurement of a slice is measured, and what is predicted."""
    share = (measured.predicted_seconds or 0.0) / measured.step_seconds
    return (
        f"a slice: memory and computation measured on {hardware.processes} of {hardware.count} ranks; {100 * share:.0f} % of the "
        "step is their communication, predicted and not measured"
    )
