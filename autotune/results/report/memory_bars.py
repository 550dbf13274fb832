"""Whose memory a page shows, and what holds it: as predicted, and as a trial could tell it apart."""

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
    """Whose memory is shown: the winner's, that of the next best that fits, and the script's as it is."""
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
    """What a prediction says that memory holds at its highest."""
    notes = [f"highest in {one.moment}", given_back(one.peak_bytes, one.needed_bytes, hardware.ceiling_bytes)]
    return Bar("predicted", tuple((n, s) for n, s in one.memory.items() if s > 0), "; ".join(filter(None, notes)))


def given_back(peak_bytes: float, needed_bytes: float, ceiling_bytes: int) -> str:
    """Why a config fits though its peak is above the ceiling; nothing where that is not so."""
    if not needed_bytes <= ceiling_bytes < peak_bytes:
        return ""
    return f"{format_bytes(needed_bytes)} are needed: cached blocks are given back before memory runs out"


def _measured_bar(measured: Measurement, hardware: Hardware) -> Bar:
    """What a trial can tell apart: on GPUs by torch's allocator, of CPU ranks where tensors were counted."""
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
