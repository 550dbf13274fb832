"""Dominance rules out nothing that fits: on every table that is kept, on every engine whose tensors were counted, and of every
published figure."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autotune.problem.candidate import Candidate
from autotune.problem.outcome import OutcomeKind
from autotune.search.pruning import Dominance, DominanceRules
from benchmarks.predict.published import published_cases
from benchmarks.search.replay import load_replay_table

DATA = Path(__file__).parents[2] / "benchmarks" / "data"
TABLES = sorted(DATA.glob("landscapes*/*.csv.gz"))
COUNTED = sorted(DATA.glob("live_tensors*.json"))


def pairs(candidates: Sequence[Candidate], rules: DominanceRules) -> Iterator[tuple[Candidate, Candidate]]:
    """(one, another that is said to need no less)."""
    dominance = Dominance(candidates, rules)
    for place, one in enumerate(candidates):
        for at in np.flatnonzero(dominance.at_least_as_large(place)):
            if candidates[at] != one:
                yield one, candidates[at]


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.name.split(".csv")[0])
def test_what_ran_out_rules_out_nothing_that_ran(path: Path) -> None:
    replay_table = load_replay_table(path)
    rules = DominanceRules() if replay_table.hardware().device == "cuda" else DominanceRules.for_device("cpu")
    candidates = list(replay_table.rows)
    dominance = Dominance(candidates, rules)
    fits = np.array([replay_table.rows[candidate].kind is OutcomeKind.OK for candidate in candidates])
    ruled_out = np.zeros_like(fits)
    for place, candidate in enumerate(candidates):
        if replay_table.rows[candidate].kind is OutcomeKind.OOM_DEVICE:
            larger = dominance.at_least_as_large(place)
            assert not [candidates[at] for at in np.flatnonzero(larger & fits)], candidate
            ruled_out |= larger
    assert ruled_out.sum() >= min(10, int((~fits).sum()))


def counted() -> dict[str, dict[Candidate, float]]:
    """Highest bytes of live tensors of candidates of the same training."""
    found: dict[str, dict[Candidate, float]] = defaultdict(dict)
    for path in COUNTED:
        for row in json.loads(path.read_text())["rows"]:
            if row["live"]:
                of = {key: value for key, value in row.items() if key not in ("candidate", "live", "why")}
                training = f"{path.name} {json.dumps(of, sort_keys=True)}"
                found[training][Candidate.of(row["candidate"])] = max(row["live"].values())
    return found


def test_what_is_said_to_need_no_less_has_no_fewer_bytes_of_tensors() -> None:
    """On CPU ranks host and device are one. No allocator is between: these repeat to the byte."""
    compared = 0
    for training, peaks in counted().items():
        for one, other in pairs(list(peaks), DominanceRules.for_device("cpu")):
            assert peaks[other] >= 0.999 * peaks[one], (training, str(one), str(other))
            compared += 1
    assert compared > 300


def published() -> dict[Any, dict[Candidate, list[float]]]:
    """Figures of memory, and whether something ran, of candidates of the same training on the same machine."""
    found: dict[Any, dict[Candidate, list[float]]] = defaultdict(dict)
    for case in published_cases():
        if case.quantity != "step":
            job = json.dumps(case.job.to_json(), sort_keys=True, default=str)
            training = (case.source, job, case.hardware.name, case.job.ranks, case.quantity)
            found[training].setdefault(case.candidate, []).append(case.value)
    return found


def contradicted(figures: Mapping[Candidate, Sequence[float]], quantity: str, one: Candidate, other: Candidate) -> bool:
    """Whether the other was published to need less than the one that it is said to need no less than."""
    if quantity == "decision":  # 1 ran, 0 ran out
        return max(figures[one]) == 0 and max(figures[other]) == 1
    return max(figures[other]) < 0.999 * min(figures[one])


def test_no_published_figure_contradicts_a_rule() -> None:
    compared = 0
    for training, figures in published().items():
        for one, other in pairs(list(figures), DominanceRules()):
            assert not contradicted(figures, training[-1], one, other), (training[0], str(one), str(other), figures)
            compared += 1
    assert compared > 10
