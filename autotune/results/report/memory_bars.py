"""Memory of a page's main configs by content: as predicted, and as a trial can separate it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autotune.predict.prediction import Prediction
from autotune.problem.candidate import Candidate
from autotune.problem.hardware import Hardware
from autotune.problem.outcome import Measurement
from autotune.results.report.data import Bar, Bars
from autotune.results.winner import nearest, short_of
from autotune.search.records import AS_IS, TRAINING, Record
from autotune.search.standings import Standings
from autotune.units import format_bytes


def of_interest(records: Sequence[Record], winner: Record | None, hardware: Hardware) -> dict[str, Candidate]:
    """Return the configs whose memory is shown: the winner, the next best that fits, and the probe run's."""
    standings = Standings(hardware)
    for record in records:
        if record.outcome is not None and record.role != TRAINING:
            standings.learn(record.number, record.candidate, record.outcome, record.role)
    found: dict[str, Candidate] = {}
    if winner is not None:
        found["winner"] = winner.candidate
    rest = [candidate for candidate in standings.feasible() if winner is None or candidate != winner.candidate]
    if rest:
        found["runner-up" if winner else "fastest so far"] = rest[0]
    own = next((record.candidate for record in records if record.note == AS_IS), None)
    if own is not None and own not in found.values():
        found[AS_IS] = own
    if not found and (closest := nearest(records, hardware)):  # nothing fits
        found["nearest"] = closest.candidate
    return found


def memory_bars(
    name: str,
    candidate: Candidate,
    records: Sequence[Record],
    broken_down: Mapping[Candidate, Prediction],
    hardware: Hardware,
) -> Bars:
    bars: list[Bar] = []
    if candidate in broken_down:
        bars.append(predicted_bar(broken_down[candidate], hardware))
    mine = [record.outcome for record in records if record.candidate == candidate and record.outcome]
    measured = [(o.measurement.peak_bytes, o.measurement) for o in mine if o.measurement]
    if measured:
        bars.append(_measured_bar(max(measured, key=lambda pair: pair[0])[1], hardware))
    elif out := [o for o in mine if o.kind.is_oom]:
        needed = float(out[-1].device_capacity_bytes or hardware.capacity_bytes)
        parts = (("all there was", needed), ("more that was asked for", float(out[-1].missing_bytes or 0)))
        bars.append(Bar("measured", parts, short_of(out[-1], hardware)))
    return Bars(name, str(candidate) or AS_IS, tuple(bars))


def predicted_bar(one: Prediction, hardware: Hardware) -> Bar:
    """Return the predicted memory at its peak by content."""
    notes = [f"highest in {one.moment}", given_back(one.peak_bytes, one.needed_bytes, hardware.ceiling_bytes)]
    return Bar("predicted", tuple((n, s) for n, s in one.memory.items() if s > 0), "; ".join(filter(None, notes)))


def given_back(peak_bytes: float, needed_bytes: float, ceiling_bytes: int) -> str:
    """Explain why a config fits although its peak is above the ceiling; empty otherwise."""
    if not needed_bytes <= ceiling_bytes < peak_bytes:
        return ""
    return f"{format_bytes(needed_bytes)} are needed: cached blocks are given back before memory runs out"


def _measured_bar(measured: Measurement, hardware: Hardware) -> Bar:
    """Return a trial's memory by content: on GPUs from torch's allocator, on CPU ranks from counted tensors."""
    peak = float(measured.peak_bytes)
    if hardware.device == "cpu":
        tensors = float(max(measured.live_tensor_bytes.values(), default=0))
        rest = "rest of the process" if tensors else "not told apart"
        parts = [("tensors", min(tensors, peak)), (rest, max(0.0, peak - tensors))]
    elif not measured.torch_allocated_bytes:
        parts = [("not told apart", peak)]
    else:
        allocated, reserved = float(measured.torch_allocated_bytes), float(measured.torch_reserved_bytes or 0)
        kept = max(0.0, min(reserved, peak) - allocated)
        parts = [("allocated by torch", min(allocated, peak)), ("kept by the allocator", kept)]
        parts += [("context and communication", max(0.0, peak - sum(size for _, size in parts)))]
    return Bar("measured", tuple((name, size) for name, size in parts if size > 0))
