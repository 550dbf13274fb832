"""A start from elsewhere is one proposal among others: first where it is believed, never where it is not."""

import pytest

from autotune.executors.replay import ReplayTable
from autotune.problem.candidate import Candidate
from autotune.problem.outcome import OutcomeKind
from autotune.search.proposer import Proposal, Proposer, Start
from tests.search.test_proposer import make_proposer, result


def ranked(replay_table: ReplayTable) -> list[Candidate]:
    return sorted(
        (c for c, row in replay_table.rows.items() if row.kind is OutcomeKind.OK), key=replay_table.seconds_per_sample
    )


def tried(replay_table: ReplayTable, proposer: Proposer, count: int) -> list[Proposal]:
    """The first engines that it asks for."""
    found = []
    for _ in range(count):
        proposal = proposer.next()
        assert proposal is not None
        found.append(proposal)
        proposer.observe(proposal.candidate, result(replay_table, proposal.candidate))
    return found


def test_one_that_is_believed_is_tried_first_and_once(replay_table: ReplayTable) -> None:
    proposer, best = make_proposer(replay_table), ranked(replay_table)[0]
    assert proposer.begin_with(Start(best, "from elsewhere"))
    first, *later = tried(replay_table, proposer, 4)
    assert (first.candidate, first.note) == (best, "from elsewhere")
    assert all(one.candidate != best for one in later)


@pytest.mark.parametrize("which", ["slowest", "runs out", "unknown"])
def test_one_that_is_not_believed_changes_nothing(which: str, replay_table: ReplayTable) -> None:
    plain = [one.candidate for one in tried(replay_table, make_proposer(replay_table), 5)]
    out = max(
        (c for c, row in replay_table.rows.items() if row.kind is OutcomeKind.OOM_DEVICE),
        key=lambda c: replay_table.rows[c].peak_gib,
    )
    start = {"slowest": ranked(replay_table)[-1], "runs out": out, "unknown": out.but(zero_stage=3, sub_group_size=7)}[
        which
    ]
    proposer = make_proposer(replay_table)
    assert not proposer.begin_with(Start(start, "from elsewhere"))
    assert [one.candidate for one in tried(replay_table, proposer, 5)] == plain


def test_one_that_measurements_have_closed_is_not_tried(replay_table: ReplayTable) -> None:
    proposer, best = make_proposer(replay_table), ranked(replay_table)[0]
    proposer.begin_with(Start(best, "from elsewhere"))
    proposer.observe(best, result(replay_table, best))
    assert all(one.note != "from elsewhere" for one in tried(replay_table, proposer, 3))


def test_one_that_does_not_beat_what_was_measured_is_not_tried(replay_table: ReplayTable) -> None:
    """As a script's own config is, before the search begins."""
    best, *others = ranked(replay_table)
    far = next(c for c in others if replay_table.seconds_per_sample(c) > 2 * replay_table.seconds_per_sample(best))
    proposer = make_proposer(replay_table)
    proposer.observe(best, result(replay_table, best))
    assert not proposer.begin_with(Start(far, "from elsewhere"))
    assert all(one.note != "from elsewhere" for one in tried(replay_table, proposer, 3))
