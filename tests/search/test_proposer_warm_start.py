"""A start from elsewhere is one proposal among others: first where it is believed, never where it is not."""

import pytest

from autotune.executors.replay import Landscape, load_landscape
from autotune.problem.candidate import Candidate
from autotune.problem.outcome import OutcomeKind
from autotune.search.proposer import Proposal, Proposer, Start
from tests.search.test_proposer import TABLE, make_proposer, result


@pytest.fixture(scope="module")
def landscape() -> Landscape:
    return load_landscape(TABLE)


def ranked(landscape: Landscape) -> list[Candidate]:
    return sorted(
        (c for c, row in landscape.rows.items() if row.kind is OutcomeKind.OK), key=landscape.seconds_per_sample
    )


def tried(landscape: Landscape, proposer: Proposer, count: int) -> list[Proposal]:
    """The first engines that it asks for."""
    found = []
    for _ in range(count):
        proposal = proposer.next()
        assert proposal is not None
        found.append(proposal)
        proposer.observe(proposal.candidate, result(landscape, proposal.candidate))
    return found


def test_one_that_is_believed_is_tried_first_and_once(landscape: Landscape) -> None:
    proposer, best = make_proposer(landscape), ranked(landscape)[0]
    assert proposer.begin_with(Start(best, "from elsewhere"))
    first, *later = tried(landscape, proposer, 4)
    assert (first.candidate, first.note) == (best, "from elsewhere")
    assert all(one.candidate != best for one in later)


@pytest.mark.parametrize("which", ["slowest", "runs out", "unknown"])
def test_one_that_is_not_believed_changes_nothing(which: str, landscape: Landscape) -> None:
    plain = [one.candidate for one in tried(landscape, make_proposer(landscape), 5)]
    out = max(
        (c for c, row in landscape.rows.items() if row.kind is OutcomeKind.OOM_DEVICE),
        key=lambda c: landscape.rows[c].peak_gib,
    )
    start = {"slowest": ranked(landscape)[-1], "runs out": out, "unknown": out.but(zero_stage=3, sub_group_size=7)}[
        which
    ]
    proposer = make_proposer(landscape)
    assert not proposer.begin_with(Start(start, "from elsewhere"))
    assert [one.candidate for one in tried(landscape, proposer, 5)] == plain


def test_one_that_measurements_have_closed_is_not_tried(landscape: Landscape) -> None:
    proposer, best = make_proposer(landscape), ranked(landscape)[0]
    proposer.begin_with(Start(best, "from elsewhere"))
    proposer.observe(best, result(landscape, best))
    assert all(one.note != "from elsewhere" for one in tried(landscape, proposer, 3))


def test_one_that_does_not_beat_what_was_measured_is_not_tried(landscape: Landscape) -> None:
    """As a script's own config is, before the search begins."""
    best, *others = ranked(landscape)
    far = next(c for c in others if landscape.seconds_per_sample(c) > 2 * landscape.seconds_per_sample(best))
    proposer = make_proposer(landscape)
    proposer.observe(best, result(landscape, best))
    assert not proposer.begin_with(Start(far, "from elsewhere"))
    assert all(one.note != "from elsewhere" for one in tried(landscape, proposer, 3))
