"""The Job that a user's script is, before its first run and after it."""

import json
from pathlib import Path
from typing import Any

import pytest

from autotune.problem.candidate import Candidate
from autotune.problem.hardware import named_hardware
from autotune.problem.job import Job, Script, ScriptProfile
from autotune.problem.models import ModelSpec
from autotune.script.carriers import settings
from autotune.script.profile import (
    batch_held,
    batch_seen,
    first_candidate,
    job_of,
    other_batch,
    over_present,
    own_candidate,
    unheeded_accumulation,
    unknown_job,
)
from autotune.script.script import command
from tests.conftest import make_candidate

HARDWARE = named_hardware("rtx3090", 4)
PROFILE = {
    "config": {
        "train_batch_size": 24,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 3,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 2},
    },
    "client_optimizer": False,
    "through_arguments": False,
    "untested_optimizer": False,
    "micro_batch": 2,
    "accumulation": 3,
    "trained": [100, 20],
    "frozen": 7,
    "model_config": {"hidden_size": 64},
    "seq_len": 512,
    "precision": "fp16",
    "checkpointing": True,
    "checkpointed": False,
}


def script(**changes: object) -> Script:
    return Script(("train.py", "--lr", "1"), "/home/me", profile=ScriptProfile.from_json({**PROFILE, **changes}))


# -- before --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "base"),
    [
        (None, {}),  # no config is named
        ({"optimizer": {"type": "Lion"}}, {"optimizer": {"type": "Lion"}}),
        ({"optimizer": "auto"}, {}),
        ({}, {}),
    ],
)
def test_a_script_that_has_not_run(tmp_path: Path, config: dict | None, base: dict) -> None:
    argv = ("train.py", "--deepspeed", "ds.json")
    if config is not None:
        (tmp_path / "ds.json").write_text(f"# ours\n{json.dumps({'train_batch_size': 8, **config})}")
    one = Script(argv, str(tmp_path))
    assert unknown_job(one, HARDWARE) == Job(
        ModelSpec("train", {}, "train.py --deepspeed ds.json"), 4, 1, "fp32", base_config=base, script=one
    )


# -- after ---------------------------------------------------------------------------------------------------------------


def test_a_script_that_has_run() -> None:
    assert job_of(script(), HARDWARE, None) == Job(
        ModelSpec("train", {"model_type": "", "hidden_size": 64}, "train.py --lr 1", 127),
        4,
        512,
        "fp16",
        global_batch_size=24,
        base_config={"gradient_clipping": 1.0, "zero_optimization": {"stage": 2}},
        script=script(),
    )
    assert job_of(script(), HARDWARE, 48).global_batch_size == 48
    assert job_of(script(), HARDWARE, None, free=True).global_batch_size is None
    named = script(model_config={"model_type": "llama"})
    assert job_of(named, HARDWARE, None).model.config == {"model_type": "llama"}


KEEP, ALLOW = "zero_force_ds_cpu_optimizer", "zero_allow_untested_optimizer"


@pytest.mark.parametrize(
    ("changes", "added"),
    [
        ({"client_optimizer": True}, {KEEP: False}),  # offloaded or not, it stays the script's own
        ({"client_optimizer": True, "through_arguments": True}, {}),  # Trainer makes it by the config
        ({"through_arguments": True}, {}),
        ({"untested_optimizer": True}, {ALLOW: True}),
        ({"untested_optimizer": True, "client_optimizer": True}, {KEEP: False, ALLOW: True}),
        # what the script's config says itself is left
        ({"client_optimizer": True, "config": {KEEP: True}}, {KEEP: True}),
        ({"untested_optimizer": True, "config": {ALLOW: False}}, {ALLOW: False}),
    ],
)
def test_an_optimizer_of_the_scripts_own(changes: dict, added: dict) -> None:
    base = job_of(script(**{"config": {}, **changes}), HARDWARE, None).base_config
    assert base == added


@pytest.mark.parametrize(
    ("changes", "checkpointing"),
    [
        ({}, {"activation_checkpointing": False}),
        ({"checkpointing": False, "checkpointed": True}, {"activation_checkpointing": True}),  # it cannot be told
        ({"checkpointing": False}, {}),
    ],
)
def test_its_own_config_as_a_candidate(changes: dict, checkpointing: dict) -> None:
    # as measured: `"auto"` in a config says nothing of the batch
    seen = {"config": {"train_micro_batch_size_per_gpu": 9, "zero_optimization": {"stage": 2}}, **changes}
    batch = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}
    assert own_candidate(script(**seen)) == Candidate.of({"zero_stage": 2, **batch, **checkpointing})


# -- how its batches are counted -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("facts", "batch", "counted", "per_sample", "micros"),
    [
        # as its config says: 2 samples, 3 forwards
        ({"micros": 3, "rows": 6, "sequences": 6}, (2, 3), "rows", 1, 1.0),
        # pairs; two forwards a sample
        ({"micros": 6, "rows": 12, "sequences": 12}, (2, 3), "rows", 2, 2.0),
        # rows come first where both could be
        ({"micros": 3, "rows": 12, "sequences": 24}, (2, 3), "rows", 2, 1.0),
        # a batch from elsewhere: 5 a forward
        ({"micros": 3, "rows": 15, "sequences": 15}, (5, 3), "rows", 1, 1.0),
        ({"micros": 5, "rows": 9, "sequences": 9}, (3, 3), "rows", 1, 5 / 3),  # its accumulation is believed
        # and its accumulation too
        ({"micros": 4, "rows": 20, "sequences": 20}, (5, 4), "rows", 1, 1.0),
        ({"micros": 8, "rows": 4, "sequences": 4}, (1, 8), "rows", 1, 1.0),
        # nothing to count
        ({"micros": 3}, (2, 3), "", 1, 1.0),
        ({"micros": 6, "rows": None, "sequences": 6}, (2, 3), "", 1, 2.0),
    ],
)
def test_the_batch_is_what_was_seen(
    facts: dict[str, int], batch: tuple[int, int], counted: str, per_sample: int, micros: float
) -> None:
    seen = batch_seen({"micro_batch": 2, "accumulation": 3, **facts})
    assert (seen["micro_batch"], seen["accumulation"]) == batch
    assert {type(seen[key]) for key in ("micro_batch", "accumulation", "rows_per_sample")} == {int}, (
        "of samples, in whole"
    )
    assert counting(seen) == (counted, per_sample, micros)


MICRO, STEPS = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


def counting(seen: dict[str, Any]) -> tuple[str, float, float]:
    return seen["counted"], seen["rows_per_sample"], seen["micros_per_accumulation"]


@pytest.mark.parametrize(
    ("facts", "said", "batch", "per_sample", "micros"),
    [
        # a config that nobody has kept up: the loader's batch is seen
        ({"micro_batch": 1, "accumulation": 2, "micros": 2, "rows": 16}, {MICRO: [8]}, (8, 2), 1, 1.0),
        # accumulated by hand, as the flag says
        ({"micro_batch": 2, "accumulation": 1, "micros": 4, "rows": 8}, {STEPS: [4]}, (2, 4), 1, 1.0),
        # a loop that steps at every backward, whatever its config says
        ({"micro_batch": 8, "accumulation": 4, "micros": 1, "rows": 8}, {}, (8, 1), 1, 1.0),
        ({"micro_batch": 2, "accumulation": 4, "micros": 1, "rows": 6}, {MICRO: [6]}, (6, 1), 1, 1.0),
    ],
)
def test_arguments_and_loaders_are_believed_where_they_fit(
    facts: dict, said: dict, batch: tuple[int, int], per_sample: int, micros: float
) -> None:
    seen = batch_seen({**facts, "sequences": facts["rows"], "said": said})
    assert (seen["micro_batch"], seen["accumulation"]) == batch
    assert counting(seen) == ("rows", per_sample, micros)
    assert seen["loop_accumulates"] is (facts["accumulation"] == 1 < batch[1])


@pytest.mark.parametrize(
    ("facts", "said", "batch", "counted"),
    [
        ({"micros": 3, "packed_tokens": 500.0}, {}, (4, 3), ("tokens", 125.0, 1.0)),
        ({"micros": 3, "packed_tokens": 500.0}, {MICRO: [8]}, (4, 3), ("", 1, 1.0)),  # which of them is not seen
        ({"micros": 3, "packed_tokens": 0.0}, {}, (4, 3), ("", 1, 1.0)),
        # a row that is no more than one sample, with positions that begin anew in its padding
        ({"micro_batch": 1, "micros": 3, "packed_tokens": 0.0}, {}, (1, 3), ("rows", 1, 1.0)),
        ({"micro_batch": 1, "micros": 3, "packed_tokens": 500.0}, {}, (1, 3), ("tokens", 500.0, 1.0)),
    ],
)
def test_how_many_rows_are_packed_end_to_end_is_what_is_said(
    facts: dict, said: dict, batch: tuple[int, int], counted: tuple[str, float, float]
) -> None:
    seen = batch_seen({"micro_batch": 4, "accumulation": 3, "rows": 3, "sequences": 24, "said": said, **facts})
    assert (seen["micro_batch"], seen["accumulation"]) == batch
    assert counting(seen) == counted
    assert ("packed end to end" in seen.get("uncounted", "")) is not bool(counted[0])


def test_which_tensor_was_counted_is_kept() -> None:
    facts = {"micro_batch": 4, "accumulation": 2, "micros": 2, "rows": 8, "sequences": 8, "counted_by": "images"}
    assert batch_seen(facts)["counted_by"] == batch_held(facts)["counted_by"] == "images"


@pytest.mark.parametrize(
    ("facts", "batch"),
    [
        ({"micros": 2, "rows": 2, "sequences": 2}, (4, 2)),  # one row a forward: not its batch
        ({"micros": 2, "rows": 16, "sequences": 16}, (4, 2)),
        ({"micros": 1, "rows": 4, "sequences": 4}, (4, 1)),
        ({"micros": 2}, (4, 2)),
    ],
)
def test_a_batch_that_is_held_is_the_configs(facts: dict[str, int], batch: tuple[int, int]) -> None:
    found = batch_held({"micro_batch": 4, "accumulation": 2, **facts})
    assert (found["micro_batch"], found["accumulation"]) == batch
    assert found["held"] == {"micros": facts["micros"], "rows": facts.get("rows", 0)}


def test_of_a_batch_that_is_held_nothing_is_written() -> None:
    held = script(batch_note="it has its own", flags=["--per_device_train_batch_size"])
    config = make_candidate(1, 7, 5).ds_config(job_of(held, HARDWARE, None))
    assert config["zero_optimization"]["stage"] == 1
    assert [config[key] for key in ("train_batch_size", MICRO, STEPS)] == [24, 2, 3], "as the script has it"
    silent = script(batch_note="it has its own", config={})
    assert (
        not {"train_batch_size", MICRO, STEPS}
        & make_candidate(1, 7, 5).ds_config(job_of(silent, HARDWARE, None)).keys()
    )
    assert MICRO not in dict(make_candidate(1, 7, 5).passed_knobs(held))
    assert dict(make_candidate(1, 7, 5).passed_knobs(script()))[MICRO] == 7
    assert settings(held, make_candidate(1, 7, 5)) == {}
    assert settings(script(), make_candidate(1, 7, 5)) == {"--per_device_train_batch_size": 7, f"--{STEPS}": 5}
    assert command(held, make_candidate(1, 7, 5), "best.json") == ["train.py", "--lr", "1"]


def test_ranks_that_share_sequences_count_a_batch_once() -> None:
    shared = job_of(script(sequence_ranks=2), HARDWARE, None)
    assert (shared.ranks, shared.data_ranks, shared.global_batch_size) == (4, 2, 12)
    config = make_candidate(1, 6, 1).ds_config(shared)
    assert "train_batch_size" not in config, "transformers and DeepSpeed count it differently"
    assert (config[MICRO], config[STEPS]) == (6, 1)
    assert other_batch(make_candidate(1, 6, 1), shared) == ""


def test_steps_of_another_size_are_said() -> None:
    job = job_of(script(), HARDWARE, None)
    assert other_batch(make_candidate(0, 2, 3), job) == ""
    assert other_batch(make_candidate(0, 6, 1), job) == ""
    assert other_batch(make_candidate(0, 4, 1), job) == (
        "its steps are of 16 samples, the script's own of 24: the learning rate, its warm-up and the number of steps "
        "need your attention"
    )
    assert other_batch(make_candidate(0, 4, 1), unknown_job(script(), HARDWARE)) != ""
    without = Script(("train.py",), "/home/me")
    assert other_batch(make_candidate(0, 4, 1), unknown_job(without, HARDWARE)) == ""


# -- what its first run may be -------------------------------------------------------------------------------------------


def test_a_first_run_is_its_config(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}} // ours')
    one = first_candidate(Script(("train.py", "--deepspeed", "ds.json"), str(tmp_path)))
    assert one.stage == 3
    assert one.as_dict["offload_param"] == "cpu"


def test_a_script_that_offloads_by_an_old_name_is_told_as_one_that_offloads() -> None:
    given = script(config={**PROFILE["config"], "zero_optimization": {"stage": 2, "cpu_offload": True}})
    assert own_candidate(given).offload_optimizer == "cpu"
    assert job_of(given, HARDWARE, None).base_config["zero_optimization"] == {
        "stage": 2,
        "offload_optimizer": {"device": "cpu"},
    }


ON, OFF, LEFT = {"enabled": True}, {"enabled": False}, {"enabled": "auto"}


@pytest.mark.parametrize(
    ("then", "now", "expected"),
    [
        ({"bf16": ON}, {"bf16": ON}, "fp16"),  # nothing else than the first: what the job has been told
        ({}, {"train_batch_size": 4}, "fp16"),
        ({"bf16": ON}, {"bf16": OFF, "fp16": ON}, "fp16"),
        ({"fp16": ON}, {"bfloat16": ON}, "bf16"),
        ({"fp16": ON}, {}, "fp32"),
        ({"bf16": ON}, {"bf16": LEFT}, "fp16"),  # its caller's to say
        ({"bf16": OFF}, {}, "fp16"),
        ({"bf16": "yes"}, {"bf16": OFF}, "fp16"),  # no section
    ],
)
def test_the_precision_of_a_config_that_was_edited(
    then: dict[str, object], now: dict[str, object], expected: str
) -> None:
    job = job_of(script(config=then, precision="fp16"), HARDWARE, None)
    assert over_present(job, now).precision == expected


def test_accumulation_that_the_engine_does_not_heed_is_said_in_rows() -> None:
    facts = {"micro_batch": 2, "accumulation": 8, "micros": 1, "rows": 2, "sequences": 2, "loader_prepared": True}
    profile = ScriptProfile(**batch_seen(facts))
    assert (profile.micro_batch, profile.accumulation) == (2, 1)
    said = "your plugin accumulates 8, but the engine steps after every micro-batch: you train 4 rows a step, not 32"
    assert unheeded_accumulation(facts, profile, 2) == said
    assert unheeded_accumulation({**facts, "loader_prepared": False}, profile, 2).startswith(
        "your config accumulates 8"
    )
    for other in ({"micros": 8, "rows": 16, "sequences": 16}, {"accumulation": 1}):
        assert not unheeded_accumulation({**facts, **other}, ScriptProfile(**batch_seen({**facts, **other})), 2)
