"""`autotune diff`: two studies side by side."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autotune.errors import UserError
from autotune.problem.candidate import Candidate
from autotune.problem.hardware import detect
from autotune.problem.outcome import Measurement, Outcome, OutcomeKind, Phase
from autotune.problem.space import load_space
from autotune.results.diff import diff_studies, show_diff
from autotune.results.tables import DataConsole
from autotune.search.storage import default_storage
from autotune.search.study import StudyStore
from autotune.search.trials import SEARCH, VERIFY
from autotune.util.units import MIB
from tests.conftest import make_candidate, make_job

OOM = Outcome(OutcomeKind.OOM_DEVICE, Phase.BACKWARD, missing_bytes=40 * MIB)
SHOWN_OOM = "OOM in backward, 40.0 MiB short"


HARDWARE = detect("cpu", 2)


def ok(seconds: float, peak_mib: int) -> Outcome:
    measured = Measurement(seconds, 0.01 * seconds, 5, 8 / seconds, 512 / seconds, peak_mib * MIB)
    return Outcome(OutcomeKind.OK, measurement=measured)


def study(runs: Path, name: str, torch: str, trials: list[tuple[Candidate, Outcome, str]]) -> StudyStore:
    folder, space = runs / name, load_space("cpu_demo")
    folder.mkdir(parents=True)
    job, storage = make_job(), default_storage(folder)
    store, _ = StudyStore.create_or_resume(name, storage, folder, job, HARDWARE, space)
    store._set("fingerprint", {**store.fingerprint, "versions": {**store.versions, "torch": torch}})
    for candidate, outcome, role in trials:
        store.finish(number := store.start(candidate, space, role), outcome)
        if role == VERIFY:
            store.set_winner(number, "verified")
    return store


def test_an_oom_since_an_upgrade_is_first_and_names_the_changed_version(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lost, kept, grown, own = (make_candidate(2, mb) for mb in (1, 2, 4, 8))
    before = study(
        tmp_path,
        "before",
        "2.9.0",
        [
            (kept, ok(1, 300), SEARCH),
            (lost, ok(1, 200), SEARCH),
            (grown, ok(1, 100), SEARCH),
            (own, OOM, SEARCH),
            (lost, ok(1.2, 210), VERIFY),
        ],
    )
    after = study(
        tmp_path,
        "after",
        "2.13.0",
        [(kept, ok(1.002, 300), SEARCH), (grown, ok(2, 150), SEARCH), (lost, OOM, SEARCH), (kept, ok(1, 300), VERIFY)],
    )
    diff = diff_studies(before, after)
    assert [pair.candidate for pair in diff.pairs] == [lost, grown, kept]
    assert diff.tried == (4, 3)
    assert [pair.ratio.is_noise for pair in diff.pairs if pair.ratio] == [False, True]
    assert diff.lines() == [
        "3 candidates in common, of 4 in before and 3 in after: 2 measured in both, 1 in before only, 0 in after only, 0 in neither",
        "peak in after: median +25.0 % (+0.0 to +50.0)",
        "speed in after: median -25.1 % (-50.0 to -0.2); 1 of 2 beyond noise",
        "possible causes: torch 2.9.0 -> 2.13.0",
        f"winner of before: {lost}; in after: {SHOWN_OOM}",
        f"winner of after: {kept}; in before: 8 samples/s (512 tokens/s), peak 300.0 MiB",
    ]
    show_diff(diff, DataConsole(width=160))
    shown = capsys.readouterr().out
    assert shown.index(SHOWN_OOM) < shown.index("+50.0 %") < shown.index("possible causes")
    found = json.loads(json.dumps(diff.to_json()))
    assert found["versions"]["torch"] == ["2.9.0", "2.13.0"]
    assert [one["peak_change_bytes"] for one in found["candidates"]] == [None, 50 * MIB, 0]


def test_measurements_of_search_and_verification_are_not_compared(tmp_path: Path) -> None:
    one = make_candidate(1, 2)
    searched = study(tmp_path, "a", "2.9.0", [(one, ok(1, 300), SEARCH)])
    verified = study(tmp_path, "b", "2.9.0", [(one, ok(3, 300), VERIFY)])
    both = study(tmp_path, "c", "2.9.0", [(one, ok(1.5, 300), SEARCH), (one, ok(3, 300), VERIFY)])
    assert diff_studies(searched, verified).pairs[0].ratio is None
    for other, times in ((searched, 1.5), (verified, 1)):
        ratio = diff_studies(both, other).pairs[0].ratio
        assert ratio is not None
        assert ratio.times == pytest.approx(times)


def test_a_knob_at_its_default_does_not_separate_candidates(tmp_path: Path) -> None:
    plain = make_candidate(3, 2)
    spelled = plain.but(**{"zero_optimization.stage3_max_live_parameters": 10**9})
    assert plain != spelled
    first, second = (
        study(tmp_path, name, "2.9.0", [(one, ok(1, 300), SEARCH)]) for name, one in (("a", plain), ("b", spelled))
    )
    for store in (first, second):
        store.set_winner(0, "measured")
    diff = diff_studies(first, second)
    assert len(diff.pairs) == 1
    assert not any("cause" in line for line in diff.lines()), "nothing changed"
    assert not any("not tried" in line for line in diff.lines()), "the other study's winner is spelled otherwise"
    with pytest.raises(UserError, match="both are study a"):
        diff_studies(first, StudyStore.load(str(tmp_path / "a")))


def test_an_empty_study_and_one_without_a_winner_are_compared(tmp_path: Path) -> None:
    some, none = (
        study(tmp_path, name, "2.9.0", trials)
        for name, trials in (("a", [(make_candidate(1, 2), OOM, SEARCH)]), ("b", []))
    )
    assert diff_studies(some, none).lines() == [
        "no candidate in common, of 1 in a and 0 in b",
        "a has no winner yet",
        "b has no measured candidate yet",
    ]


def test_disjoint_studies_say_how_to_compare_and_one_pair_has_no_median(tmp_path: Path) -> None:
    one, other = make_candidate(1, 2), make_candidate(2, 2)
    first, second, third = (
        study(tmp_path, name, "2.9.0", [(candidate, ok(seconds, 300), SEARCH)])
        for name, candidate, seconds in (("a", one, 1), ("b", other, 1), ("c", one, 2))
    )
    assert "tune one of them again with the other's --space" in diff_studies(first, second).lines()[1]
    assert diff_studies(first, third).lines()[1:3] == ["peak in c: +0.0 %", "speed in c: -50.0 %; 1 of 1 beyond noise"]
