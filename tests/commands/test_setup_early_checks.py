"""What is looked at before a search begins, since it would else be found when it has ended; and what becomes of it then."""

import json
from pathlib import Path

import pytest

from autotune.commands.request import Request, flag_of, request_from
from autotune.commands.setup import plan_setups, run_setup
from autotune.errors import UserError
from autotune.results.output_files import check_out
from tests.cli_call import replay

TABLE = Path(__file__).parent.parent / "data" / "qwen2.5-0.5b_2xrtx4090.csv.gz"
REPLAY = ("--study", "s", "--budget", "4m", "--max-trials", "4")


def test_the_last_seed_there_is() -> None:
    assert (
        run_setup(Request(model="tiny-llama", gpus=1, device="cpu", study="s", seed=2**32 - 1)).request.seed
        == 2**32 - 1
    )


def test_where_a_winner_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for out in ("w.json", "new/folder/w.json", str(tmp_path / "w.json")):
        check_out(Path(out), ".json", makes_folders=True)
    assert list(tmp_path.iterdir()) == [], "nothing is made"
    (tmp_path / "file").touch()
    (tmp_path / "closed").mkdir()
    monkeypatch.setattr("os.access", lambda path, mode: Path(path).name != "closed")
    for out, said in (
        (".", "is a folder"),
        ("file/w.json", "there is no folder"),
        ("file/more/w.json", "there is no folder"),
        ("closed/w.json", "read-only for you"),
        ("closed/more/w.json", "read-only for you"),
        ("runs/s/study.db", "is where a study is kept"),
        ("w.sh", "no .sh: name one like NAME.json"),
    ):
        with pytest.raises(UserError, match=said):
            check_out(Path(out), ".json", makes_folders=True)


@pytest.mark.slow
def test_a_file_that_became_a_folder_costs_no_winner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("autotune.commands.setup.check_out", lambda *_, **__: None)
    (tmp_path / "out").mkdir()
    code, out, err = replay(monkeypatch, capsys, TABLE, *REPLAY, "--out", "out")
    assert code == 0, err
    assert "out cannot be written" in out
    assert "wrote runs/s/s.json" in out
    assert Path("runs/s/s.html").is_file()


def test_the_batch_of_the_own_config_is_kept_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    own = Path("ds.json")
    request = Request(model="tiny-llama", gpus=2, device="cpu", ds_config=own, study="s")
    own.write_text(json.dumps({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 8}))
    setup = run_setup(request)
    assert setup.job.global_batch_size == 64
    assert {c.micro_batch * c.accumulation * 2 for c in setup.candidates} == {64}
    said = "global batch 64 is kept from ds.json (micro-batch 4 x accumulation 8 x 2 ranks); --global-batch-size free"
    assert setup.notes[0].startswith(said)
    for asked, batch in (("free", None), (16, 16)):
        request.global_batch_size = asked
        free = run_setup(request)
        assert free.job.global_batch_size == batch
        assert not any("is kept" in note for note in free.notes)
    request.global_batch_size = None
    own.write_text('{"train_batch_size": 31}')
    with pytest.raises(UserError) as caught:
        run_setup(request)
    assert str(caught.value) == (
        "ds.json: train_batch_size 31 cannot be split evenly over 2 ranks. Change it, or give --global-batch-size (try 30 or 32, "
        "or free)"
    )


@pytest.mark.parametrize("text", ["24", "24b", "0.5", "64 B", "67108863"])
def test_a_bare_number_is_no_memory(text: str) -> None:
    for option in ("memory_cap", "host_memory"):
        with pytest.raises(UserError, match=r"bytes; did you mean|no size|not possible"):
            request_from({option: text}, flag_of)


@pytest.mark.parametrize("text", ["24GiB", "34359738368", "32768MiB"])
def test_a_memory_is_one(text: str) -> None:
    assert plan_setups(Request(model="tiny-llama", gpus=2, host_memory=text), ["rtx3090"])
