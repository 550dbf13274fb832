"""What a setting needs of the job and the machine: said where it is missing, nothing where it is there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autotune.problem import knobs
from autotune.problem.hardware import Hardware, detect, named_hardware
from autotune.problem.job import Script, ScriptProfile
from autotune.problem.knobs import RequirementInputs
from autotune.util import inquiry
from tests.conftest import make_job

CPU, GPUS, NODES = detect("cpu", 2), named_hardware("a100-80", 2), named_hardware("a100-80", 8, nodes=2)
SCRIPT = Script(("train.py",), ".")


def around(hardware: Hardware = GPUS, *, lossy: bool = False, **job: Any) -> RequirementInputs:
    return RequirementInputs.of(make_job(hardware.count, **job), hardware, lossy)


@pytest.mark.parametrize(
    ("need", "there", "missing", "said"),
    [
        (knobs.cuda, around(), around(CPU), "is for CUDA alone"),
        (knobs.several_ranks, around(), around(named_hardware("a100-80", 1)), "needs more than one rank"),
        (knobs.bf16, around(precision="bf16"), around(precision="fp16"), "needs --precision bf16, not fp16"),
        (knobs.fp16, around(precision="fp16"), around(precision="bf16"), "needs --precision fp16, not bf16"),
        (knobs.adam, around(), around(optimizer="sgd"), "needs DeepSpeed's Adam, not sgd"),
        (
            knobs.no_clipping,
            around(base_config={"gradient_clipping": 0}),
            around(base_config={"gradient_clipping": False}),  # DeepSpeed takes it for a number, people do not
            "needs gradient_clipping: 0 in your own config",
        ),
        (
            knobs.a_script,
            around(script=SCRIPT),
            around(),
            "needs a training script: a named model has fixed steps and batches",
        ),
    ],
)
def test_of_job_and_machine(
    need: Callable[..., str], there: RequirementInputs, missing: RequirementInputs, said: str
) -> None:
    assert need(True, there) == ""
    assert need(True, missing) == said


def with_optimizer(kind: str, hardware: Hardware = GPUS, **profile: Any) -> RequirementInputs:
    return around(hardware, script=Script(("train.py",), ".", profile=ScriptProfile(optimizer=kind, **profile)))


@pytest.mark.parametrize(
    ("kind", "none", "cpu"),
    [
        ("FusedAdam", True, False),
        ("FusedLAMB", True, False),
        ("DeepSpeedCPUAdam", False, True),
        ("DeepSpeedCPUAdagrad", False, True),
        ("OnebitAdam", True, True),
        ("", True, True),
    ],
)
def test_an_optimizer_of_one_place_stays_there(kind: str, none: bool, cpu: bool) -> None:
    there = with_optimizer(kind)
    place, sharded = knobs.place_of_its_optimizer, knobs.sharded_for_its_optimizer
    assert (not place("none", there), not place("cpu", there), not place("nvme", there)) == (none, cpu, cpu)
    assert sharded(0, there) is not none
    assert not sharded(1, there)
    for free in (with_optimizer(kind, CPU), with_optimizer(kind, through_arguments=True), around()):
        assert not any((place("none", free), place("cpu", free), sharded(0, free)))


@pytest.mark.parametrize(("value", "divides"), [(1, True), (3, False), (4, True), (8, False)])
def test_a_second_partition_divides_a_nodes_ranks(value: int, divides: bool) -> None:
    said = "" if divides else "has to divide the 4 ranks of a node"
    assert knobs.several_nodes(value, around(NODES)) == said
    assert knobs.several_nodes(value, around(GPUS)) == "needs more than one node"


@pytest.mark.parametrize(
    ("value", "precision", "narrower"),
    [
        ("bf16", "fp32", True),
        ("fp16", "fp32", True),
        ("fp32", "fp32", False),
        ("none", "fp32", False),  # no dtype that DeepSpeed knows
    ],
)
def test_sums_may_not_be_narrower_than_the_model(value: str, precision: str, narrower: bool) -> None:
    said = f"is narrower than {precision}, so that losses may differ: it needs a `lossy: true` space"
    assert knobs.no_narrower_than_the_model(value, around(precision=precision)) == (said if narrower else "")
    assert knobs.no_narrower_than_the_model(value, around(precision=precision, lossy=True)) == ""


# -- packages and programs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("need", "value", "hardware", "package"),
    [
        (knobs.liger_kernel, True, GPUS, "liger_kernel"),
        (knobs.a_compiler, True, GPUS, "triton"),
        (knobs.its_package, "flash_attention_2", GPUS, "flash_attn"),
        (knobs.its_package, "flash_attention_3", GPUS, "flash_attn_interface"),
        (knobs.its_package, "r=8,alpha=16", CPU, "peft"),
    ],
)
def test_a_package_of_the_ranks_environment(
    monkeypatch: pytest.MonkeyPatch, need: Callable[..., str], value: object, hardware: Hardware, package: str
) -> None:
    monkeypatch.setattr(inquiry, "has", lambda name: name == package)
    assert need(value, around(hardware)) == ""
    monkeypatch.setattr(inquiry, "has", lambda name: name is not None and name != package)
    assert need(value, around(hardware)) == f"needs the package {package}, which is not installed"


@pytest.mark.parametrize("program", ["g++", "c++"])
def test_on_cpus_any_compiler_of_c_will_do(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    monkeypatch.setattr(knobs, "console_script", lambda name, _: f"/usr/bin/{name}" if name == program else None)
    assert knobs.a_compiler(True, around(CPU)) == ""
    monkeypatch.setattr(knobs, "console_script", lambda name, _: None)
    assert knobs.a_compiler(True, around(CPU)) == "needs a C++ compiler (g++), which is not installed"


def test_an_allocator_that_the_scripts_code_sets_is_its_own(tmp_path: Path) -> None:
    """A training that is started with other settings would overwrite them."""
    script = Script(("train.py",), str(tmp_path))
    said = "is the script's own to set: its code sets PYTORCH_ALLOC_CONF"
    for line, expected in (
        ("os.environ['PYTORCH_ALLOC_CONF'] = 'expandable_segments:True'", said),
        ("os.environ.setdefault('PYTORCH_ALLOC_CONF', 'expandable_segments:True')", ""),
        ("os.environ['NCCL_ALGO'] = 'Ring'", ""),
    ):
        (tmp_path / "train.py").write_text(f"import os\n{line}\n")
        assert knobs.own_allocator(True, around(script=script)) == expected
    assert knobs.own_allocator(True, around()) == ""
    (tmp_path / "train.py").unlink()
    assert knobs.own_allocator(True, around(script=script)) == ""
