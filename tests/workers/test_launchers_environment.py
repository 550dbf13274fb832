"""The environment of trials and of trainings, and what torch makes of it in a forked child."""

import os
import subprocess
import sys

import pytest

from autotune.problem.candidate import ALLOCATOR_VARIABLES
from autotune.workers.launchers import assignments, training_environment, trial_environment, variables_of
from tests.conftest import make_candidate
from tests.fake_driver import Card, Driver

QUIET = {"TRANSFORMERS_VERBOSITY", "HF_HUB_DISABLE_PROGRESS_BARS", "TOKENIZERS_PARALLELISM", "PYTHONUNBUFFERED"}
OF_THE_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_training_has_the_users_environment_and_little_more(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in QUIET:
        monkeypatch.delenv(name, raising=False)
    added = training_environment(device, 3).items() - os.environ.items()
    ours = {"PYTHONPATH", "PATH", "DS_ACCELERATOR", "OMP_NUM_THREADS", "CUDA_DEVICE_ORDER"} | (
        {"CUDA_VISIBLE_DEVICES"} if device == "cpu" else set()
    )
    assert {name for name, _ in added} <= ours
    assert dict(training_environment(device, 3))["OMP_NUM_THREADS"] == "3"
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "info")
    assert training_environment(device, 3)["TRANSFORMERS_VERBOSITY"] == "info", "the user's own stays"


def test_builders_of_ops_need_not_ask_cuda(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would wake it in the fork server, and every rank would start cold."""
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    driver.show(Card("H100", 80, capability=(9, 0)), Card("A100", 80, capability=(8, 0)))
    assert trial_environment("cuda", 1)["TORCH_CUDA_ARCH_LIST"] == "8.0;9.0+PTX"
    assert "TORCH_CUDA_ARCH_LIST" not in trial_environment("cpu", 1)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "7.5")
    assert trial_environment("cuda", 1)["TORCH_CUDA_ARCH_LIST"] == "7.5", "the user's own word"


@pytest.mark.parametrize(
    ("own", "visible", "none_visible"),
    [
        ("9.0a", "9.0", "9.0"),
        ("8.0;9.0a+PTX", "9.0", "8.0;9.0"),
        ("10.0f 9.0", "9.0", "10.0;9.0"),
        ("Hopper", "9.0", None),
        ("8.0 9.0+PTX", None, None),
        ("8.0;9.0;", None, None),
    ],
)
def test_an_architecture_list_that_deepspeed_cannot_read_is_replaced(
    own: str, visible: str | None, none_visible: str | None, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a list ends the build of an op, and also the loading of a built one: in trials and in trainings alike."""
    deepspeeds = own.replace(" ", ";").split(";")
    try:  # deepspeed 0.19.8, ops/op_builder/builder.py, compute_capability_args
        sorted((cc for cc in deepspeeds if cc.strip()), key=lambda cc: [int(p.split("+")[0]) for p in cc.split(".")])
        readable = True
    except ValueError:
        readable = False
    assert readable == (visible is None)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", own)
    for cards, expected in (([Card("H100", 80, capability=(9, 0))], visible), ([], none_visible)):
        driver.cards = cards
        driver.write()
        found = {**os.environ, **training_environment("cuda", 1)}["TORCH_CUDA_ARCH_LIST"]
        assert found == (expected or own)
        assert {**os.environ, **trial_environment("cuda", 1)}["TORCH_CUDA_ARCH_LIST"] == found
    assert training_environment("cpu", 1)["TORCH_CUDA_ARCH_LIST"] == own


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_trial_is_quiet_and_allocates_as_training_does(device: str) -> None:
    trial, training = trial_environment(device, 2), training_environment(device, 2)
    assert trial.keys() >= QUIET
    for name in (*OF_THE_ALLOCATOR, *ALLOCATOR_VARIABLES, "OMP_NUM_THREADS", "LD_PRELOAD"):
        assert trial.get(name) == training.get(name)
    for name in OF_THE_ALLOCATOR:
        assert trial.get(name) == os.environ.get(name)


def test_what_stands_before_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert variables_of(make_candidate(), 4) == {"OMP_NUM_THREADS": "4"}
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "of:this_shell")
    own = {"PYTORCH_ALLOC_CONF": "roundup_power2_divisions:[256:1,>:4]", "OMP_NUM_THREADS": "9"}
    assert variables_of(make_candidate(), 4, own) == {**own, "OMP_NUM_THREADS": "4"}
    found = variables_of(make_candidate(expandable_segments=True), 4, own)
    value = "roundup_power2_divisions:[256:1,>:4],expandable_segments:True"
    assert found == {**own, "OMP_NUM_THREADS": "4", "PYTORCH_CUDA_ALLOC_CONF": value}
    said = subprocess.run(
        f'{assignments(found)} sh -c "echo \\$OMP_NUM_THREADS \\$PYTORCH_CUDA_ALLOC_CONF"',
        shell=True,
        capture_output=True,
        text=True,
    )
    assert said.stdout.strip() == f"4 {value}", "a shell takes them"


_CHILD = """
import os, sys
from autotune.workers.fork_server import preload
preload(None, ["autotune.rank.model_rank"])
import torch
read, write = os.pipe()
if not os.fork():
    os.environ.update({"PYTORCH_ALLOC_CONF": "expandable_segments:False", "PYTORCH_CUDA_ALLOC_CONF": sys.argv[1]})
    os.write(write, torch._C._accelerator_getAllocatorSettings().encode())
    os._exit(0)
os.wait()
print(os.read(read, 1000).decode())
"""


@pytest.mark.slow
def test_torch_reads_the_setting_late_enough_for_a_forked_rank_and_ours_before_others() -> None:
    setting = "expandable_segments:True"
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, setting], capture_output=True, text=True, env=trial_environment("cpu", 1)
    )
    assert done.stdout.strip().splitlines()[-1:] == [setting], done.stderr[-2000:]
