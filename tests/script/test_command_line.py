"""Commands taken apart: each launcher's syntax, as people type it."""

import argparse
from pathlib import Path

import pytest

from autotune.errors import UserError
from autotune.script.command_line import (
    _SWITCHES,
    ACCELERATE,
    DEEPSPEED,
    TORCHRUN,
    launcher_command,
    take_apart,
    with_options,
)

TRAIN = ("train.py", "--lr", "1")


@pytest.mark.parametrize(
    ("typed", "kind", "ranks"),
    [
        ("train.py --lr 1", "", None),
        ("python train.py --lr 1", "", None),
        ("/usr/bin/python3.11 -u -X dev train.py --lr 1", "", None),
        ("torchrun train.py --lr 1", TORCHRUN, None),
        ("torchrun --nproc-per-node 2 train.py --lr 1", TORCHRUN, 2),
        ("torchrun --nproc-per-node gpu --nnodes=1:1 train.py --lr 1", TORCHRUN, None),
        ("/opt/bin/torchrun --rdzv-endpoint=h:1 --tee 3 -r 3 -- train.py --lr 1", TORCHRUN, None),
        ("python -m torch.distributed.run --nproc_per_node 3 train.py --lr 1", TORCHRUN, 3),
        ("deepspeed train.py --lr 1", DEEPSPEED, None),
        ("deepspeed --num_gpus=2 --master_port 29501 train.py --lr 1", DEEPSPEED, 2),
        ("deepspeed --include localhost:0,1 train.py --lr 1", DEEPSPEED, 2),
        ("deepspeed -i localhost:3 --bind_cores_to_rank train.py --lr 1", DEEPSPEED, 1),
        ("deepspeed --include localhost train.py --lr 1", DEEPSPEED, None),
        ("accelerate launch train.py --lr 1", ACCELERATE, None),
        ("accelerate launch --num_processes 2 --use_deepspeed --zero_stage 2 train.py --lr 1", ACCELERATE, 2),
        ("accelerate launch --mixed-precision bf16 --num-processes=2 train.py --lr 1", ACCELERATE, 2),
        ("accelerate-launch --multi_gpu --config_file a.yaml train.py --lr 1", ACCELERATE, None),
        ("python -m accelerate.commands.launch --num_processes 2 train.py --lr 1", ACCELERATE, 2),
        ("python -m accelerate.commands.accelerate_cli launch --num_processes 2 train.py --lr 1", ACCELERATE, 2),
    ],
)
def test_a_launcher_is_understood(typed: str, kind: str, ranks: int | None) -> None:
    line = take_apart(typed.split())
    assert (line.kind, line.ranks, line.target) == (kind, ranks, TRAIN)
    words = typed.split()
    expected = words[words.index("-m") - 1 if "-m" in words else 0 :]
    if kind:
        found = launcher_command(line, line.launcher, line.target)
        assert [word for word in expected if word != "--"][-len(found) + 1 :] == found[1:]


@pytest.mark.parametrize(
    ("typed", "target"),
    [
        ("python -m mine.train x.yaml", ["-m", "mine.train", "x.yaml"]),
        ("-m mine.train x.yaml", ["-m", "mine.train", "x.yaml"]),
        ("torchrun --nproc_per_node 2 -m mine.train x.yaml", ["-m", "mine.train", "x.yaml"]),
        ("torchrun -m --nproc_per_node 2 mine.train x.yaml", ["-m", "mine.train", "x.yaml"]),
        ("deepspeed --num_gpus 2 --module mine.train x.yaml", ["-m", "mine.train", "x.yaml"]),
        ("accelerate launch --num_processes 2 -m axolotl.cli.train x.yml", ["-m", "axolotl.cli.train", "x.yml"]),
        ("torchrun --no-python --nproc-per-node 2 mine x.yaml", ["mine", "x.yaml"]),
        ("deepspeed --no_python mine --num_gpus 3", ["mine", "--num_gpus", "3"]),
        ("axolotl train x.yml -- --num_processes 2", ["axolotl", "train", "x.yml", "--", "--num_processes", "2"]),
    ],
)
def test_what_is_started(typed: str, target: list[str]) -> None:
    assert list(take_apart(typed.split()).target) == target


def test_variables_stand_in_front() -> None:
    line = take_apart(["env", "FORCE_TORCHRUN=1", "A=b c=d", "torchrun", "--nproc-per-node", "2", "X=1.py"])
    assert line.environment == (("FORCE_TORCHRUN", "1"), ("A", "b c=d"))
    assert (line.kind, line.target) == (TORCHRUN, ("X=1.py",))


@pytest.mark.parametrize(
    ("typed", "python", "rank_flag", "gpus"),
    [
        ("train.py", False, False, None),
        ("python train.py", True, False, None),
        ("torchrun train.py", True, False, None),
        ("torchrun --no_python mine", False, False, None),
        ("deepspeed train.py", True, True, None),
        ("deepspeed --no_local_rank train.py", True, False, None),
        ("deepspeed --include localhost train.py", True, True, None),
        ("deepspeed --include localhost:2,3 train.py", True, True, "2,3"),
        ("accelerate launch --gpu_ids 1,3 train.py", True, False, "1,3"),
        ("accelerate launch --gpu_ids all train.py", True, False, None),
    ],
)
def test_what_a_launcher_does_for_its_ranks(typed: str, python: bool, rank_flag: bool, gpus: str | None) -> None:
    line = take_apart(typed.split())
    assert (line.python, line.gives_local_rank, line.gpus) == (python, rank_flag, gpus)


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (
            "torchrun --nnodes 2 train.py",
            "torchrun --nnodes 2: trainings over several nodes are autotune's to start: give it --hostfile FILE",
        ),
        ("deepspeed --num_nodes 2 train.py", "deepspeed --num_nodes 2: trainings over several nodes"),
        ("deepspeed -i a:0@b:0 train.py", "deepspeed --include a:0@b:0: trainings over several nodes"),
        ("deepspeed --include worker-1:0,1 train.py", "deepspeed --include worker-1:0,1: trainings over several nodes"),
        ("accelerate launch --num_machines 2 train.py", "accelerate --num_machines 2: trainings over several nodes"),
        ("torchrun --nproc-per-node 2", "`-- torchrun --nproc-per-node 2`: no script after the launcher's options"),
        ("torchrun --nproc-per-node", "`-- torchrun … --nproc-per-node`: expected a value after it"),
        ("deepspeed --exclude localhost:0 train.py", "deepspeed --exclude localhost:0: name the GPUs that are meant"),
    ],
)
def test_what_is_refused(typed: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        take_apart(typed.split())
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("ranks", ["two", "0", "1.5"])
def test_ranks_that_are_no_number(ranks: str) -> None:
    with pytest.raises(UserError, match=f"nproc_per_node: expected a whole number from 1 to 65536, found {ranks}"):
        _ = take_apart(["torchrun", "--nproc-per-node", ranks, "train.py"]).ranks


@pytest.mark.parametrize(
    ("typed", "option", "expected"),
    [
        ("torchrun train.py", "--nproc-per-node", "torchrun --nproc-per-node 4"),
        ("torchrun --nproc_per_node gpu --tee 3 train.py", "--nproc-per-node", "torchrun --nproc_per_node 4 --tee 3"),
        ("torchrun -m --standalone mine", "--nproc-per-node", "torchrun --standalone --nproc-per-node 4"),
        ("python -m torch.distributed.run a", "--nproc-per-node", "python -m torch.distributed.run --nproc-per-node 4"),
        ("deepspeed --module mine", "--num_gpus", "deepspeed --num_gpus 4"),
        ("accelerate launch --debug a", "--num_processes", "accelerate launch --debug --num_processes 4"),
        (
            "torchrun --nproc-per-node 2 --nproc_per_node=3 a",
            "--nproc-per-node",
            "torchrun --nproc-per-node 4 --nproc_per_node=4",
        ),
    ],
)
def test_an_option_is_set_where_it_stands(typed: str, option: str, expected: str) -> None:
    assert with_options(take_apart(typed.split()), {option: "4"}) == expected.split()


def test_deepspeed_spells_a_module_out() -> None:
    line = take_apart(["deepspeed", "--num_gpus", "2", "--module", "mine.train", "x"])
    assert launcher_command(line, line.launcher, line.target) == [
        "deepspeed",
        "--num_gpus",
        "2",
        "--module",
        "mine.train",
        "x",
    ]


def _switches(parser: argparse.ArgumentParser) -> tuple[set[str], set[str]]:
    """Options of a parser without and with a value, `-` written as `_`."""
    without, valued = set(), set()
    for action in parser._actions:
        for option in action.option_strings:
            if option.startswith("--"):
                (without if action.nargs == 0 else valued).add(option[2:].replace("-", "_"))
    return without, valued


@pytest.mark.parametrize("kind", [TORCHRUN, DEEPSPEED, ACCELERATE])
def test_the_installed_launchers_have_these_options(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == TORCHRUN:
        from torch.distributed.run import get_args_parser as make
    elif kind == ACCELERATE:
        from accelerate.commands.launch import launch_command_parser as make
    else:
        from deepspeed.launcher import runner

        def make() -> argparse.ArgumentParser:
            parsers: list[argparse.ArgumentParser] = []
            monkeypatch.setattr(argparse.ArgumentParser, "parse_args", lambda self, args=None: parsers.append(self))
            runner.parse_args([])
            return parsers[0]

    without, valued = _switches(make())
    assert without - _SWITCHES[kind] == set(), "takes no value, and would be thought to"
    assert valued & _SWITCHES[kind] == set(), "takes a value, and would be thought not to"


def test_a_hostfile_of_one_host_is_this_machine(tmp_path: Path) -> None:
    path = tmp_path / "hostfile"
    path.write_text("# two, of which one is away\n\nlocalhost slots=2\n  # worker-2 slots=2\n")
    assert take_apart(f"deepspeed --hostfile {path} train.py".split()).kind == DEEPSPEED
    path.write_text("a slots=2\nb slots=2\n")
    with pytest.raises(UserError, match=r"deepspeed --hostfile .*hostfile \(2 hosts\): trainings over several nodes"):
        take_apart(f"deepspeed --hostfile {path} train.py".split())
    assert take_apart(f"deepspeed --hostfile {path}.gone train.py".split()).kind == DEEPSPEED
