"""`autotune share`, `autotune gallery`, and a run that begins with what the gallery knows."""

import dataclasses
import json
from pathlib import Path

import pytest

from autotune.commands import run
from autotune.commands.environment import Nodes
from autotune.commands.request import Request
from autotune.commands.setup import Setup, run_setup
from autotune.gallery.schema import Entry
from autotune.gallery.warm_start import checked, entries_folder
from autotune.search.study import StudyStore
from autotune.util.interpreter import Interpreter
from tests.cli_call import call
from tests.gallery.studies import changed, stored

TABLE = Path(__file__).parents[2] / "benchmarks" / "data" / "landscapes_own" / "tiny-llama_2xcpu"
RUN = ("run", "--executor", f"replay:{TABLE}", "--budget", "5m", "--max-trials", "3", "--yes")


def test_a_study_is_shared_and_what_is_written_passes_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    stored(tmp_path)
    code, out, err = call(monkeypatch, capsys, "share", "s")
    assert (code, err) == (0, "")
    assert "wrote runs/s/share.json: qwen2.5-0.5b, 2 x rtx4090, 1 candidate with" in out
    assert "gallery/entries/qwen2.5-0.5b_2xrtx4090_" in out
    assert checked(Path("runs/s/share.json")).verified
    code, out, _ = call(monkeypatch, capsys, "gallery", "check", "runs/s/share.json")
    assert (code, "a valid entry with 1 candidate" in out) == (0, True)
    code, out, _ = call(monkeypatch, capsys, "share", "s", "--out", "new/folder/e.json", "--json")
    assert json.loads(out)["files"] == ["new/folder/e.json"]
    for words, said in (
        (("share", "s", "--out", "runs"), "--out runs is a folder"),
        (("share", "s", "--out", "runs/s/share.json/e.json"), "there is no folder runs/s/share.json"),
        (("share", "nothing"), "no study 'nothing'"),
        (("gallery", "check", "none.json"), "no gallery entry none.json"),
    ):
        code, _, err = call(monkeypatch, capsys, *words)
        assert (code, said in err, err.count("\n")) == (2, True, 1), err
    Path("bad.json").write_text(changed(lambda entry: entry["machine"].update(count=0)))
    code, _, err = call(monkeypatch, capsys, "gallery", "check", "bad.json")
    assert (code, "bad.json: machine.count: input should be greater than or equal to 1" in err) == (2, True)


def test_the_gallery_is_listed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(monkeypatch, capsys, "gallery", "list")
    assert code == 0
    assert "tiny-llama" in out
    lines = out.splitlines()
    assert lines[0].split()[:4] == ["model", "on", "tokens", "trains"]
    assert len(set(lines)) == len(lines), "what tells two entries of one model apart is shown"
    code, out, _ = call(monkeypatch, capsys, "gallery", "list", "--json")
    assert {row["model"] for row in json.loads(out)} >= {"tiny-llama", "qwen2.5-7b"}


@pytest.fixture
def as_if_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search of a table begins with the gallery, as one of a machine does: such a run costs no test any time."""

    def setup_of(request: Request, nodes: Nodes | None, interpreter: Interpreter) -> Setup:
        return dataclasses.replace(run_setup(request, nodes, interpreter), gallery=not request.no_gallery)

    monkeypatch.setattr(run, "run_setup", setup_of)


def test_a_search_of_a_table_begins_without_the_gallery_which_has_an_entry_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = call(monkeypatch, capsys, *RUN, "--study", "table")
    assert code == 0, err
    assert "gallery" not in out
    assert run.NOTE not in {record.note for record in StudyStore.load("table").records()}
    assert not run_setup(Request(executor=f"replay:{TABLE}")).gallery
    asked = Request(model="tiny-llama", device="cpu", gpus=1)
    assert run_setup(asked).gallery
    assert not run_setup(dataclasses.replace(asked, no_gallery=True)).gallery


@pytest.mark.slow
@pytest.mark.usefixtures("as_if_measured")
def test_a_run_begins_with_the_nearest_entry_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = call(monkeypatch, capsys, *RUN, "--study", "with")
    assert code == 0, err
    assert out.count("gallery: starts with z0 mb16 ga2, the best known for tiny-llama on 2 x CPU rank") == 1
    first = StudyStore.load("with").records()[0]
    assert (str(first.candidate), first.note) == ("z0 mb16 ga2", run.NOTE)
    code, out, _ = call(monkeypatch, capsys, *RUN, "--study", "with")
    assert "gallery" not in out, "a study that goes on has its own measurements"
    code, out, _ = call(monkeypatch, capsys, *RUN, "--study", "without", "--no-gallery")
    assert "gallery" not in out
    assert run.NOTE not in {record.note for record in StudyStore.load("without").records()}
    code, _, err = call(monkeypatch, capsys, "share", "with")
    assert (code, "searches a recorded table" in err) == (2, True)


@pytest.mark.slow
@pytest.mark.usefixtures("as_if_measured")
def test_a_start_that_is_not_believed_has_to_wait_and_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The entry's winner is its slowest config: the search goes as if there were no gallery."""
    monkeypatch.chdir(tmp_path)
    known = checked(entries_folder() / "tiny-llama_2xcpu.json")
    ran = [at for at, one in enumerate(known.candidates) if one.step_seconds]
    slowest = min(ran, key=lambda at: known.candidates[at].samples_per_second or 0.0)
    wrong = known.model_copy(update={"winner": slowest})
    monkeypatch.setattr(run, "shipped_entries", lambda: dict[str, Entry](wrong=wrong))
    code, out, err = call(monkeypatch, capsys, *RUN, "--study", "wrong")
    assert code == 0, err
    assert out.count("it is not predicted to be among the best here") == 1
    call(monkeypatch, capsys, *RUN, "--study", "without", "--no-gallery")
    tried = [[record.candidate for record in StudyStore.load(name).records()] for name in ("wrong", "without")]
    assert tried[0] == tried[1]
