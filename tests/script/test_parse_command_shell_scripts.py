"""Shell scripts after `--`: refused in one line, with what they start."""

from pathlib import Path

import pytest

from autotune.errors import UserError
from autotune.script.parse_command import make_script, training_line

GIVE = "give what it starts"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(*words: str) -> str:
    with pytest.raises(UserError) as caught:
        make_script(words, [])
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("words", [["./train.sh"], ["bash", "train.sh"], ["bash", "-x", "train.sh", "4"], ["train.sh"]])
def test_what_a_shell_script_starts_is_quoted(folder: Path, words: list[str]) -> None:
    (folder / "train.sh").write_text(
        "pip install deepspeed\ndeepspeed --num_gpus 2 \\\n    train.py --lr 1 2>&1 | tee log\n"
    )
    assert refused(*words) == f"`-- {words[0]} …`: a shell script: {GIVE}: `-- deepspeed --num_gpus 2 train.py --lr 1`"


@pytest.mark.parametrize("name", ["train", "train.sh", "train.bash"])
@pytest.mark.parametrize("first", ["#!/bin/bash", "#!/usr/bin/env -S bash -e", "#! /bin/sh"])
def test_by_its_first_line_or_its_name(folder: Path, name: str, first: str) -> None:
    (folder / name).write_text(f"{first}\nmake\n")
    assert refused(f"./{name}") == (
        f"`-- ./{name} …`: a command, no script: {GIVE}, like `-- train.py …` or `-- -m trl.scripts.sft …`"
    )


def test_a_launcher_in_front_of_it_changes_nothing(folder: Path) -> None:
    (folder / "train.sh").write_text("python train.py --gpus $GPUS\n")
    said = f"`-- train.sh …`: a shell script: {GIVE}, with its variables filled in: `-- python train.py --gpus $GPUS`"
    assert refused("torchrun", "train.sh") == said


@pytest.mark.parametrize(
    "first",
    ["#!/usr/bin/env python3", "#!/usr/bin/env -S uv run --script", "#!/bin/sh\n'''exec' /a/python \"$0\"", "x = 1"],
)
def test_what_python_runs_is_a_script(folder: Path, first: str) -> None:
    (folder / "train").write_text(f"{first}\n")
    assert make_script(["./train"], []).argv == ("./train",)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "python prepare.py\ntorchrun --nproc-per-node 8 train.py\npython after.py",
            "torchrun --nproc-per-node 8 train.py",
        ),
        ("# torchrun a.py\necho torchrun b.py\npython -m pip install x\npython -m mine.train", "python -m mine.train"),
        ("cd src && A=1 accelerate launch train.py; exit", "A=1 accelerate launch train.py"),
        (
            "python prepare.py\npython train.py --deepspeed ds.json\npython score.py",
            "python train.py --deepspeed ds.json",
        ),
        ("python prepare.py\npython train.py", "python train.py"),
        ("torchrun train.py\ntorchrun score.py", "torchrun train.py"),
        ("(cd src && torchrun train.py ds.json)", "torchrun train.py ds.json"),
        ("(torchrun --nproc-per-node $(nproc) train.py)", "torchrun --nproc-per-node $(nproc) train.py"),
        ("{ torchrun train.py; }", "torchrun train.py"),
        ('cmd="${NCCL} torchrun train.py 2>&1 | tee log"\neval $cmd', "torchrun train.py"),
        ("srun --nodes 1 bash -c \"torchrun train.py --name 'a b'\"", "torchrun train.py --name 'a b'"),
        ("if true; then\n  exec torchrun train.py > log\nfi", "torchrun train.py"),
        ("srun --nodes 1 -c 4 torchrun train.py &", "torchrun train.py"),
        ("torchrun --nnodes 2 train.py", "torchrun --nnodes 2 train.py"),
        ("llamafactory-cli train x.yaml", "llamafactory-cli train x.yaml"),
        ("python -c 'print(1)'\nmake train\n", ""),
        ("", ""),
        (f"torchrun train.py {'x' * 600}", f"torchrun train.py {'x' * 482} …"),
    ],
)
def test_the_line_that_trains(tmp_path: Path, text: str, expected: str) -> None:
    (tmp_path / "train.sh").write_text(text)
    assert training_line(tmp_path / "train.sh") == expected


def test_a_word_of_any_length_is_no_script(folder: Path) -> None:
    for words in (["bash", "-c", "x" * 300], ["x" * 300 + ".sh"], [f"{'x' * 300}/train.py"]):
        assert f"no script {words[0]}" in refused(*words) or GIVE in refused(*words)


def test_what_cannot_be_read_says_nothing(tmp_path: Path) -> None:
    assert training_line(tmp_path / "gone.sh") == ""
    (tmp_path / "large.sh").write_text("torchrun train.py\n" + "#" * (1 << 20))
    assert training_line(tmp_path / "large.sh") == ""
