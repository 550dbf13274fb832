"""However a training loop is written: the sequences of its steps are found, or it is left as it is with a reason."""

import json
from pathlib import Path

import pytest

from autotune.errors import UserError
from autotune.problem.candidate import ACCUMULATION, MICRO_BATCH
from autotune.problem.outcome import Kind, Source
from autotune.problem.script_job import own_candidate
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
    "accumulation_by_hand": ("rows", 3),
    "two_forwards": ("rows", 2),
    "several_losses": ("rows", 1),
    "several_losses --loss": ("rows", 1),
    "tuple_output": ("rows", 1),
    "objects": ("rows", 1),
    "flattened": ("sequences", 1),
    "packed": ("rows", 1),
    "iterable_dataset": ("rows", 1),
    "generator": ("rows", 1),
    "own_sampler": ("rows", 1),
    "loader_before": ("rows", 1),
    "deepspeed_io": ("rows", 1),
    "smaller_last_batch": ("rows", 1),
    "curriculum": ("rows", 1),
    "evaluation_between": ("rows", 1),
    "evaluation_mode": ("rows", 1),
    "never_back_in_training": ("rows", 1),
    "evaluation_with_gradients": ("rows", 1),
    "all_in_the_config": ("rows", 1),
    "reference_without_gradients": ("rows", 1),
    "compiled": ("rows", 1),
    "compiled_in_place": ("rows", 1),
    "past_the_engine": ("rows", 1),
    "unlike_lengths": ("rows", 1),
    "queries_and_documents": ("rows", 4),
    "features": ("rows", 1),
    "boundary_by_hand": ("rows", 1),
    "two_engines": ("rows", 1),
}
# The sequences that a micro-batch of it has, and what is said.
LEFT = {
    "constant_batch": (4, "gave 16 rows a step where 8 were asked for"),
    "loss_backward_of_its_own_batch": (2, "gave 8 rows a step where 4 were asked for"),
    "from_yaml": (3, "a step where"),
    "from_a_setting batch=6": (6, "gave 24 rows a step where 12 were asked for"),
    "time_first": (4, "gave 32 rows a step where 16 were asked for"),
    "plain_lists": (4, "cannot be counted"),
    "errors_are_printed": (4, "gave 16 rows a step where 8 were asked for"),
    "errors_are_skipped": (4, "gave 16 rows a step where 8 were asked for"),
    "errors_are_exits": (4, "gave 16 rows a step where 8 were asked for"),
}


def folder_of(tmp_path: Path) -> Path:
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    (tmp_path / "train.yaml").write_text("batch: 3\n")
    return tmp_path


def command(way: str) -> list[str]:
    return [str(SCRIPTS / "ways.py"), *way.split(), "--deepspeed_config", "ds.json"]


@pytest.mark.slow
@pytest.mark.parametrize("way", OBEY)
def test_the_sequences_of_a_step_are_found(scripts: Scripts, tmp_path: Path, way: str) -> None:
    found = scripts.probe(command(way), folder_of(tmp_path))
    profile = found.script.profile
    assert profile["batch_note"] == ""
    assert (profile["counted"], profile["rows_per_sample"]) == OBEY[way]
    assert (profile["micro_batch"], profile["accumulation"]) == (4, 2)
    other = own_candidate(found.script).but(**{MICRO_BATCH: 8, ACCUMULATION: 1})
    outcome = scripts.measure(found, other)
    assert outcome.ok, outcome


@pytest.mark.slow
@pytest.mark.parametrize("way", LEFT)
def test_a_batch_that_cannot_be_changed_is_left(scripts: Scripts, tmp_path: Path, way: str) -> None:
    micro_batch, note = LEFT[way]
    found = scripts.probe(command(way), folder_of(tmp_path))
    profile = found.script.profile
    assert note in profile["batch_note"]
    assert profile["batch_note"]
    assert (profile["micro_batch"], profile["accumulation"]) == (micro_batch, 2)
    own = own_candidate(found.script)
    assert scripts.measure(found, own.but(reduce_bucket_size=200_000)).ok
    told = scripts.measure(found, own.but(**{MICRO_BATCH: 2 * micro_batch, ACCUMULATION: 1}))
    assert (told.kind, told.source) == (Kind.INVALID, Source.BATCH), "measured on another batch than it was told"


def test_a_script_that_fails_at_another_batch_keeps_its_own(scripts: Scripts, tmp_path: Path) -> None:
    found = scripts.probe(command("refuses_other_batches"), folder_of(tmp_path))
    assert "told another batch (" in found.script.profile["batch_note"]
    assert "made for four" in found.script.profile["batch_note"]
    assert scripts.measure(found, own_candidate(found.script).but(reduce_bucket_size=200_000)).ok


def test_a_batch_that_leaves_too_few_steps_is_only_that_candidates(scripts: Scripts, tmp_path: Path) -> None:
    found = scripts.probe(command("one_epoch"), folder_of(tmp_path))
    assert found.script.profile["batch_note"] == ""
    own = own_candidate(found.script)
    outcome = scripts.measure(found, own.but(**{MICRO_BATCH: 64, ACCUMULATION: 1}))
    assert (outcome.kind, outcome.source) == (Kind.INVALID, Source.STEPS)
    assert "ended after 3 optimizer steps" in outcome.reason
    assert scripts.measure(found, own.but(**{MICRO_BATCH: 8, ACCUMULATION: 1})).ok


def test_a_batch_that_grows_is_refused(scripts: Scripts, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="batch changes from step to step"):
        scripts.probe(command("growing_batch"), folder_of(tmp_path))
