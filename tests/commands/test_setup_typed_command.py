"""What a typed command says of this call."""

import os
from pathlib import Path

import pytest

from autotune.commands.request import Request
from autotune.commands.setup import notes_of_command, typed_command
from autotune.script.parse_command import read_command
from autotune.workers.launchers import training_environment, trial_environment


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(
        "import os\nos.environ['HF_ENDPOINT'] = 'https://a'\nos.environ['CUDA_VISIBLE_DEVICES'] = '0,1'\n"
        "os.environ['TOKENIZERS_PARALLELISM'] = 'true'\nos.environ['DS_ACCELERATOR'] = 'xpu'\n"
    )
    monkeypatch.setenv("HF_ENDPOINT", "https://mine")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    return tmp_path


def test_ranks_have_what_the_script_sets_from_their_start(folder: Path) -> None:
    typed = typed_command(Request(script=["train.py"]), None)
    assert (os.environ["HF_ENDPOINT"], os.environ["CUDA_VISIBLE_DEVICES"]) == ("https://a", "0,1")
    for environment in (training_environment("cuda", 3), trial_environment("cuda", 3)):
        assert environment["HF_ENDPOINT"] == "https://a"
        assert environment["CUDA_VISIBLE_DEVICES"] == "0,1"
        assert (environment["DS_ACCELERATOR"], environment["OMP_NUM_THREADS"]) == ("cuda", "3"), (
            "what is ours stays ours"
        )
    assert trial_environment("cuda", 3)["TOKENIZERS_PARALLELISM"] == "false"
    assert training_environment("cpu", 3)["CUDA_VISIBLE_DEVICES"] == ""
    assert [*notes_of_command(typed)] == ["train.py sets CUDA_VISIBLE_DEVICES, HF_ENDPOINT itself: ranks start with it"]


def test_a_script_that_sets_nothing_is_not_spoken_of(folder: Path) -> None:
    (folder / "train.py").write_text("import os\n")
    assert not [*notes_of_command(read_command(["train.py"], []))]
