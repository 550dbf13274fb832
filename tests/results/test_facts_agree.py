"""Every output of a study says the same: terminal, `show --json`, report and dashboard, over generated studies."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from autotune.problem.candidate import Candidate
from autotune.problem.outcome import Outcome, OutcomeKind, Phase
from autotune.results.console import show_study, study_json
from autotune.results.report.build import study_report
from autotune.results.report.html import study_page
from autotune.search.leaderboard import Leaderboard, StudyFacts
from autotune.search.study import StudyStore
from autotune.search.trials import AS_IS, RESUME, SEARCH, VERIFY, Record
from tests.conftest import make_candidate, make_job
from tests.results.report.studies import in_memory, machine, measured, ran_out, tell

CANDIDATES = [make_candidate(stage, size) for stage in (0, 2) for size in (1, 2, 4)]
FAILURES = (
    ran_out(Phase.FORWARD, 1.0),
    Outcome(OutcomeKind.CRASH, Phase.SAVE, reason="died"),
    Outcome(OutcomeKind.INTERRUPTED, reason="cut short"),
)


@st.composite
def outcomes(draw: st.DrawFn) -> Outcome:
    if draw(st.integers(0, 3)) == 0:
        return draw(st.sampled_from(FAILURES))
    made = measured(draw(st.floats(10, 100)), draw(st.sampled_from((5.0, 10.0, 22.0, 23.5))))
    spread = draw(st.sampled_from((0.0001, 0.02, 0.3))) * made.measurement.step_seconds
    retries = draw(st.sampled_from((0, 0, 0, 3)))
    return dataclasses.replace(
        made, measurement=dataclasses.replace(made.measurement, step_seconds_spread=spread, alloc_retries=retries)
    )


TRIALS = st.lists(
    st.tuples(st.sampled_from(CANDIDATES), outcomes(), st.sampled_from((SEARCH, SEARCH, VERIFY))),
    min_size=1,
    max_size=9,
)


def made_study(
    trials: list[tuple[Candidate, Outcome, str]], has_script: bool, stale: int | None, second: int = 99
) -> StudyStore:
    """A study whose winner is chosen as the tuner does, or is an earlier trial that is out of date.

    A second call begins with the trial of the number `second`.
    """
    store = in_memory()
    store.begin_call(900)
    for at, (candidate, outcome, role) in enumerate(trials):
        note = AS_IS if has_script and at == 0 else "a guess"
        if at == second:
            store.tuner = "another"
        tell(store, candidate, outcome, role, note)
    leaderboard = Leaderboard(store.records(), machine(), began=second if second < len(trials) else 0)
    passed = leaderboard.chosen
    chosen = passed or leaderboard.best
    if stale is not None and trials[stale % len(trials)][1].measurement is not None:
        store.set_winner(stale % len(trials), "verified")
    elif chosen is not None:
        store.set_winner(leaderboard.measured[chosen][0], "verified" if passed else "measured, not verified")
    store.update_call(100.0, "budget used")
    return store


@given(TRIALS, st.booleans(), st.none() | st.none() | st.integers(0, 8), st.integers(1, 12))
def test_all_outputs_of_a_study_agree_and_no_margin_is_negative(
    trials: list[tuple[Candidate, Outcome, str]], has_script: bool, stale: int | None, second: int
) -> None:
    store = made_study(trials, has_script, stale, second)
    told = json.loads(json.dumps(study_json(store)))
    verdict, report = told["verdict"], study_report(store)
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        show_study(store, Console(file=shown, width=400))
    terminal, page = shown.getvalue(), study_page(report)

    winner = report.verdict.winner
    assert (winner.number if winner else None) == (told["winner"]["number"] if told["winner"] else None)
    assert ("winner: " in terminal) == (winner is not None)
    if winner is not None:
        speed = told["winner"]["outcome"]["measurement"]["samples_per_second"]
        assert winner.samples_per_second == speed
        assert f"{speed:.4g} samples/s" in terminal
        assert f"{speed:.4g} samples/s" in page

    for line in told["lines"]:
        assert line in terminal
    assert told["lines"] == [*filter(None, [report.verdict.own]), *report.verdict.lines]

    best = verdict["next_best"]
    margin = best and best["ratio"]["times"] - 1
    printed = re.findall(r"([-+][\d.]+) % against the next best", terminal)
    assert printed == ([] if margin is None else [f"{100 * margin:+.1f}"])
    assert re.findall(r"([-+][\d.]+) % against the next best", page) == printed
    if margin is not None:
        assert margin > 0
        ended = [(outcome, role) for one, outcome, role in trials if one.as_dict == best["candidate"]]
        assert not [
            role
            for outcome, role in ended
            if role == VERIFY and outcome.kind in (OutcomeKind.OOM_DEVICE, OutcomeKind.CRASH)
        ]
    for line in verdict["comparison"]:
        assert line in terminal
        assert any(line in part for part in (*report.verdict.lines, *report.verdict.details))

    remarks = verdict["cannot_win"] | verdict["not_compared"]
    assert {str(trial.number): trial.remark for trial in report.trials if trial.remark} == remarks
    for text in remarks.values():
        assert text in terminal
    if verdict["times_own"] is not None and winner is not None:
        times = verdict["times_own"]["times"]
        assert f"{times:.2f}x" in terminal
        assert f"{times:.2f}x" in page
    assert best not in (*verdict["tied"], *verdict["faster_unverified"]), "each rival is in one group"


@given(TRIALS, st.integers(1, 8), st.floats(0.05, 20), st.data())
def test_the_load_of_the_machine_in_one_call_changes_no_ratio(
    trials: list[tuple[Candidate, Outcome, str]], first: int, load: float, data: st.DataObject
) -> None:
    """All that a call measures may be slower by the same factor, as by the load of other programs."""
    first = min(first, len(trials))
    winner = data.draw(st.integers(0, len(trials) - 1))

    def facts(pace: float) -> StudyFacts:
        records = []
        for at, (candidate, outcome, role) in enumerate(trials):
            late = at >= first
            told = slowed(outcome, pace) if late else outcome
            note = AS_IS if at == 0 else ""
            records.append(Record(at, candidate, told, role, note, "b" if late else "a", "2" if late else "1"))
        return StudyFacts(records, make_job(), machine(), winner=winner)

    calm, loaded = facts(1.0), facts(load)
    for group in ("tied", "slower", "faster"):
        ratios = [{one.candidate: one.ratio.times for one in getattr(side, group)} for side in (calm, loaded)]
        assert ratios[0] == pytest.approx(ratios[1]), group
    own = [side.own_ratio.times if side.own_ratio else None for side in (calm, loaded)]
    assert own[0] == pytest.approx(own[1])
    assert calm.not_compared == loaded.not_compared
    if calm.winner is not None and calm.own is not None and calm.own.candidate != calm.winner.candidate:
        named = calm.own_ratio is not None or calm.own.outcome is None or calm.own.outcome.measurement is None
        assert named or calm.remark(0), "no ratio without a reason"


def slowed(outcome: Outcome, pace: float) -> Outcome:
    if (one := outcome.measurement) is None:
        return outcome
    seconds = one.step_seconds / pace
    spread = one.step_seconds_spread / pace
    measurement = dataclasses.replace(
        one,
        step_seconds=seconds,
        step_seconds_spread=spread,
        samples_per_second=one.samples_per_second * pace,
        tokens_per_second=one.tokens_per_second * pace,
    )
    return dataclasses.replace(outcome, measurement=measurement)


def test_a_winner_that_cannot_resume_is_none_any_more() -> None:
    store = in_memory()
    number = tell(store, CANDIDATES[0], measured(50, 10), VERIFY)
    store.set_winner(number, "verified")
    assert store.facts().winner is not None
    tell(store, CANDIDATES[0], ran_out(Phase.LOAD, 1.0), RESUME)
    assert store.facts().winner is None
    assert store.facts().remarks == {number: "rejected: it does not resume from a checkpoint: ran out"}
