"""Known faults of DeepSpeed: the table, its conditions, and the installed DeepSpeed against it."""

import dataclasses
import json
import os
import subprocess
import sys
from importlib import metadata
from itertools import product
from pathlib import Path

import pytest

from autotune.problem.faults import Fault, facts_of, known_faults, own_facts, removed_keys, warnings
from autotune.problem.hardware import named_hardware
from autotune.problem.job import Job, Script, ScriptProfile
from autotune.problem.models import ModelSpec
from autotune.problem.space import fitted, parse_space
from autotune.versions import release
from tests.conftest import SCRIPTS, free_port

READ = (0, 19, 8)
STAGES = parse_space("{knobs: {zero_stage: [0, 1, 2, 3], train_micro_batch_size_per_gpu: [1, 2, 4]}}")
PROFILE = {
    "config": {"zero_optimization": {"stage": 3}},
    "micro_batch": 4,
    "accumulation": 1,
    "counted": "rows",
    "micros_per_accumulation": 4.0,
    "client_optimizer": True,
    "optimizer": "SGD",
    "checkpointing": False,
    "batch_note": "",
    "trained": [8],
    "frozen": 0,
}


def job_with(precision: str = "fp32", **profile: object) -> Job:
    model = ModelSpec("m", {}, "")
    script = Script(("train.py",), "/", (), profile=ScriptProfile.from_json({**PROFILE, **profile}))
    return Job(model, 2, 8, precision, global_batch_size=8, script=script)


def left_of(job: Job, deepspeed: tuple[int, ...]) -> tuple[set[int], list[str]]:
    space, lines = STAGES.without_faults(job, deepspeed)
    return {candidate.stage for candidate in space.candidates(job)}, lines


def test_stages_that_drop_hand_accumulated_gradients_are_left_out_with_the_reason() -> None:
    left, (line,) = left_of(job_with(), READ)
    assert left == {0, 3}
    assert line.startswith("stages 1 and 2 with several backwards in one step")
    assert line.endswith("left out")
    assert "only the last backward counts" in line
    assert left_of(job_with(micros_per_accumulation=1.0), READ) == ({0, 1, 2, 3}, [])


def test_a_fault_of_the_own_config_leaves_nothing_out_and_is_a_warning() -> None:
    job = job_with(config={"zero_optimization": {"stage": 2}})
    assert left_of(job, READ) == ({0, 1, 2, 3}, [])
    (line,) = warnings(own_facts(job), READ)
    assert line.startswith("warning: your own config has a known fault: stages 1 and 2")
    assert warnings(own_facts(job_with()), READ) == []


@pytest.mark.parametrize(
    ("deepspeed", "faulty"), [("0.17.5", False), ("0.17.6", True), ("0.18.2", True), ("0.18.3", False)]
)
def test_a_fault_holds_in_its_versions_only(deepspeed: str, faulty: bool) -> None:
    job = job_with(micros_per_accumulation=1.0)
    space, lines = STAGES.without_faults(job, release(deepspeed))
    pairs = {(candidate.stage, candidate.accumulation) for candidate in space.candidates(job)}
    assert ((2, 4) not in pairs) == faulty == bool(lines)
    assert {(2, 1), (1, 4)} <= pairs  # the condition is on stage and accumulation together


def test_stages_that_do_not_read_gradients_changed_by_hand_are_left_out() -> None:
    seen = {"grad_changed_by_hand": True, "micros_per_accumulation": 1.0}
    left, (line,) = left_of(job_with(**seen, config={}), READ)
    assert left == {0}
    assert line.startswith("stages 1 to 3 with gradients that the script itself changes")
    assert "gradient_clipping in the config works at every stage" in line
    own = own_facts(job_with(**seen, config={"zero_optimization": {"stage": 2}}))
    (warning,) = warnings(own, READ)
    assert "the change has no effect" in warning


def test_a_named_model_of_this_deepspeed_loses_no_candidate() -> None:
    job = Job(ModelSpec("m", {}, ""), 2, 8, "bf16", global_batch_size=8)
    assert fitted(STAGES, job, named_hardware("a100-80gb", 2)).space.faults == ()
    assert left_of(dataclasses.replace(job, precision="bf16"), (0, 18, 6))[0] == {1, 2, 3}


def test_every_row_is_complete_and_its_conditions_are_facts_that_exist() -> None:
    job = job_with(zero_init=True, boundary_by_hand=True, through_arguments=True)
    known = set(facts_of({"data_types": {"grad_accum_dtype": "fp32"}}, job)) | {"compiled"}
    for fault in known_faults():
        assert fault.setting
        assert fault.effect
        assert fault.source
        assert fault.known in ("measured", "read", "reported")
        unseen = {"module_reused", "grad_changed_by_hand", "backward_of_one_output"}  # by a probe run
        assert set(fault.when) - known <= unseen, fault.setting
    assert "optimizer" in known
    assert "fused_optimizer" in known


def test_ulysses_of_trainer_at_stage_2_is_a_warning_and_its_stages_are_left_out_at_stage_3() -> None:
    shared = {"sequence_ranks": 2, "through_arguments": True, "micros_per_accumulation": 1.0}
    left, (line,) = left_of(job_with(**shared), READ)
    assert left == {3}
    assert line.startswith("stages 0 to 2 under Ulysses")
    at_two = job_with(**shared, config={"zero_optimization": {"stage": 2}})
    (line,) = warnings(own_facts(at_two), READ)
    assert "gradients are multiplied by the number of these ranks" in line
    assert left_of(job_with(**{**shared, "through_arguments": False}), READ) == ({0, 1, 2, 3}, [])


def test_an_unknown_fact_neither_excludes_nor_acquits() -> None:
    fault = Fault("s", {"stage": [1], "module_reused": [True]}, "e", "read", "s")
    assert (fault.holds({"stage": 2}), fault.holds({"stage": 1}), fault.holds({"stage": 1, "module_reused": True})) == (
        False,
        None,
        True,
    )
    facts = facts_of({"gradient_accumulation_steps": "auto", "bf16": {"enabled": "auto"}})
    assert "accumulation" not in facts
    assert "precision" not in facts


# -- installed DeepSpeed -----------------------------------------------------------------------------------------------

INSTALLED = release(metadata.version("deepspeed"))
ON_CPU = {
    *("stage", "precision", "accumulation", "offload_optimizer", "grad_accum_dtype", "backwards_per_step"),
    *("grad_changed_by_hand", "boundary_by_hand", "module_reused", "fused_optimizer", "backward_of_one_output"),
    *("sequence_ranks", "gathered_loss", "reduce_scatter"),
}
NEAR = 0.1  # bf16 rounds an update of some percent of a weight


def settings_of(fault: Fault) -> list[dict[str, object]]:
    """Return the trainings that the fault's condition names."""
    few = {"sequence_ranks": 2}  # as many ranks as there are
    each = {name: [few.get(name, 4)] if isinstance(wanted, dict) else wanted for name, wanted in fault.when.items()}
    return [dict(zip(each, values, strict=True)) for values in product(*each.values())]


def apart_on_two_ranks(settings: list[dict[str, object]]) -> list[float]:
    ranks = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    quiet = {**os.environ, "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    command = [*ranks, str(SCRIPTS / "faulty.py"), json.dumps(settings)]
    done = subprocess.run(command, env=quiet, capture_output=True, text=True, timeout=240, check=False)
    found = [float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("APART")]
    assert len(found) == len(settings), done.stderr[-3000:]
    return found


@pytest.mark.slow
def test_the_table_agrees_with_the_installed_deepspeed() -> None:
    faults = [(fault, setting) for fault in known_faults() for setting in settings_of(fault) if set(setting) <= ON_CPU]
    faults = [(fault, setting) for fault, setting in faults if setting.get("offload_optimizer") != "nvme"]
    right = [{"stage": stage, "backwards_per_step": times} for stage, times in [(0, 4), (3, 4), (1, 1), (2, 1)]]
    right.append({"stage": 0, "grad_changed_by_hand": True})
    right += [{"stage": stage, "sequence_ranks": 2, "gathered_loss": stage == 3} for stage in range(4)]
    apart = apart_on_two_ranks([*(setting for _, setting in faults), *right])
    bf16_at_0 = {"stage": 0, "precision": "bf16", "fused_optimizer": False}
    for (fault, setting), distance in zip(faults, apart, strict=False):
        shown = fault.concerns(INSTALLED) or (
            setting == bf16_at_0 and any(other.concerns(INSTALLED) for other, one in faults if one == bf16_at_0)
        )
        assert (distance > NEAR) == shown, (fault.setting, setting, distance)
    assert max(apart[len(faults) :]) < NEAR


@pytest.mark.slow
def test_removed_keys_are_those_of_the_installed_deepspeed() -> None:
    from deepspeed.runtime import config

    theirs = {*getattr(config, "_REMOVED_TOP_LEVEL_CONFIG_KEYS", {})}
    theirs |= {f"zero_optimization.{name}" for name in getattr(config, "_REMOVED_ZERO_CONFIG_KEYS", {})}
    every = {"zero_optimization": {}}
    for key in theirs:
        section, _, leaf = key.rpartition(".")
        (every[section] if section else every)[leaf] = {"enabled": False}
    assert {key for key, _ in removed_keys(every, INSTALLED)} == theirs


def test_removed_keys_are_refused_in_their_versions() -> None:
    config = {"amp": {"enabled": False}, "nebula": {}, "optimizer": {"type": "OneBitAdam"}}
    assert [key for key, _ in removed_keys(config, (0, 19, 8))] == ["amp", "nebula", "optimizer.type"]
    assert [key for key, _ in removed_keys(config, (0, 19, 7))] == ["nebula", "optimizer.type"]
    assert list(removed_keys(config, (0, 19, 6))) == []
    assert list(removed_keys({"optimizer": {"type": "AdamW"}, "zero_optimization": True}, (0, 19, 8))) == []


def test_the_data_file_is_what_the_table_reads() -> None:
    path = Path(__file__).parents[2] / "autotune" / "data" / "deepspeed_faults.json"
    assert len(json.loads(path.read_text())["faults"]) == len(known_faults())
