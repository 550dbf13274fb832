"""What a typed command says of this call."""

import os
from pathlib import Path

import pytest

from autotune.commands.request import Request
from autotune.commands.setup import notes_of_command, ranks_asked_for, typed_command
from autotune.errors import UserError
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


@pytest.mark.parametrize(
    ("words", "gpus", "said"),
    [(["train.py"], 3, "--gpus 3"), (["torchrun", "--nproc-per-node", "4", "train.py"], None, "")],
)
def test_a_script_that_shows_its_ranks_fewer_gpus(folder: Path, words: list[str], gpus: int | None, said: str) -> None:
    typed = read_command(words, [])
    with pytest.raises(UserError) as caught:
        ranks_asked_for(gpus, typed, "auto")
    assert str(caught.value) == (
        f"`{said or ' '.join(words[:-1])}` requests more GPUs than CUDA_VISIBLE_DEVICES=0,1 shows, which train.py sets itself. "
        "Request 2, or remove that line."
    )
    assert ranks_asked_for(gpus, typed, "cpu") == gpus or typed.ranks


@pytest.mark.parametrize("shown", ["0,1", "GPU-a,GPU-b", "3, 2"])
def test_as_many_as_it_shows_may_be_asked_for(folder: Path, shown: str) -> None:
    (folder / "train.py").write_text(f"import os\nos.environ['CUDA_VISIBLE_DEVICES'] = '{shown}'\n")
    typed = read_command(["train.py"], [])
    assert ranks_asked_for(2, typed, "auto") == 2
    assert ranks_asked_for(None, typed, "auto") is None
    with pytest.raises(UserError):
        ranks_asked_for(3, typed, "auto")
