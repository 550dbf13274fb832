"""However a training loop is written: the sequences of its steps are found, or it is left as it is with a reason."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from autotune.errors import UserError
from autotune.problem.candidate import ACCUMULATION, MICRO_BATCH
from autotune.problem.outcome import OutcomeKind, Source
from autotune.script.profile import own_candidate
from autotune.script.script import command as printed_command
from tests.conftest import SCRIPTS, Scripts

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "zero_optimization": {"stage": 1, "reduce_bucket_size": 100_000},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
}
# By way: (unit, of it for each sample, micro-batch) as its first run shows; all accumulate twice as told, but where said.
OBEY = {
    "engine_backward": ("rows", 1),
    "loss_backward": ("rows", 1),
    "two_forwards": ("rows", 2),
    "several_losses": ("rows", 1),
    "objects": ("rows", 1),
    "flattened": ("sequences", 1),
    "packed": ("rows", 1),
    "iterable_dataset": ("rows", 1),
    "loader_before": ("rows", 1),
    "deepspeed_io": ("rows", 1),
    "evaluation_between": ("rows", 1),
    "evaluation_mode": ("rows", 1),
    "evaluation_with_gradients": ("rows", 1),
    "compiled": ("rows", 1),
    "past_the_engine": ("rows", 1),
    "unlike_lengths": ("rows", 1),
    "queries_and_documents": ("rows", 4),
    "features": ("rows", 1),
    "two_engines": ("rows", 1),
    "with_borders": ("sequences", 1),
    "detection": ("rows", 1),
    "epochs": ("rows", 1),
    "critic": ("rows", 1),
    "full_rows": ("tokens", pytest.approx(62, abs=1)),
    "images_and_texts": ("rows", 1),
    "graphs": ("rows", 1),
}
# What is said; the batch stays what the config says, whatever was counted.
LEFT = {
    "constant_batch": "gave 16 rows a step where 8 were asked for",
    "loss_backward_of_its_own_batch": "gave 8 rows a step where 4 were asked for",
    "from_yaml": "a step where",
    "time_first": "gave 32 rows a step where 16 were asked for",
    "without_positions": "a step where",
    "plain_lists": "cannot be counted",
    "four_full_rows": "tokens a micro-batch where about 1",
    "rows_now_full_now_not": "packed end to end, so its micro-batch cannot be checked",
    "clouds": "change from step to step, so its micro-batch cannot be checked",
    "critic_of_another_batch": "an engine beside the first",
    "critic_of_unlike_steps": "a second engine trains",
    "errors_are_skipped": "gave 16 rows a step where 8 were asked for",
    "accumulation_by_hand": "gradient norm is",  # three backwards, each divided by another accumulation
    "several_losses --loss": "gradient norm is",  # DeepSpeed 0.19.8 divides what reaches both outputs twice
}


def folder_of(tmp_path: Path, config: dict[str, Any] | None = None) -> Path:
    (tmp_path / "ds.json").write_text(json.dumps(config or CONFIG))
    (tmp_path / "train.yaml").write_text("batch: 3\n")
    (tmp_path / "seen").mkdir()
    return tmp_path


def command(way: str) -> list[str]:
    return [str(SCRIPTS / "ways.py"), *way.split(), "--deepspeed_config", "ds.json"]


@pytest.mark.slow
@pytest.mark.parametrize("way", OBEY)
def test_the_sequences_of_a_step_are_found(scripts: Scripts, tmp_path: Path, way: str) -> None:
    found = scripts.probe(command(way), folder_of(tmp_path))
    profile = found.script.profile
    assert profile.batch_note == ""
    assert (profile.counted, profile.rows_per_sample) == OBEY[way]
    assert (profile.micro_batch, profile.accumulation) == (4, 2)
    other = own_candidate(found.script).but(**{MICRO_BATCH: 8, ACCUMULATION: 1})
    outcome = scripts.measure(found, other)
    assert outcome.ok, outcome


def batch_of_the_engine(folder: Path) -> tuple[int, int]:
    """(micro-batch, accumulation) of the engine that the script has made last."""
    micro_batch, accumulation = json.loads((folder / "seen" / "engine.json").read_text())
    return micro_batch, accumulation


@pytest.mark.slow
@pytest.mark.parametrize("way", LEFT)
def test_a_batch_that_cannot_be_changed_is_left(scripts: Scripts, tmp_path: Path, way: str) -> None:
    found = scripts.probe(command(way), folder_of(tmp_path))
    profile = found.script.profile
    assert LEFT[way] in profile.batch_note
    assert (profile.micro_batch, profile.accumulation) == (4, 2)
    own = own_candidate(found.script)
    assert scripts.measure(found, own.but(reduce_bucket_size=200_000)).ok
    last = (4, 4) if way == "critic_of_another_batch" else (4, 2)
    assert batch_of_the_engine(tmp_path) == last, "as its config says"
    told = scripts.measure(found, own.but(**{MICRO_BATCH: 8, ACCUMULATION: 1}))
    assert (told.kind, told.source) == (OutcomeKind.INVALID, Source.BATCH), "measured on another batch than it was told"


@pytest.mark.slow
def test_a_setting_that_carries_the_batch_is_found(scripts: Scripts, tmp_path: Path) -> None:
    found = scripts.probe(command("from_a_setting batch=6"), folder_of(tmp_path))
    own = own_candidate(found.script)
    assert (own.micro_batch, own.accumulation) == (6, 2), "the config says 4"
    assert scripts.measure(found, own.but(**{MICRO_BATCH: 3, ACCUMULATION: 4})).ok
    assert batch_of_the_engine(tmp_path) == (3, 4)


def test_a_script_that_fails_at_another_batch_keeps_its_own(scripts: Scripts, tmp_path: Path) -> None:
    found = scripts.probe(command("refuses_other_batches"), folder_of(tmp_path))
    assert "told another batch (" in found.script.profile.batch_note
    assert "made for four" in found.script.profile.batch_note
    assert scripts.measure(found, own_candidate(found.script).but(reduce_bucket_size=200_000)).ok


MICRO_FLAG = ((MICRO_BATCH, "--batch_size"),)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "batch"),
    [
        ("groups_of_eight", (1, 8)),
        ("accumulates_to_its_global_batch 16", (1, 8)),
        ("accumulates_to_its_global_batch 18", (3, 3)),
        ("one_or_four", (1, 8)),
    ],
)
def test_a_script_that_holds_its_global_batch_obeys(
    scripts: Scripts, tmp_path: Path, way: str, batch: tuple[int, int]
) -> None:
    config = {**CONFIG, MICRO_BATCH: batch[0], ACCUMULATION: batch[1]}
    found = scripts.probe(command(way), folder_of(tmp_path, config), MICRO_FLAG)
    assert found.script.profile.batch_note == ""
    own = own_candidate(found.script)
    assert (own.micro_batch, own.accumulation) == batch
    if way == "one_or_four":
        outcome = scripts.measure(found, own.but(**{MICRO_BATCH: 4, ACCUMULATION: 2}))
        assert outcome.ok, outcome


@pytest.mark.slow
def test_a_batch_of_another_size_that_a_script_refuses_ends_no_run(scripts: Scripts, tmp_path: Path) -> None:
    """Of one sample a rank there is no other batch of its own size."""
    config = {**CONFIG, MICRO_BATCH: 1, ACCUMULATION: 1}
    found = scripts.probe(command("accumulates_to_its_global_batch 2"), folder_of(tmp_path, config), MICRO_FLAG)
    assert "accumulated 1 micro-batches where 2 were asked for" in found.script.profile.batch_note


@pytest.mark.slow
def test_a_flag_that_does_not_set_the_batch_ends_the_run(scripts: Scripts, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="gave 16 rows a step where 8 were asked for"):
        scripts.probe(command("constant_batch"), folder_of(tmp_path), MICRO_FLAG)


@pytest.mark.slow
def test_a_batch_that_leaves_too_few_steps_is_only_that_candidates(scripts: Scripts, tmp_path: Path) -> None:
    found = scripts.probe(command("one_epoch"), folder_of(tmp_path))
    assert found.script.profile.batch_note == ""
    own = own_candidate(found.script)
    outcome = scripts.measure(found, own.but(**{MICRO_BATCH: 64, ACCUMULATION: 1}))
    assert (outcome.kind, outcome.source) == (OutcomeKind.INVALID, Source.STEPS)
    assert "ended after 3 optimizer steps" in outcome.reason
    assert scripts.measure(found, own.but(**{MICRO_BATCH: 8, ACCUMULATION: 1})).ok


# Batches that no config says: the batch that its first run shows, as it is counted, and whether it can be changed.
ELSEWHERE = {
    "stale_config": (6, 2, True),
    "accumulation_of_a_flag": (4, 4, False),
    "steps_at_every_backward": (4, 1, False),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", ELSEWHERE)
def test_what_says_the_batch_is_found_and_its_own_always_runs(scripts: Scripts, tmp_path: Path, way: str) -> None:
    micro_batch, accumulation, obeys = ELSEWHERE[way]
    config = {**CONFIG, "gradient_accumulation_steps": 1} if way == "accumulation_of_a_flag" else CONFIG
    found = scripts.probe(command(way), folder_of(tmp_path, config))
    profile = found.script.profile
    assert (profile.micro_batch, profile.accumulation) == (micro_batch, accumulation)
    assert bool(profile.batch_note) is not obeys
    own = own_candidate(found.script)
    outcome = scripts.measure(found, own.but(reduce_bucket_size=200_000))
    assert outcome.ok, outcome
    assert outcome.measurement is not None
    assert found.baseline.measurement is not None
    for measured in (outcome.measurement, found.baseline.measurement):  # by one count
        samples = measured.samples_per_second * measured.step_seconds
        assert samples == pytest.approx(2 * micro_batch * accumulation)
    assert scripts.measure(found, own.but(**{MICRO_BATCH: 2, ACCUMULATION: 6})).ok is obeys


@pytest.mark.slow
def test_the_last_step_of_an_epoch_may_have_fewer_micro_batches(scripts: Scripts, tmp_path: Path) -> None:
    found = scripts.probe(command("epochs"), folder_of(tmp_path))
    own = own_candidate(found.script)
    outcome = scripts.measure(found, own.but(**{MICRO_BATCH: 1, ACCUMULATION: 8}))  # 116 are 14 steps and a half
    assert outcome.ok, outcome
    outcome = scripts.measure(found, own.but(**{MICRO_BATCH: 1, ACCUMULATION: 80}))
    assert (outcome.kind, outcome.source) == (OutcomeKind.INVALID, Source.SHORT), "every other step trains on fewer"


@pytest.mark.slow
def test_the_config_of_an_engine_beside_the_first_stays_its_own(scripts: Scripts, tmp_path: Path) -> None:
    """Each engine reads a file of its own: the critic's is not touched, and the batch is held since both share it."""
    folder_of(tmp_path)
    critics = {**CONFIG, "zero_optimization": {"stage": 2, "reduce_bucket_size": 100_000}}
    (tmp_path / "critic.json").write_text(json.dumps(critics))
    words = [str(SCRIPTS / "ways.py"), "critic_of_its_own_file", "critic.json", "--deepspeed_config", "ds.json"]
    found = scripts.probe(words, tmp_path)
    assert "an engine beside the first" in found.script.profile.batch_note
    outcome = scripts.measure(found, own_candidate(found.script).but(zero_stage=0))
    assert outcome.ok, outcome
    assert json.loads((tmp_path / "seen" / "stages.json").read_text()) == [0, 2]
    printed = printed_command(found.script, own_candidate(found.script), "best.json")
    assert printed[-3:] == ["critic.json", "--deepspeed_config", "best.json"]


@pytest.mark.slow
def test_a_model_that_is_made_in_parts_is_tuned_at_every_stage(scripts: Scripts, tmp_path: Path) -> None:
    stage3 = {"stage": 3, "reduce_bucket_size": 100_000}
    found = scripts.probe(command("zero_init"), folder_of(tmp_path, {**CONFIG, "zero_optimization": stage3}))
    assert found.script.profile.zero_init
    for stage in (3, 0, 2):
        outcome = scripts.measure(found, own_candidate(found.script).but(zero_stage=stage))
        assert outcome.ok, outcome


@pytest.mark.slow
def test_a_script_that_resumes_is_tuned_at_every_stage(scripts: Scripts, tmp_path: Path) -> None:
    """Its checkpoint is of no stage at all: it is not loaded."""
    step = folder_of(tmp_path) / "saved" / "global_step5"
    step.mkdir(parents=True)
    step.with_name("latest").write_text(step.name)
    torch.save({"module": {}, "optimizer": {}, "global_steps": 5, "step": 5}, step / "mp_rank_00_model_states.pt")
    found = scripts.probe(command("resumes"), tmp_path)
    assert not found.script.profile.zero_init
    for stage in (0, 3):
        outcome = scripts.measure(found, own_candidate(found.script).but(zero_stage=stage))
        assert outcome.ok, outcome


@pytest.mark.slow
def test_what_stays_the_same_where_rows_change_is_no_batch(scripts: Scripts, tmp_path: Path) -> None:
    note = scripts.probe(command("four_images_and_texts"), folder_of(tmp_path)).script.profile.batch_note
    assert "gave 16 rows a step where 8 were asked for: say which flag" in note


@pytest.mark.slow
def test_a_batch_that_grows_is_left_as_it_is(scripts: Scripts, tmp_path: Path) -> None:
    found = scripts.probe(command("growing_batch"), folder_of(tmp_path))
    assert "change from step to step" in found.script.profile.batch_note
    outcome = scripts.measure(found, own_candidate(found.script).but(zero_stage=2))
    assert outcome.ok, outcome
