"""The memory map: every micro-batch under every stage, checkpointing and offload, with the knowledge about it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from autotune.predict.predictor import Predictor
from autotune.problem.candidate import Candidate
from autotune.problem.hardware import Hardware
from autotune.results.report.data import Cell, MemoryMap, Square, Status, Trial
from autotune.results.report.judged import judged
from autotune.units import format_bytes

MOST_COLUMNS = 16
MOST_IN_A_SQUARE = 12  # candidates checked in an untried square, which may have thousands
MOST_LOOKED_AT = 50_000  # candidates of the space; two million would take a minute
_FROM_TRIALS = {  # most certain knowledge first
    Status.FITS: Cell.FITS,
    Status.ABOVE: Cell.ABOVE,
    Status.RAN_OUT: Cell.RAN_OUT,
    Status.FAILED: Cell.FAILED,
}
_Row = tuple[int, bool, str, str]
_Place = tuple[_Row, int]


def _row(candidate: Candidate) -> _Row:
    return candidate.stage, candidate.checkpointing, candidate.offload_optimizer, candidate.offload_param


def _row_name(row: _Row) -> str:
    stage, checkpointing, optimizer, parameters = row
    parts = [f"stage {stage}"]
    parts += ["checkpointing"] * checkpointing
    parts += [f"optimizer on {optimizer.upper() if optimizer == 'cpu' else 'NVMe'}"] * (optimizer != "none")
    parts += [f"parameters on {parameters.upper() if parameters == 'cpu' else 'NVMe'}"] * (parameters != "none")
    return ", ".join(parts)


def memory_map(
    trials: Mapping[Candidate, Sequence[Trial]],
    candidates: Sequence[Candidate],
    hardware: Hardware,
    predictor: Predictor | None,
) -> MemoryMap | None:
    """Return the map of a study; None if it would be empty.

    Args:
        trials: of each candidate that was tried.
        candidates: the whole space; empty if it can no longer be read.
        predictor: calibrated; without one, untried squares stay unknown.
    """
    tried: dict[_Place, list[tuple[Candidate, Trial]]] = defaultdict(list)
    for candidate, found in trials.items():
        tried[_row(candidate), candidate.micro_batch] += [(candidate, trial) for trial in found]
    untried: dict[_Place, list[Candidate]] = defaultdict(list)
    stride = -(-len(candidates) // MOST_LOOKED_AT) or 1
    for candidate in candidates[::stride]:
        untried[_row(candidate), candidate.micro_batch].append(candidate)
    places = tried.keys() | untried.keys()
    if not places:
        return None
    columns = _columns({size for _, size in tried}, {size for _, size in places})
    asked = {
        place: _some(found)
        for place, found in untried.items()
        if place[1] in columns and _of_trials(tried.get(place, [])) is None
    }
    known = _judged(asked, trials, hardware, predictor)
    known |= {place: square for place, found in tried.items() if (square := _of_trials(found)) is not None}
    cut_short = Square(Cell.UNKNOWN, told="tried, but the trial was cut short or failed by no fault of the config")
    known = {**dict.fromkeys(tried, cut_short), **known}
    rows = sorted(
        {row for row, _ in places}, key=lambda row: (*row[:2], row[2] != "none", row[2], row[3] != "none", row[3])
    )
    nothing = Square(Cell.NONE if candidates else Cell.UNKNOWN, told="not in the space" if candidates else "not tried")
    return MemoryMap(
        tuple(columns),
        tuple((_row_name(row), tuple(known.get((row, size), nothing) for size in columns)) for row in rows),
        "" if len(columns) == len({size for _, size in places}) else "Not every micro-batch of the space is shown.",
    )


def _columns(tried: set[int], every: set[int]) -> list[int]:
    """Return the micro-batches to show: all, or those tried and powers of two."""
    if len(every) <= MOST_COLUMNS:
        return sorted(every)
    powers = [size for size in sorted(every) if size & (size - 1) == 0 and size not in tried]
    return sorted([*sorted(tried), *powers][:MOST_COLUMNS])


def _some(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return a few of the candidates, evenly spaced."""
    step = max(1, -(-len(candidates) // MOST_IN_A_SQUARE))
    return list(candidates[::step])


def _of_trials(found: Sequence[tuple[Candidate, Trial]]) -> Square | None:
    """Build a square from its trials; None if they give no information."""
    best = next((status for status in _FROM_TRIALS if any(trial.status is status for _, trial in found)), None)
    if best is None:
        return None
    telling = [(candidate, trial) for candidate, trial in found if trial.status in _FROM_TRIALS]
    counts = Counter(trial.status for _, trial in telling)
    peaks = [trial.peak_bytes for _, trial in telling if trial.measured and trial.peak_bytes]
    phases = tuple(sorted({trial.phase for _, trial in telling if trial.status is Status.RAN_OUT}))
    ranks = sorted({trial.rank for _, trial in telling if trial.status is Status.RAN_OUT and trial.rank is not None})
    parts = [f"{many} {status.value}" for status, many in counts.items()]
    parts += [f"in {' and '.join(phases)}"] if phases else []
    parts += [f"on rank {', '.join(str(rank) for rank in ranks)}"] if ranks else []
    parts += [f"least peak {format_bytes(min(peaks))}"] if peaks else []
    told = f"{'; '.join(parts)} (trials {', '.join(str(trial.number) for _, trial in telling)})"
    numbers = tuple(trial.number for _, trial in telling)
    return Square(_FROM_TRIALS[best], min(peaks, default=None), phases, told, numbers)


def _judged(
    asked: Mapping[_Place, Sequence[Candidate]],
    trials: Mapping[Candidate, Sequence[Trial]],
    hardware: Hardware,
    predictor: Predictor | None,
) -> dict[_Place, Square]:
    """Build squares without informative trials, from those that ran out of memory and from the predictor."""
    flat = [candidate for found in asked.values() for candidate in found]
    if not flat:
        return {}
    ran_out = [c for c, found in trials.items() if any(trial.lacks_memory_on(hardware) for trial in found)]
    known = judged(flat, ran_out, hardware, predictor)
    squares: dict[_Place, Square] = {}
    at = 0
    for place, found in asked.items():
        mine = range(at, at + len(found))
        at += len(found)
        free = [i for i in mine if known.cells[i] is not Cell.RULED_OUT]
        if not free:
            why = f"needs no less memory than {known.culprits[found[0]]}, which ran out"
            squares[place] = Square(Cell.RULED_OUT, told=f"not tried: {why}")
            continue
        if known.table is None:
            squares[place] = Square(Cell.UNKNOWN, told="not tried")
            continue
        fitting = [i for i in free if known.cells[i] is Cell.PREDICTED]
        sizes = known.table.needed  # the allocator returns further cached blocks before an OOM
        least = min(fitting or free, key=lambda i: float(sizes[i]))
        size = float(sizes[least])
        what = "main memory" if not fitting and known.over_host[least] else f"{format_bytes(size)} needed at least"
        cell = Cell.PREDICTED if fitting else Cell.TOO_MUCH
        squares[place] = Square(cell, size, told=f"{cell.value} ({what})")
    return squares
