"""Comparison of two studies: versions, settings, and outcomes of the candidates that both tried."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

from autotune.errors import UserError
from autotune.problem.candidate import Candidate
from autotune.problem.knobs import is_off
from autotune.problem.outcome import Outcome
from autotune.results.console import outcome_line
from autotune.results.tables import DataTable
from autotune.search.fingerprint import VERSIONS, changes
from autotune.search.leaderboard import SpeedRatio
from autotune.search.study import StudyStore
from autotune.search.trials import RESUME, SEARCH, TRAINING, VERIFY, without_garbage_collection
from autotune.util.units import counted, format_bytes, format_change

_MOST_ROWS = 40  # rows of the printed table; JSON has all
_SAME_BYTES = 0.01  # share; smaller differences of peaks and capacities are taken for noise

_Key = frozenset[tuple[str, Any]]
_Trial = tuple[str, Candidate, Outcome]  # (role, candidate, outcome)


@dataclass(frozen=True)
class TrialPair:
    """Outcomes of one candidate in both studies, of one role if both have one."""

    candidate: Candidate
    first: Outcome
    second: Outcome
    ratio: SpeedRatio | None  # speed in the second study divided by that in the first; None unless measured alike

    @property
    def peaks(self) -> tuple[int, int] | None:
        """Return the measured peaks in bytes; None unless both were measured."""
        one, other = self.first.measurement, self.second.measurement
        return (one.peak_bytes, other.peak_bytes) if one and other else None

    @property
    def _order(self) -> tuple[bool, bool, float]:
        """Return the key for sorting: lost candidates, then gained ones, then the largest changes of peak or speed."""
        moved = abs(self.peaks[1] / self.peaks[0] - 1) if self.peaks else 0.0
        slower = abs(self.ratio.times - 1) if self.ratio and not self.ratio.is_noise else 0.0
        return not (self.first.ok and not self.second.ok), self.first.ok == self.second.ok, -max(moved, slower)

    def to_json(self) -> dict[str, Any]:
        """Return the pair as JSON data."""
        return {
            "candidate": self.candidate.as_dict,
            "outcomes": [self.first.to_json(), self.second.to_json()],
            "peak_change_bytes": self.peaks[1] - self.peaks[0] if self.peaks else None,
            "speed_ratio": vars(self.ratio) if self.ratio else None,
            "speed_is_noise": self.ratio.is_noise if self.ratio else None,
        }


@dataclass(frozen=True)
class StudyDiff:
    """Differences between two studies, the second usually the later one."""

    names: tuple[str, str]
    versions: dict[str, tuple[str | None, str | None]]  # by package; None: not recorded
    settings: tuple[str, ...]  # lines such as `job.seq_len: 768 -> 1024`
    capacity_bytes: tuple[int, int]  # bytes that a rank may use
    pairs: tuple[TrialPair, ...]  # candidates that both tried, changed outcomes first
    tried: tuple[int, int]  # candidates with an attributable outcome
    winners: tuple[Candidate | None, Candidate | None]

    @property
    def changed_versions(self) -> list[str]:
        """Return lines of versions that both know and that differ."""
        changed = {name: both for name, both in self.versions.items() if all(both) and both[0] != both[1]}
        return [f"{name} {before} -> {after}" for name, (before, after) in changed.items()]

    def lines(self) -> list[str]:
        """Return the summary: counts, the usual change of peak and speed, possible causes, and the winners."""
        one, other = self.names
        fits = Counter((pair.first.ok, pair.second.ok) for pair in self.pairs)
        common = f"{counted(len(self.pairs), 'candidate')} in common" if self.pairs else "no candidate in common"
        lines = [f"{common}, of {self.tried[0]} in {one} and {self.tried[1]} in {other}"]
        if not self.pairs and all(self.tried):
            lines.append("nothing can be compared: tune one of them again with the other's --space")
        if self.pairs:
            lines[0] += (
                f": {fits[True, True]} measured in both, {fits[True, False]} in {one} only, {fits[False, True]} in {other} "
                f"only, {fits[False, False]} in neither"
            )
        if peaks := [pair.peaks for pair in self.pairs if pair.peaks]:
            lines.append(f"peak in {other}: {_spread([100 * (after / before - 1) for before, after in peaks])}")
        if ratios := [pair.ratio for pair in self.pairs if pair.ratio]:
            beyond = sum(not ratio.is_noise for ratio in ratios)
            lines.append(
                f"speed in {other}: {_spread([100 * (ratio.times - 1) for ratio in ratios])}; "
                f"{beyond} of {len(ratios)} beyond noise"
            )
        lines += self._causes()
        for name, winner, index in zip(self.names, self.winners, (1, 0), strict=True):
            if winner is None:
                lines.append(f"{name} has no {'winner' if self.tried[1 - index] else 'measured candidate'} yet")
                continue
            pair = next((pair for pair in self.pairs if pair.candidate == winner), None)
            ended = outcome_line((pair.first, pair.second)[index]) if pair else "not tried"
            lines.append(f"winner of {name}: {winner}; in {self.names[index]}: {ended}")
        return lines

    def _causes(self) -> list[str]:
        """Return a line with recorded changes that may explain changed outcomes; empty if no outcome changed."""
        moved = any(pair.peaks and _moved(*pair.peaks) for pair in self.pairs)
        if not moved and all(pair.first.ok == pair.second.ok for pair in self.pairs):
            return []
        before, after = self.capacity_bytes
        room = [f"a rank may use {format_bytes(after)}, before {format_bytes(before)}"] if _moved(before, after) else []
        known = [*self.changed_versions, *room, *self.settings]
        if not known:
            return ["nothing that studies record differs: run both again, or compare the machines"]
        return [f"possible causes: {'; '.join(known[:6])}{'; …' if len(known) > 6 else ''}"]

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as JSON data."""
        return {
            "studies": list(self.names),
            "versions": {name: list(both) for name, both in self.versions.items()},
            "settings": list(self.settings),
            "capacity_bytes": list(self.capacity_bytes),
            "tried": list(self.tried),
            "winners": [one.as_dict if one else None for one in self.winners],
            "candidates": [pair.to_json() for pair in self.pairs],
            "lines": self.lines(),
        }


def _moved(before: int, after: int) -> bool:
    """Return True if two numbers of bytes differ by more than noise."""
    return abs(after / before - 1) > _SAME_BYTES


def _spread(percents: Sequence[float]) -> str:
    """Return the median of percentages with the smallest and the largest, or the only one."""
    median, least, most = (format_change(one(percents) / 100) for one in (statistics.median, min, max))
    return (
        median if len(percents) == 1 else f"median {median} ({least.removesuffix(' %')} to {most.removesuffix(' %')})"
    )


@without_garbage_collection()
def diff_studies(first: StudyStore, second: StudyStore) -> StudyDiff:
    """Compare two studies. Candidates count as the same if they differ only in knobs that change nothing.

    Raises:
        UserError: both are the same study.
    """
    if (first.name, first.folder and first.folder.resolve()) == (
        second.name,
        second.folder and second.folder.resolve(),
    ):
        raise UserError(f"both are study {first.name}. Name two different studies.")
    both = [_trials(store) for store in (first, second)]
    found = {key: _pair(both[0][key], both[1][key]) for key in both[0] if key in both[1]}
    marks = first.fingerprint, second.fingerprint
    known = [mark.get(VERSIONS, {}) for mark in marks]
    spaces = ["the search spaces differ"] * (first.space_text != second.space_text)
    models = [mark["job"]["model"]["name"] for mark in marks]
    of_the_model = ("job.model.config.", "job.script.profile.") if models[0] != models[1] else ()
    left_out = (f"{VERSIONS}.", *of_the_model)
    changed = [line for line in changes(*marks) if not line.startswith(left_out)]
    return StudyDiff(
        names=_names(first, second),
        versions={name: (known[0].get(name), known[1].get(name)) for name in dict.fromkeys([*known[0], *known[1]])},
        settings=(*changed, *spaces),
        capacity_bytes=(first.hardware.capacity_bytes, second.hardware.capacity_bytes),
        pairs=tuple(sorted(found.values(), key=lambda pair: pair._order)),
        tried=(len(both[0]), len(both[1])),
        winners=(_winner(first, found), _winner(second, found)),
    )


def _names(first: StudyStore, second: StudyStore) -> tuple[str, str]:
    """Return the studies' names, or their folders if the names are equal."""
    names = first.name, second.name
    return names if names[0] != names[1] else (str(first.folder), str(second.folder))


def _winner(store: StudyStore, pairs: Mapping[_Key, TrialPair]) -> Candidate | None:
    """Return a study's winner, as its pair spells it if both studies tried it."""
    if (record := store.winner) is None:
        return None
    pair = pairs.get(_key(record.candidate, store))
    return pair.candidate if pair else record.candidate


def _trials(store: StudyStore) -> dict[_Key, list[_Trial]]:
    """Return each candidate's attributable trials in order."""
    found: dict[_Key, list[_Trial]] = {}
    for record in store.records():
        outcome = record.outcome
        if outcome is None or record.role in (RESUME, TRAINING) or not outcome.kind.is_attributable_to_candidate:
            continue
        found.setdefault(_key(record.candidate, store), []).append((record.role, record.candidate, outcome))
    return found


def _key(candidate: Candidate, store: StudyStore) -> _Key:
    """Return the knobs that change something in a study's job."""
    precision = store.fingerprint["job"].get("precision")
    return frozenset(item for item in candidate.knobs if not is_off(*item, precision))


def _pair(first: Sequence[_Trial], second: Sequence[_Trial]) -> TrialPair:
    """Return the latest outcomes; if both were measured, the latest of one role, since verification runs longer."""
    (role, candidate, one), (other_role, _, other) = first[-1], second[-1]
    alike = role == other_role
    if one.measurement and other.measurement and not alike:
        for role in (VERIFY, SEARCH):
            ends = [[end for had, _, end in trials if had == role and end.measurement] for trials in (first, second)]
            if all(ends):
                (one, other), alike = (ends[0][-1], ends[1][-1]), True
                break
    before, after = one.measurement, other.measurement
    return TrialPair(candidate, one, other, SpeedRatio.of(after, before) if alike and before and after else None)


def show_diff(diff: StudyDiff, out: Console) -> None:
    """Print both studies side by side: versions, changed settings, common candidates, and the summary."""
    packages = DataTable("", *diff.names, box=None, pad_edge=False, header_style="bold")
    for name, (one, other) in diff.versions.items():
        packages.add_row(name, one or "unknown", Text(other or "unknown", style="yellow" if one != other else ""))
    packages.add_row("a rank may use", *map(format_bytes, diff.capacity_bytes))
    out.print(packages)
    for line in diff.settings:
        out.print(line, soft_wrap=True)
    table = DataTable(box=None, pad_edge=False, header_style="bold")
    for heading in ("candidate", *diff.names):
        table.add_column(heading, overflow="fold")
    for heading in ("speed", "peak"):
        table.add_column(heading, justify="right")
    for pair in diff.pairs[:_MOST_ROWS]:
        times, noise = (f"{pair.ratio.times:.3f}x", pair.ratio.is_noise) if pair.ratio else ("", True)
        moved = format_change(pair.peaks[1] / pair.peaks[0] - 1) if pair.peaks else ""
        ends = [Text(outcome_line(end), style="" if end.ok else "yellow") for end in (pair.first, pair.second)]
        table.add_row(str(pair.candidate), *ends, Text(times, style="dim" if noise else "bold"), moved)
    if diff.pairs:
        out.print()
        out.print(table)
    if len(diff.pairs) > _MOST_ROWS:
        print(f"… and {len(diff.pairs) - _MOST_ROWS} more (--json has all)")
    print("", *diff.lines(), sep="\n")
