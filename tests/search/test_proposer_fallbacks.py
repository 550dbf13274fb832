"""Where nothing has fitted."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from autotune.predict.trace import traced_predictor
from autotune.problem.candidate import Candidate
from autotune.problem.outcome import Outcome, OutcomeKind
from autotune.problem.space import load_space
from autotune.search.proposer import Proposer
from autotune.search.stopping import StopReason
from autotune.util.units import MIB
from benchmarks.search.replay import ReplayTable, Row
from tests.conftest import capped_ranks, make_job
from tests.search.test_tuner import search

TABLE = Path(__file__).parents[1] / "data" / "qwen2.5-0.5b_2xrtx4090.csv.gz"


def but(replay_table: ReplayTable, row_of: Callable[[Candidate, Row], Row]) -> ReplayTable:
    return replace(replay_table, rows={c: row_of(c, row) for c, row in replay_table.rows.items()})


@pytest.mark.parametrize("kind", [OutcomeKind.OOM_DEVICE, OutcomeKind.OOM_HOST, OutcomeKind.TIMEOUT, OutcomeKind.CRASH])
def test_where_nothing_runs_the_search_ends_soon(replay_table: ReplayTable, kind: OutcomeKind) -> None:
    nothing = but(replay_table, lambda c, row: Row(row.peak_gib + 40, None, row.startup_seconds, kind))
    result, executor, _ = search(nothing, 1800)
    assert result.winner is None
    assert len(executor.log.trials) <= 16
    assert result.used_seconds < 900
    if kind is OutcomeKind.OOM_DEVICE:
        assert result.stop_sentence.startswith("nothing fits")
        assert len({c.stage for _, c, _ in executor.log.trials}) == 4, "each stage had its turn"


@pytest.mark.slow
@pytest.mark.xfail(strict=True)  # 12 trials: the belief expects most of these OOMs
def test_ooms_that_were_not_expected_lead_to_the_thriftiest_of_every_stage() -> None:
    """Seven trials under a tight cap were of stages 0 and 1, at settings of the same size, until the budget ended."""
    job, hardware, space = make_job(seq_len=64), capped_ranks(440), load_space("cpu_demo")
    proposer = Proposer(space.candidates(job), space, traced_predictor(job, hardware))
    tried: list[Candidate] = []
    while (found := proposer.next(60.0)) is not None:
        tried.append(found.candidate)
        proposer.observe(found.candidate, Outcome(OutcomeKind.OOM_DEVICE, missing_bytes=32 * MIB))
    assert {one.stage for one in tried[-4:]} == {0, 1, 2, 3}
    assert len(tried) <= 7
    assert proposer.stopped.reason is StopReason.NOTHING_FITS


@pytest.mark.slow
def test_the_thriftiest_is_found_although_the_predictor_was_refuted(replay_table: ReplayTable) -> None:
    def only_the_thriftiest(c: Candidate, row: Row) -> Row:
        fits = row.kind is OutcomeKind.OK and c.micro_batch == 1 and c.checkpointing and c.offload_optimizer != "none"
        return row if fits else Row(row.peak_gib + 30, None, row.startup_seconds, OutcomeKind.OOM_DEVICE)

    result, _, _ = search(but(replay_table, only_the_thriftiest), 1800)
    assert result.verified


@pytest.mark.slow
def test_hosts_that_run_out_teach_the_search(replay_table: ReplayTable) -> None:
    def offloading_fails(c: Candidate, row: Row) -> Row:
        offloads = c.offload_optimizer != "none"
        too_small = Row(row.peak_gib, None, row.startup_seconds, OutcomeKind.OOM_HOST)
        if offloads:
            return too_small
        fits = row.kind is OutcomeKind.OK and c.micro_batch == 1 and c.checkpointing
        return row if fits else Row(row.peak_gib + 5, None, row.startup_seconds, OutcomeKind.OOM_DEVICE)

    result, executor, _ = search(but(replay_table, offloading_fails), 1800)
    assert result.verified
    assert sum(kind is OutcomeKind.OOM_HOST for _, _, kind in executor.log.trials) <= 8


@pytest.mark.parametrize("kind", [OutcomeKind.OOM_HOST, OutcomeKind.CRASH])
def test_where_no_offloading_runs_what_needs_none_is_found(replay_table: ReplayTable, kind: OutcomeKind) -> None:
    """The thriftiest of every stage offload, and fail by that."""

    def little_fits(c: Candidate, row: Row) -> Row:
        if c.offload_optimizer != "none" or c.offload_param != "none":
            return Row(row.peak_gib, None, row.startup_seconds, kind)
        fits = row.kind is OutcomeKind.OK and (c.stage, c.micro_batch, c.checkpointing) == (3, 1, True)
        return row if fits else Row(row.peak_gib + 5, None, row.startup_seconds, OutcomeKind.OOM_DEVICE)

    result, executor, _ = search(but(replay_table, little_fits), 400)
    assert result.winner is not None, result.stop_sentence
    assert sum(found is kind for _, _, found in executor.log.trials) <= 8
