"""Count the candidates that predictions exclude, by reason."""

from __future__ import annotations

from autotune.predict.knobs import Flags
from autotune.predict.predictor import Table
from autotune.problem.hardware import Hardware
from autotune.search.beliefs import Forecast
from autotune.units import format_bytes


def predicted_skips(free: Flags, forecast: Forecast, table: Table, hardware: Hardware) -> dict[str, int]:
    """Count open candidates that are predicted to exceed device or host memory, by reason."""
    device = f"predicted to need more than the {format_bytes(hardware.capacity_bytes)} of a device beyond the interval"
    counts = {}
    if (beyond := forecast.hopeless & free).any():
        counts[f"{device} (the least {format_bytes(int(table.peak[beyond].min()))})"] = int(beyond.sum())
    if count := int((forecast.host & ~forecast.hopeless & free).sum()):
        counts["predicted to need more than the host's memory beyond the interval"] = count
    return counts
