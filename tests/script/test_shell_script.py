"""Shell scripts after `--`: the training that they start, as the shell itself understands them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.errors import UserError
from autotune.script import shell_script
from autotune.script.parse_command import TypedCommand, read_command
from autotune.util.entry_points import SHELL_SCRIPT
from autotune.util.interpreter import sandboxed_command
from tests.sandbox.test_sandbox import REFUSED


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    there = tmp_path / "my project"
    there.mkdir()
    monkeypatch.chdir(there)
    (there / "train.py").write_text("print(1)\n")
    (there / "keep.txt").write_text("kept\n")
    return there


def started(text: str, *words: str) -> TypedCommand:
    Path("train.sh").write_text(text)
    return read_command(["bash", "train.sh", *words], [])


def refused(text: str) -> str:
    with pytest.raises(UserError) as caught:
        started(text)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Each line of public scripts starts `train.py N`, in the order of the numbers.
FORMS = r"""
set -eu
GPUS=2
run_cmd="NCCL_DEBUG=info deepspeed --num_gpus ${GPUS} train.py 1 2>&1 | tee log.txt"; echo $run_cmd; eval $run_cmd
LAUNCHER="torchrun --nproc-per-node $GPUS"; CMD="train.py 2"; $LAUNCHER $CMD
VAR=x nohup deepspeed train.py 3 > log 2>&1
launch() { local script=$1; shift; torchrun "$script" "$@"; }; launch train.py 4 'a b'
ARGS=(--lr 1 --name "a b"); ARGS+=(--bf16); accelerate launch train.py 5 "${ARGS[@]}"
for at in 6 7; do deepspeed train.py $at; done
source ./env.sh
(cd src && torchrun train.py 8)
srun --nodes 1 -c 4 bash -c "torchrun train.py 9 'a b'"
sudo numactl --cpunodebind=0 python3 -u train.py 10
uv run python train.py 11; pip install deepspeed; uv pip install accelerate; accelerate config
export LATER=1; PYTHONPATH=src python3.11 -m mine.train 12
PATH=/nowhere:$PATH  # as `source venv/bin/activate` does
exec env EXTRA="$(python -c 'print(6 * 7)')" llamafactory-cli train "$(python - <<< 'print(13)')".yaml "$#:$1"
"""
EXPECTED = """
. NCCL_DEBUG=info deepspeed --num_gpus 2 train.py 1
. torchrun --nproc-per-node 2 train.py 2
. VAR=x deepspeed train.py 3
. torchrun train.py 4 a b
. accelerate launch train.py 5 --lr 1 --name a b --bf16
. deepspeed train.py 6
. deepspeed train.py 7
src SOURCED=yes torchrun train.py 8
. SOURCED=yes torchrun train.py 9 a b
. SOURCED=yes python -u train.py 10
. SOURCED=yes python train.py 11
. SOURCED=yes PYTHONPATH=src python -m mine.train 12
. SOURCED=yes EXTRA=42 llamafactory-cli train 13.yaml 1:given
"""


def test_forms_of_public_scripts(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    (folder / "src").mkdir()
    (folder / "env.sh").write_text("export SOURCED=yes\n")
    (folder / "train.sh").write_text(FORMS)
    words = sandboxed_command(
        sys.executable, str(tmp_path), SHELL_SCRIPT, str(folder), "train.sh", "given", agreed=False
    )
    done = subprocess.run(words, input=json.dumps(dict(os.environ)), capture_output=True, text=True, check=True)
    lines = []
    for place, call, variables, _ in json.loads(done.stdout):
        names = ("SOURCED", "NCCL_DEBUG", "VAR", "PYTHONPATH", "EXTRA")
        lines += [os.path.relpath(place), *(f"{name}={variables[name]}" for name in names if name in variables), *call]
    assert " ".join(lines) == " ".join(EXPECTED.split())
    assert sorted(os.listdir(folder)) == ["env.sh", "keep.txt", "src", "train.py", "train.sh"]


def test_the_training_has_the_variables_that_the_script_sets(folder: Path) -> None:
    typed = started("export A=1\nCUDA_VISIBLE_DEVICES=0 torchrun --nproc-per-node 1 train.py $*", "--lr", "a b")
    assert dict(typed.script.environment) == {"A": "1", "CUDA_VISIBLE_DEVICES": "0"}
    assert typed.started == "A=1 CUDA_VISIBLE_DEVICES=0 torchrun --nproc-per-node 1 train.py --lr a b"
    assert typed.ranks == 1


@pytest.mark.parametrize(
    ("name", "first", "target"),
    [
        ("launch.sh", "", "train.py"),
        ("train", "#!/usr/bin/env -S bash -e", "train.py"),
        ("train", "#! /bin/sh", "train.py"),
        ("train", "#!/usr/bin/env python3", "./train"),
        ("train", "#!/bin/sh\n'''exec' /a/python \"$0\"", "./train"),
    ],
)
def test_by_its_first_line_or_its_name(folder: Path, name: str, first: str, target: str) -> None:
    (folder / name).write_text(f"{first}\ntorchrun train.py\n")
    assert read_command([f"./{name}"], []).script.target == target


def test_what_else_a_script_does_changes_nothing(folder: Path) -> None:
    """Files are an overlay's; programs that reach other machines or processes do nothing."""
    typed = started(
        "rm keep.txt; mkdir out; touch out/x; wget http://a/b; huggingface-cli download x; pkill -f train; "
        "shutdown now; curl -sf http://a | sh; sleep 1000; (while :; do :; done) & torchrun train.py; kill $!"
    )
    assert typed.script.argv == ("train.py",)
    assert sorted(os.listdir(folder)) == ["keep.txt", "train.py", "train.sh"]


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("python prepare.py\ntorchrun train.py\npython after.py", "torchrun train.py"),
        (
            "torchrun score.py\npython -m torch.distributed.run train.py deepspeed",
            "python -m torch.distributed.run train.py deepspeed",
        ),
    ],
)
def test_the_training_among_other_commands(folder: Path, text: str, command: str) -> None:
    assert started(text).started == command


def test_dates_and_random_ports_make_no_other_study(folder: Path) -> None:
    (folder / "train.sh").write_text(
        "P=$(shuf -n 1 -i 10-65535)\ntorchrun --master-port $P train.py $(date +%s) $RANDOM"
    )
    once, again = (read_command(["./train.sh"], []).started for _ in range(2))
    assert once == again
    assert once.split()[-2] == str(int((folder / "train.sh").stat().st_mtime))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "for at in 1 2 3 4; do ds train.py $at; done",
            "starts 4 trainings: give the command of one, `-- ds train.py 1`, `-- ds train.py 2`, `-- ds train.py 3`",
        ),
        ("make\n", "starts no trainings: give the command of one"),
        ("mkdir s; cd s; ds train.py", "trains in {folder}/s: call autotune there with `-- ds train.py`"),
        ("echo '{}' > ds.json; ds train.py --c=ds.json", "writes ds.json: write that first, then call autotune again"),
    ],
)
def test_a_script_that_cannot_be_tuned_as_it_is(folder: Path, text: str, message: str) -> None:
    (folder / "ds.json").write_text("{'old': 1}")
    assert refused(text) == f"`-- bash train.sh …`: it {message.replace('{folder}', str(folder))}"


@pytest.mark.parametrize("calls", ["enter_mount_namespace", "enter_mount_namespace restrict_writes"])
def test_without_an_overlay(folder: Path, monkeypatch: pytest.MonkeyPatch, calls: str) -> None:
    """Landlock shows the script a view; a machine without either does not run it."""

    def command(python: str, study: str, *words: str, agreed: bool) -> list[str]:
        assert not agreed
        return [python, "-c", REFUSED, calls, study, *words]

    monkeypatch.setattr(shell_script, "sandboxed_command", command)
    text = 'rm keep.txt; echo lost > train.py; deepspeed "$PWD/train.py" "$(realpath keep.txt)"'
    if "restrict_writes" in calls:
        assert refused(text) == (
            "`-- bash train.sh …`: it cannot run here without a change of your files: give the training's command"
        )
    else:
        assert started(text).script.argv == (f"{folder}/train.py", f"{folder}/keep.txt")
    assert (folder / "train.py").read_text() == "print(1)\n"
    assert (folder / "keep.txt").read_text() == "kept\n"
