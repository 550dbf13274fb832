"""What a study's page says, without a browser: what follows from its trials, and what must not stand in it."""

import dataclasses
import json
import re
import webbrowser
from pathlib import Path

import pytest

from autotune.commands import run as run_command
from autotune.predict.predictor import Prediction, Predictor
from autotune.predict.trace_cache import closed_form_trace
from autotune.problem.candidate import MICRO_BATCH, Candidate
from autotune.problem.hardware import named_hardware
from autotune.problem.job import Script
from autotune.problem.outcome import Outcome, OutcomeKind, Phase
from autotune.results.plan import Plan, WayPlan
from autotune.results.report.build import SearchedSpace, memory_map, study_report, without_secrets
from autotune.results.report.html import _short, as_data, plan_page
from autotune.results.report.knob_effects import TRADED, changed_knob
from autotune.results.report.model import Cell, Status, Step, StudyReport, Trial
from autotune.search.study import StudyStore
from autotune.util.units import GIB, format_bytes
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
    with_card,
)


def report_of(store: StudyStore) -> StudyReport:
    predictor = Predictor(store.job, store.hardware, closed_form_trace(store.job, "a test"))
    searched = SearchedSpace(space(), tuple(space().candidates(store.job)))
    return study_report(store, searched, predictor, "")


def stored_data(html: str) -> dict[str, object]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    assert found
    return dict(json.loads(found[1]))


def test_the_verdict_compares_with_the_script_as_it_is(tmp_path: Path) -> None:
    report = report_of(everything())
    assert report.verdict.winner is not None
    assert report.verdict.winner.label == str(make_candidate(0, 8))
    own = report.verdict.gains[0]
    assert own.over == "the script as it is"
    assert own.times == pytest.approx(1.6)
    assert own.interval[0] < 1.6 < own.interval[1]
    assert any("Resumes from a checkpoint" in line for line in report.verdict.checks)


def test_statuses_tell_above_the_ceiling_from_fitting(tmp_path: Path) -> None:
    by_label = {(trial.label, trial.role): trial.status for trial in report_of(everything()).trials}
    assert by_label[str(make_candidate(0, 16)), "search"] is Status.ABOVE
    assert by_label[str(make_candidate(0, 8)), "search"] is Status.FITS
    assert by_label[str(make_candidate(2, 4, overlap_comm=True)), "search"] is Status.UNDECIDED


def test_the_map_says_what_is_best_known_of_a_square(tmp_path: Path) -> None:
    report = report_of(everything())
    assert report.map is not None
    rows = dict(report.map.rows)
    at = {size: i for i, size in enumerate(report.map.micro_batches)}
    assert rows["stage 0"][at[8]].cell is Cell.FITS
    assert rows["stage 0"][at[16]].cell is Cell.ABOVE
    assert rows["stage 0"][at[32]].cell is Cell.RAN_OUT
    assert rows["stage 0"][at[32]].phases == ("forward",)
    assert rows["stage 3"][at[8]].cell is Cell.FAILED
    assert rows["stage 2"][at[4]].cell is not Cell.NONE, "it was tried, and cut short"


def test_without_the_space_nothing_is_said_to_be_outside_it(tmp_path: Path) -> None:
    store = everything()
    report = study_report(store, None, None, "why")
    assert report.map is not None
    assert Cell.NONE not in {square.cell for _, row in report.map.rows for square in row}
    assert report.no_forecast == "why"


@pytest.mark.parametrize(
    ("one", "other", "knob"),
    [
        (make_candidate(0, 1), make_candidate(0, 2), "train_micro_batch_size_per_gpu"),
        (make_candidate(0, 2, 4), make_candidate(0, 4, 2), TRADED),
        (make_candidate(0, 2, 4), make_candidate(0, 4, 4), "train_micro_batch_size_per_gpu"),
        (make_candidate(0, 2, 4), make_candidate(0, 4, 8), None),
        (make_candidate(0, 1), make_candidate(1, 1), "zero_stage"),  # a stage brings its buckets with it
        (make_candidate(1, 1), make_candidate(1, 2, reduce_bucket_size=7), None),
        (make_candidate(1, 1), make_candidate(1, 1), None),
        (Candidate.of({"zero_stage": 1}), Candidate.of({"zero_stage": 2, "overlap_comm": True}), None),
    ],
)
def test_a_pair_differs_in_one_knob_and_in_nothing_else(one: Candidate, other: Candidate, knob: str | None) -> None:
    assert changed_knob(one, other) == knob
    assert changed_knob(other, one) == knob


def test_pairs_and_neighbours(tmp_path: Path) -> None:
    mattered = report_of(everything()).mattered
    overlap = next(pair for pair in mattered.pairs if pair.knob == "overlap_comm")
    assert (overlap.change, overlap.pairs) == ("off → on", 1)
    assert overlap.speed == pytest.approx(140 / 120 - 1)
    around = {(step.knob, step.change): step for step in mattered.steps}
    above = around["train_micro_batch_size_per_gpu", "8 → 16"]
    assert above.status is Status.ABOVE
    assert above.speed == pytest.approx(170 / 160 - 1), "both as searched, not as verified"


def test_neighbours_that_were_not_tried_are_predicted() -> None:
    store = in_memory()
    candidates = space().candidates(store.job)
    store.set_winner(tell(store, candidates[len(candidates) // 2], measured(10, 3)), "measured, not verified")
    mattered = report_of(store).mattered
    assert mattered.steps
    assert {step.status for step in mattered.steps} == {None}
    assert mattered.basin.startswith("No neighbour of the winner was tried")


def plain(micro_batch: int) -> Candidate:
    """Of stage 0 without anything else, as the space has it."""
    return make_candidate(0, micro_batch, 1, activation_checkpointing=False)


def of_winner_at_64(card_gib: float) -> StudyStore:
    """Its winner has micro-batch 64, and stage 0 needs 1.2 GiB there and 1.4 GiB at 128."""
    store = in_memory(hardware=with_card(card_gib))
    store.set_winner(tell(store, plain(64), measured(10, 1.247)), "measured, not verified")
    return store


def larger_step(report: StudyReport) -> Step:
    return next(step for step in report.mattered.steps if (step.knob, step.change) == (MICRO_BATCH, "64 → 128"))


@pytest.mark.parametrize(("share", "cell"), [(0.5, Cell.UNKNOWN), (1.0, Cell.RULED_OUT), (None, Cell.RULED_OUT)])
def test_what_ran_out_of_less_memory_rules_no_square_out(share: float | None, cell: Cell) -> None:
    hardware = named_hardware("rtx3090", 2)
    then = int(share * hardware.capacity_bytes) if share else None
    out = Trial(0, "", {}, "search", Status.RAN_OUT, "oom_device", capacity_bytes=then)
    tried, larger = make_candidate(0, 4), make_candidate(0, 8)
    found = memory_map({tried: [out]}, [tried, larger], hardware, None)
    assert found is not None
    assert [square.cell for _, row in found.rows for square in row] == [Cell.RAN_OUT, cell]


@pytest.mark.parametrize(("card_gib", "cell"), [(24.0, Cell.PREDICTED), (1.45, Cell.TOO_MUCH)])
def test_a_neighbour_that_does_not_fit_gains_nothing(card_gib: float, cell: Cell, tmp_path: Path) -> None:
    """What the map says of the same place holds for the step, too."""
    store = of_winner_at_64(card_gib)
    report = report_of(store)
    step = larger_step(report)
    assert step.cell is cell
    assert step.fits is (cell is Cell.PREDICTED)
    assert (step.speed is not None) is step.fits
    assert report.map is not None
    if cell is Cell.TOO_MUCH:  # of many configs in a square the best known counts
        assert dict(report.map.rows)["stage 0"][report.map.micro_batches.index(128)].cell is cell
    html = page(store, tmp_path / "p.html").read_text()
    around = html.split("One step around the winner</h3>")[1].split("</table>")[0]
    row = next(row for row in around.split("<tr>") if "64 → 128" in row and "accumulation" not in row)
    assert cell.value in row
    assert (" %" in row) is step.fits


def test_a_neighbour_that_needs_no_less_than_what_ran_out_gains_nothing() -> None:
    store = in_memory()
    tell(store, plain(32), ran_out(Phase.BACKWARD, 1.0))
    store.set_winner(tell(store, plain(64), measured(10, 1.247)), "measured, not verified")
    step = larger_step(report_of(store))
    assert (step.cell, step.speed) == (Cell.RULED_OUT, None)


CUT_SHORT = Outcome(OutcomeKind.INTERRUPTED, reason="x", evidence="y")
CRASHED = Outcome(OutcomeKind.CRASH, Phase.FORWARD, None, "x", "y")
SLOWER = measured(5, 2)


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("smaller", "larger", "said"),
    [
        (
            CUT_SHORT,
            CRASHED,
            r"No neighbour .* \(2 failed or were cut short\): whether it is a sharp peak is not known\.",
        ),
        (CRASHED, None, r"No neighbour .* \(1 failed or was cut short\): whether .* not known\."),
        (None, None, r"No neighbour of the winner was tried: whether .* not known\."),
        (CUT_SHORT, SLOWER, r"A sharp peak: 0 of 1 tried neighbour is within .*"),
        (CRASHED, ran_out(Phase.STEP, 1.0), r"A sharp peak: 0 of 1 tried .*; 1 of them needs too much memory\."),
        (measured(10, 2), CRASHED, r"A broad basin: 1 of 1 tried .*"),
        (measured(10, 2), SLOWER, r"A broad basin: 1 of 2 tried neighbours are .*"),
    ],
)
def test_only_neighbours_that_tell_of_speed_or_memory_count(
    smaller: Outcome | None, larger: Outcome | None, said: str
) -> None:
    store = in_memory()
    store.set_winner(tell(store, plain(4), measured(10, 3)), "measured, not verified")
    for size, outcome in ((2, smaller), (8, larger)):
        if outcome is not None:
            tell(store, plain(size), outcome)
    assert re.fullmatch(said, report_of(store).mattered.basin)


def of_micro_batch_128(card_gib: float) -> tuple[Predictor, Prediction]:
    job, hardware = make_job(), with_card(card_gib)
    predictor = Predictor(job, hardware, closed_form_trace(job, "a test"))
    return predictor, predictor.predict(plain(128))


def test_the_map_tells_what_is_needed_not_what_the_card_has() -> None:
    """The predicted peak of what does not fit is cut at the card; what it needs is not."""
    card_gib = of_micro_batch_128(24.0)[1].needed_bytes / 0.97 / GIB
    predictor, one = of_micro_batch_128(card_gib)
    found = memory_map({}, [plain(128)], predictor.hardware, predictor)
    assert found is not None
    (_, (square,)) = found.rows[0]
    assert square.cell is Cell.TOO_MUCH
    assert square.bytes_low == one.needed_bytes
    assert predictor.hardware.ceiling_bytes < one.needed_bytes < predictor.hardware.capacity_bytes
    assert f"{format_bytes(one.needed_bytes)} needed at least" in square.tooltip


def test_a_plan_says_why_a_peak_above_the_ceiling_fits() -> None:
    """What is above it is the allocator's, which gives it back."""
    free = of_micro_batch_128(24.0)[1]
    between = (free.needed_bytes + free.peak_bytes) / 2 / 0.95 / GIB  # a card whose ceiling lies there
    pages = {}
    for name, card_gib in (("though", between), ("below", 24.0), ("over", 0.9 * between)):
        predictor, one = of_micro_batch_128(card_gib)
        assert one.fits is (name != "over")
        pages[name] = plan_page(
            [Plan(predictor.job, predictor.hardware, [one], (WayPlan(0, False, False, one, one, None),), "a test")]
        )
    said = f"{format_bytes(free.needed_bytes)} are needed: cached blocks are given back before memory runs out"
    for section in ("verdict", "memory"):
        assert said in pages["though"].split(f'id="{section}"')[1].split("</section>")[0]
    assert "given back" not in pages["below"]
    assert "given back" not in pages["over"]


def test_a_study_that_only_ran_out_says_one_shortfall_and_draws_no_speed(tmp_path: Path) -> None:
    store = in_memory()
    store.begin_call(60)
    tell(store, plain(1), ran_out(Phase.INIT, 0.5))
    tell(store, plain(2), ran_out(Phase.BACKWARD, 1.0))
    tell(store, plain(4), ran_out(Phase.BACKWARD, 2.0))
    store.update_call(60.0, "budget used")
    html = page(store, tmp_path / "p.html").read_text()
    sections = {
        name: html.split(f'id="{name}"')[1].split("</section>")[0] for name in ("verdict", "memory", "speed", "time")
    }
    said = "ran out in backward, short of at least 2.20 GiB (1.00 GiB beyond what there is, 1.20 GiB of headroom)"
    assert f"closest: {plain(2)}: {said}" in sections["verdict"]
    assert f"Nearest: <code>{plain(2)}</code>" in sections["memory"], "the same config"
    assert said in sections["memory"]
    assert re.findall(r"short of [^(<]*", html) == ["short of at least 2.20 GiB "] * 2
    for name in ("speed", "time"):
        assert 'class="plot"' not in sections[name]
        assert "No trial has measured a speed" in sections[name]
    assert "3 ran out of memory" in sections["speed"]


def test_of_main_memory_no_headroom_is_told() -> None:
    store = in_memory()
    out = dataclasses.replace(ran_out(Phase.INIT, 1.0), kind=OutcomeKind.OOM_HOST, capacity_bytes=2000 * GIB)
    tell(store, plain(2), out)
    store.begin_call(60)
    store.update_call(60.0, "budget used")
    said = "ran out of main memory in init, short of at least 1.00 GiB"
    report = report_of(store)
    assert report.verdict.lines[0] == f"closest: {plain(2)}: {said}"
    assert max(bytes_ for bars in report.memory for bar in bars.bars for _, bytes_ in bar.parts) < 100 * GIB, (
        "of a rank"
    )
    assert [trial.capacity_bytes for trial in report.trials] == [None], "main memory is no device's"


@pytest.mark.slow
def test_what_is_over_the_headroom_says_no_phase() -> None:
    store = in_memory()
    tell(store, plain(2), measured(10, 23.0))
    tell(store, plain(4), ran_out(Phase.STEP, 0.1))
    store.begin_call(60)
    store.update_call(60.0, "budget used")
    report = report_of(store)
    assert report.verdict.lines[0] == f"closest: {plain(2)}: over the headroom, short of 204.8 MiB"
    assert report.memory[0].label == str(plain(2))


def not_tried(html: str) -> list[tuple[int, str]]:
    table = html.split("Not tried, and why</h3>")[1].split("</table>")[0]
    return [
        (int(count), reason) for count, reason in re.findall(r'<tr><td class="n">(\d+)</td><td>(.*?)</td></tr>', table)
    ]


@pytest.mark.few(1)
@pytest.mark.parametrize("reasons", [0, 2, 50])
def test_what_was_tried_and_what_was_not_are_the_whole_space(reasons: int, tmp_path: Path) -> None:
    store = in_memory()
    store.begin_call(60)
    for size in (1, 2, 4):
        tell(store, plain(size), measured(10 * size, size))
    tell(store, make_candidate(0, 3), measured(1, 3))  # in no space: the script's own
    store.note_skips({f"needs no less memory than z{i}": 2 for i in range(reasons)})
    store.update_call(60.0, "budget used")
    rows = not_tried(page(store, tmp_path / "p.html").read_text())
    whole = len(space().candidates(store.job))
    assert (
        rows[-1][1]
        == "the search ended first (budget used), the gain predicted was too small, or it cannot be had on this machine"
    )
    assert rows[-1][0] == whole - 3 - 2 * reasons
    assert len(rows) == min(40, reasons + 1)


def test_before_a_call_has_ended_the_rest_has_not_had_its_turn() -> None:
    store = in_memory()
    store.begin_call(60)
    tell(store, plain(1), measured(10, 1))
    assert report_of(store).skips == (("not had its turn yet", len(space().candidates(store.job)) - 1),)
    assert study_report(store, None, None, "").skips == (), "nothing is known of the space"


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


def test_a_forecast_rests_on_earlier_trials_alone(tmp_path: Path) -> None:
    """Two studies that differ in what a late trial gave have the same forecasts up to it."""
    forecasts = []
    for speed in (50.0, 5000.0):
        store = in_memory()
        for size in (1, 2, 4):
            tell(store, make_candidate(0, size), measured(20.0 * size, 3.0 + size))
        tell(store, make_candidate(0, 8), measured(speed, 11))
        forecasts.append([trial.forecast for trial in report_of(store).trials])
    assert forecasts[0] == forecasts[1]
    assert None not in forecasts[0]


def test_accuracy_counts_what_ran_out_though_it_was_expected_to_fit(tmp_path: Path) -> None:
    store = in_memory()
    tell(store, make_candidate(0, 1), ran_out(Phase.FORWARD, 0.1))
    tell(store, make_candidate(0, 2), measured(10, 3))
    accuracy = report_of(store).accuracy
    assert accuracy is not None
    assert (accuracy.count, accuracy.ran_out) == (1, 1)


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
    script = Script(("train.py",), "/work", profile=profile)
    hardware = dataclasses.replace(machine(), count=4, nodes=2)
    store = StudyStore.in_memory(dataclasses.replace(make_job(4), script=script), hardware, space())
    commands = " ".join(text for _, text in report_of(everything(store)).verdict.run_now)
    assert "--hostfile hostfile " in commands


@pytest.mark.slow
def test_of_200_trials_it_has_less_than_300_kb(tmp_path: Path) -> None:
    assert page(large(200), tmp_path / "p.html").stat().st_size < 300_000


def test_secrets_of_a_command_line_are_in_no_page(tmp_path: Path) -> None:
    store = in_memory()
    store.note_command(
        "autotune run -- train.py --hub_token abc123 --max_new_tokens 5 --storage postgresql://me:pass1@db/x"
    )
    shown = without_secrets(report_of(store)).commands[0]
    assert "abc123" not in shown
    assert "pass1" not in shown
    assert "--max_new_tokens 5" in shown


def test_secrets_in_variables_and_argument_files_are_in_no_page(tmp_path: Path) -> None:
    store = everything(open_study(tmp_path, "s"), "text")
    script = {
        "argv": ["train.py", "hub_token=abc123xyz"],
        "cwd": "/x",
        "environment": [["WANDB_API_KEY", "0123secret"]],
        "files": [{"text": "hub_token: abc123xyz"}],
    }
    report = dataclasses.replace(report_of(store), fingerprint={"job": {"script": script}})
    kept = json.dumps(without_secrets(report).fingerprint)
    assert "WANDB_API_KEY" in kept
    assert not {word for word in ("abc123xyz", "0123secret") if word in kept}


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
    assert "No trial has ended yet." in (there / "runs" / "s" / "s.html").read_text()
    code, out, _ = call(monkeypatch, capsys, "report", "s", "--out", "there.html", "--json")
    assert (code, json.loads(out)) == (0, {"files": ["there.html"]})


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


def test_an_unknown_study_is_said_in_one_line(
    there: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    open_study(there / "runs")
    code, _, err = call(monkeypatch, capsys, "report", "t")
    assert code == 2
    assert "no study 't'" in err
    assert err.count("\n") == 1


def test_a_plan_is_written_as_a_page_and_a_wrong_name_is_said_before_it_is_made(
    there: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from autotune.commands import plan as planning

    made: list[str] = []

    def plans(*_: object) -> list[Plan]:
        made.append("plan")
        job = make_job()
        predictor = Predictor(job, machine(), closed_form_trace(job, "a test"))
        best = predictor.predict_many([make_candidate(0, 8)])
        return [Plan(job, machine(), best, (WayPlan(0, False, False, best[0], best[0], None),), "")]

    monkeypatch.setattr(planning, "plans", plans)
    code, out, _ = call(monkeypatch, capsys, "plan", "--model", "tiny-llama", "--html", "plan.html", "--json")
    assert code == 0
    assert json.loads(out)["model"] == "tiny-llama"
    assert "predicted, nothing was run" in (there / "plan.html").read_text()
    code, _, err = call(monkeypatch, capsys, "plan", "--model", "tiny-llama", "--html", "missing/plan.html")
    assert (code, made) == (2, ["plan"])
    assert "there is no folder missing" in err


def test_a_page_that_fails_costs_a_run_one_line(there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise ZeroDivisionError("of a chart")

    monkeypatch.setattr(run_command, "write_study", fails)
    said: list[str] = []
    setup = dataclasses.make_dataclass("S", ["folder", "name", "space", "candidates"])(there, "s", space(), ())
    assert run_command._write_report(setup, open_study(there / "runs"), None, said.append) == []  # type: ignore[arg-type]
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
    assert report_of(store).trials[0].status is Status.UNDECIDED
    assert page(store, tmp_path / "p.html").exists()


def test_each_card_of_a_comparison_has_its_own_limits() -> None:
    """The figures of one card never stand beside the memory of another."""
    plans = [_plan_on("rtx3090"), _plan_on("a100-80gb"), _plan_on("t4", fits=False)]
    text = plan_page(plans)
    verdict = text.split('id="verdict"')[1].split("</section>")[0]
    small, large, none = verdict.split("<h3>")[1:]
    for part, plan in ((small, plans[0]), (large, plans[1])):
        assert re.findall(r"of ([\d.]+ GiB) a GPU", part) == [format_bytes(plan.hardware.capacity_bytes)]
    assert "Nothing of the space is predicted to fit." in none
    assert "a GPU" not in none
    assert "ceiling of each card" in text
    alone = plan_page(plans[:1])
    assert f"ceiling {format_bytes(plans[0].hardware.ceiling_bytes)}" in alone
    assert "of each card" not in alone


def _plan_on(card: str, fits: bool = True) -> Plan:
    job, hardware = make_job(), named_hardware(card, 2)
    found = Predictor(job, hardware, closed_form_trace(job, "a test")).predict_many([make_candidate(2, 8)])
    return Plan(job, hardware, found if fits else [], (WayPlan(2, False, False, found[0], found[0], None),), "a test")
