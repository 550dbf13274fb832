"""Note on a study of a node slice: which of its figures are measured and which are predicted."""

from __future__ import annotations

from autotune.problem.hardware import Hardware
from autotune.problem.outcome import Measurement


def slice_line(measured: Measurement, hardware: Hardware) -> str:
    """Describe the measured and the predicted part of a slice's Measurement."""
    share = (measured.predicted_seconds or 0.0) / measured.step_seconds
    return (
        f"a slice: memory and computation measured on {hardware.processes} of {hardware.count} ranks; {100 * share:.0f} % of the "
        "step is their communication, predicted and not measured"
    )
