"""Small rebuilds of public training scripts (`tests/scripts/cases/`), most of them on real ranks.

Cases 01, 05, 06 and 22 are also in `test_certificates.py`. A list of stages in a config (17) is one of the bad inputs in
`cli/test_app.py`.
"""

import dataclasses
import json
from pathlib import Path

import pytest

from autotune.commands.script_probe import Probe, after_probe
from autotune.commands.setup import Setup
from autotune.predict.trace import traced_predictor
from autotune.problem.candidate import MICRO_BATCH, samples
from autotune.problem.hardware import named_hardware
from autotune.problem.job import Script, ScriptProfile
from autotune.problem.outcome import Measurement
from autotune.problem.space import load_space
from autotune.recovery.ladder import recovery_ladder
from autotune.results.console import train_with
from autotune.script.profile import job_of, own_candidate
from autotune.util.units import GIB
from tests.conftest import SCRIPTS, Scripts, make_candidate, make_job, make_setup

ADAM = {"type": "Adam", "params": {"lr": 1e-4, "torch_adam": True}}


def zero(stage: int) -> dict[str, int]:
    """Return a section with small buckets, for the memory limit of the tests' ranks."""
    return {"stage": stage, "reduce_bucket_size": 500_000, "allgather_bucket_size": 500_000}


def case(name: str, *arguments: str) -> list[str]:
    return [str(SCRIPTS / "cases" / f"{name}.py"), *arguments]


def setup_of(probed: Probe, scripts: Scripts, folder: Path) -> Setup:
    """Return the setup of a run after the probe, with all four stages in its space."""
    job = job_of(probed.script, scripts.hardware, None)
    return after_probe(make_setup(job, scripts.hardware, folder), probed)


@pytest.mark.slow
def test_batches_summed_by_hand_are_counted_and_faulty_stages_left_out(scripts: Scripts, tmp_path: Path) -> None:
    config = {"train_micro_batch_size_per_gpu": 4, "optimizer": ADAM, "zero_optimization": zero(3)}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    found = scripts.probe(case("several_backwards", "--deepspeed_config", "ds.json"), tmp_path)
    assert found.script.profile.accumulated_by_hand == 4
    setup = setup_of(found, scripts, tmp_path)
    own = own_candidate(found.script)
    assert samples(setup.job, own) == 32  # four backwards of four rows on two ranks
    assert "global batch 32" in setup.job.summary
    assert "tokens" not in setup.job.summary
    measured = found.baseline.measurement
    assert measured.samples_per_second * measured.step_seconds == pytest.approx(32)
    assert {candidate.stage for candidate in setup.candidates} == {0, 3}
    assert any("only the last backward counts" in note for note in setup.notes)


@pytest.mark.slow
def test_a_model_whose_parts_are_called_is_predicted(scripts: Scripts, tmp_path: Path) -> None:
    """Neither the engine nor its module is called, so that no forward is counted."""
    config = {"train_micro_batch_size_per_gpu": 4, "optimizer": ADAM, "zero_optimization": zero(1)}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    found = scripts.probe(case("submodules", "--deepspeed_config", "ds.json"), tmp_path)
    assert "cannot be counted" in found.script.profile.batch_note
    setup = setup_of(found, scripts, tmp_path)
    predictor = traced_predictor(setup.job, setup.hardware)
    assert all(one.step_seconds > 0 for one in predictor.predict_many(list(setup.candidates[:8])))
    assert scripts.measure(found, own_candidate(found.script).but(zero_stage=2)).ok


def test_a_printed_command_of_accelerate_carries_the_batch(tmp_path: Path) -> None:
    """Cases 09 and 10: Hugging Face's flag, and a flag that was found."""
    accelerate = ("accelerate", "launch", "--use_deepspeed", "--deepspeed_config_file", "ds.json")
    profile = {"loader_prepared": True, "through_arguments": False, "micro_batch": 4, "accumulation": 4, "flags": []}
    for flag, found in (
        ("--per_device_train_batch_size", {}),
        ("--train_batch_size", {MICRO_BATCH: "--train_batch_size"}),
    ):
        argv = ("train.py", flag, "4", "--gradient_accumulation_steps", "4")
        script = Script(
            argv,
            str(tmp_path),
            tuple(found.items()),
            launcher=accelerate,
            profile=ScriptProfile.from_json({**profile, "found_flags": found}),
        )
        told = train_with(make_candidate(1, 16, 1), make_job(script=script), "s", tmp_path / "s.json", 1)
        name, words = told.commands[1]
        assert name == "or without autotune"
        assert words.endswith(f"train.py {flag} 16 --gradient_accumulation_steps 1")
        assert not told.hints, "no line about its data loader"


@pytest.mark.slow
def test_a_training_that_counts_micro_batches_steps_down_with_its_micro_batch(tmp_path: Path) -> None:
    """Case 21: its schedule counts iterations, so its batch is kept."""
    job = make_job(4, model="qwen2.5-0.5b", seq_len=1024, precision="bf16", global_batch_size=64)
    predictor = traced_predictor(job, named_hardware("rtx4090", 4))
    top = make_candidate(1, 8, 2, reduce_bucket_size=500_000_000, activation_checkpointing=False)
    profile = {"batch_note": "this counts iterations of your loop", "micro_batch": 8, "accumulation": 2}
    held = dataclasses.replace(job, script=Script(("train.py",), "/", profile=ScriptProfile.from_json(profile)))
    ladder = recovery_ladder(top, load_space("default"), held, predictor, {})
    assert len(ladder) > 1
    assert {rung.candidate.micro_batch for rung in ladder} == {8}
    small = tmp_path / "small.yaml"
    small.write_text(
        "knobs:\n  zero_stage: [1]\n  reduce_bucket_size: [500_000_000]\n  allgather_bucket_size: [500_000]\n  train_micro_batch_size_per_gpu: [4, 8]\n"
    )
    measured = {top: Measurement(0.1, 0.0, 5, 1e9, 1e9, 100 * GIB)}
    (only,) = recovery_ladder(top, load_space(str(small)), held, predictor, measured)
    assert only.candidate == top, "no rung is the first once more, without its word on checkpointing"


@pytest.mark.slow
def test_sequences_that_grow_are_measured_at_the_length_of_their_data(scripts: Scripts, tmp_path: Path) -> None:
    config = {"train_micro_batch_size_per_gpu": 4, "optimizer": ADAM, "zero_optimization": zero(1)}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    found = scripts.probe(case("length_warmup", "--deepspeed_config", "ds.json"), tmp_path)
    profile = found.script.profile
    assert (profile.seq_len, profile.pads_to, profile.grows[2], profile.batch_note) == (64, 64, 64, "")
    assert scripts.measure(found, own_candidate(found.script).but(zero_stage=2)).ok
