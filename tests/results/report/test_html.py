"""What a study's page says, without a browser: what follows from its trials, and what must not stand in it."""

import dataclasses
import json
import re
import webbrowser
from pathlib import Path

import pytest

from autotune.commands import run as run_command
from autotune.problem.candidate import MICRO_BATCH, Candidate
from autotune.problem.job import Script, ScriptProfile
from autotune.problem.outcome import Outcome, OutcomeKind, Phase
from autotune.results.report.build import study_report
from autotune.results.report.html import _short, as_data
from autotune.results.report.model import Status
from autotune.search.study import StudyStore
from autotune.util.units import GIB
from tests.cli_call import call
from tests.conftest import make_candidate, make_job
from tests.results.report.studies import (
    EVIL,
    everything,
    in_memory,
    large,
    machine,
    measured,
    open_study,
    page,
    ran_out,
    space,
    tell,
)


def stored_data(html: str) -> dict[str, object]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    assert found
    return dict(json.loads(found[1]))


def test_the_verdict_compares_with_the_script_as_it_is(tmp_path: Path) -> None:
    report = study_report(everything())
    assert report.verdict.winner is not None
    assert report.verdict.winner.label == str(make_candidate(0, 8))
    assert "the winner is 1.60x yours" in report.verdict.own
    assert "  resumes from a checkpoint: peak 18.00 GiB" in report.verdict.details


def test_statuses_tell_above_the_ceiling_from_fitting(tmp_path: Path) -> None:
    by_label = {(trial.label, trial.role): trial.status for trial in study_report(everything()).trials}
    assert by_label[str(make_candidate(0, 16)), "search"] is Status.ABOVE
    assert by_label[str(make_candidate(0, 8)), "search"] is Status.FITS
    assert by_label[str(make_candidate(2, 4, overlap_comm=True)), "search"] is Status.UNDECIDED


def plain(micro_batch: int) -> Candidate:
    """Of stage 0 without anything else, as the space has it."""
    return make_candidate(0, micro_batch, 1, activation_checkpointing=False)


def test_a_study_that_only_ran_out_says_one_shortfall_and_draws_no_speed(tmp_path: Path) -> None:
    store = in_memory()
    store.begin_call(60)
    tell(store, plain(1), ran_out(Phase.INIT, 0.5))
    tell(store, plain(2), ran_out(Phase.BACKWARD, 1.0))
    tell(store, plain(4), ran_out(Phase.BACKWARD, 2.0))
    store.update_call(60.0, "budget used")
    html = page(store, tmp_path / "p.html").read_text()
    sections = {name: html.split(f'id="{name}"')[1].split("</section>")[0] for name in ("verdict", "speed", "mattered")}
    said = "OOM in backward on rank 1, 1.00 GiB short, plus 1.20 GiB of headroom"
    assert f"closest: {plain(2)}: {said}" in sections["verdict"]
    assert 'class="plot"' not in sections["speed"]
    assert "No trial has measured a speed" in sections["speed"]
    assert "3 ended with an OOM" in sections["speed"]
    assert "No two measured trials" in sections["mattered"]


def test_what_mattered_is_the_importance_of_each_knob(tmp_path: Path) -> None:
    store = in_memory()
    for size in (1, 2, 4, 8):
        for stage in (1, 2):
            tell(store, make_candidate(stage, size, overlap_comm=True), measured(10.0 * size + stage, 3))
    (most, share), *others = study_report(store).mattered
    assert most == MICRO_BATCH
    assert share > 0.5
    assert [name for name, _ in others] == ["zero_stage"], "what does not vary is not named"
    html = page(store, tmp_path / "p.html").read_text()
    assert f"{100 * share:.0f} %" in html.split('id="mattered"')[1].split("</section>")[0]
    alone = in_memory()
    tell(alone, plain(1), measured(10, 1))
    assert study_report(alone).mattered == ()


@pytest.mark.parametrize("reasons", [0, 2, 50])
def test_reasons_for_not_trying_are_listed_most_frequent_first(reasons: int, tmp_path: Path) -> None:
    store = in_memory()
    tell(store, plain(1), measured(10, 1))
    store.note_skips({f"needs no less memory than z{i}": i + 1 for i in range(reasons)})
    html = page(store, tmp_path / "p.html").read_text()
    counts = [int(count) for count in re.findall(r'<tr><td class="n">(\d+)</td><td>needs no less', html)]
    assert counts == sorted(counts, reverse=True)
    assert len(counts) == min(40, reasons)


def test_of_main_memory_no_headroom_is_told() -> None:
    store = in_memory()
    out = dataclasses.replace(ran_out(Phase.INIT, 1.0), kind=OutcomeKind.OOM_HOST, capacity_bytes=2000 * GIB)
    tell(store, plain(2), out)
    store.begin_call(60)
    store.update_call(60.0, "budget used")
    said = "host OOM in setup on rank 1, 1.00 GiB short"
    report = study_report(store)
    assert report.verdict.lines[1] == f"closest: {plain(2)}: {said}"
    assert [trial.capacity_bytes for trial in report.trials] == [None], "main memory is no device's"


@pytest.mark.parametrize(
    ("outcome", "happened"),
    [
        (measured(10, 1), None),
        (ran_out(Phase.BACKWARD, 1.0, "the allocator's text"), "the allocator&#39;s text"),
        (Outcome(OutcomeKind.CRASH, Phase.FORWARD, None, "a crash's text", "x"), "a crash&#39;s text"),
    ],
)
def test_a_trials_row_says_why_it_was_tried_whatever_happened(
    outcome: Outcome, happened: str | None, tmp_path: Path
) -> None:
    store = in_memory()
    tell(store, plain(1), outcome, note="the fastest's neighbour")
    html = page(store, tmp_path / "p.html").read_text()
    said = re.findall(r'<td class="w">(.*?)(?: <span|</tbody|\n)', html)[0]
    assert said.startswith("the fastest&#39;s neighbour")
    if happened is None:
        assert said == "the fastest&#39;s neighbour"
    else:
        assert said == f"the fastest&#39;s neighbour: {happened}"


@pytest.mark.slow
def test_texts_that_look_like_html_are_text(tmp_path: Path) -> None:
    store = everything(in_memory(EVIL), EVIL)
    html = page(store, tmp_path / "p.html").read_text()
    assert "<img" not in html
    assert "<script>document" not in html
    assert html.count("<script") == 3, "the theme, the data and ours"
    assert html.count("</script>") == 3
    assert stored_data(html)["model"] == EVIL


def test_the_page_asks_no_network(tmp_path: Path) -> None:
    html = page(everything(), tmp_path / "p.html").read_text()
    assert "default-src &#39;none&#39;" in html
    asked = re.findall(r'(?:src|href|action|srcset|poster)="?([^"\s>]+)', html)
    assert {one for one in asked if not one.startswith(("#", "data:,"))} == set()
    assert "url(http" not in html
    assert "@import" not in html


def test_the_data_is_exact_and_whole(tmp_path: Path) -> None:
    store = everything()
    data = stored_data(page(store, tmp_path / "p.html").read_text())
    rows = [dict(zip(data["columns"], row, strict=True)) for row in data["trials"]]  # type: ignore[call-overload]
    assert [row["number"] for row in rows] == [record.number for record in store.records()]
    assert rows[3]["missing_bytes"] == 4 * 2**30
    assert rows[3]["knob.overlap_comm"] is None, "stage 0 reads no such knob"


def test_the_commands_of_several_nodes_name_the_hostfile() -> None:
    profile = {"loader_prepared": False, "flags": [], "through_arguments": True}
    script = Script(("train.py",), "/work", profile=ScriptProfile.from_json(profile))
    hardware = dataclasses.replace(machine(), count=4, nodes=2)
    store = StudyStore.in_memory(dataclasses.replace(make_job(4), script=script), hardware, space())
    commands = " ".join(text for _, text in study_report(everything(store)).verdict.run_now)
    assert "--hostfile hostfile " in commands


@pytest.mark.slow
def test_of_200_trials_it_has_less_than_300_kb(tmp_path: Path) -> None:
    assert page(large(200), tmp_path / "p.html").stat().st_size < 300_000


# -- the command -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_it_is_written_where_it_is_asked_for(
    there: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    open_study(there / "runs")
    assert call(monkeypatch, capsys, "report", "s") == (0, "wrote runs/s/s.html\n", "")
    assert "no trial has ended yet" in (there / "runs" / "s" / "s.html").read_text()
    code, out, _ = call(monkeypatch, capsys, "report", "s", "--out", "there.html", "--json")
    assert (code, json.loads(out)) == (0, {"version": 1, "files": ["there.html"]})


def test_it_is_opened(there: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda uri: bool(opened.append(uri)))
    open_study(there / "runs")
    code, _, err = call(monkeypatch, capsys, "report", "s", "--open")
    assert (code, opened) == (0, [(there / "runs" / "s" / "s.html").as_uri()])
    assert "no browser was found" in err


@pytest.mark.parametrize(
    ("out", "said"),
    [
        ("missing/x.html", "there is no folder missing"),
        (".", "is a folder"),
        ("file/x.html", "there is no folder file"),
    ],
)
def test_a_file_that_cannot_be_written_is_said_in_one_line(
    out: str, said: str, there: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    open_study(there / "runs")
    (there / "file").write_text("")
    code, _, err = call(monkeypatch, capsys, "report", "s", "--out", out)
    assert code == 2
    assert said in err
    assert err.count("\n") == 1


def test_a_page_that_fails_costs_a_run_one_line(there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise ZeroDivisionError("of a chart")

    monkeypatch.setattr(run_command, "write_study", fails)
    said: list[str] = []
    setup = dataclasses.make_dataclass("S", ["folder", "name", "space", "candidates"])(there, "s", space(), ())
    assert run_command._write_report(setup, open_study(there / "runs"), said.append) == []  # type: ignore[arg-type]
    assert said == ["the report was not written (of a chart): `autotune report s` tries again"]


def test_bytes_that_are_no_text_can_be_written(tmp_path: Path) -> None:
    html = page(in_memory("a name \udcff of bytes"), tmp_path / "p.html").read_text()
    assert stored_data(html)["model"] == "a name \udcff of bytes"


def test_numbers_that_json_has_not_are_null() -> None:
    data = as_data([_short(float("inf")), _short(float("nan")), _short(1.5)])
    assert json.loads(data) == [None, None, 1.5]


def test_an_outcome_without_words_is_shown(tmp_path: Path) -> None:
    store = in_memory()
    tell(store, make_candidate(0, 1), Outcome(OutcomeKind.INFRASTRUCTURE))
    assert study_report(store).trials[0].status is Status.UNDECIDED
    assert page(store, tmp_path / "p.html").exists()
