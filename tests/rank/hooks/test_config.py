import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from autotune.problem.job import ScriptProfile
from autotune.rank.hooks.config import announce_to_accelerate, merged, merged_arguments
from tests.conftest import make_candidate

OWN = {"train_batch_size": 4, "zero_optimization": {"stage": 1}, "gradient_clipping": 1.0, "wandb": {"enabled": True}}


def test_a_candidates_keys_are_merged(context: Callable) -> None:
    made, watcher = context(make_candidate(2, 3, 5))
    made.job = replace(made.job, base_config={"gradient_clipping": 9.0, "steps_per_print": 7})
    found = merged(made, OWN)
    assert found["zero_optimization"]["stage"] == 2
    assert (found["train_batch_size"], found["train_micro_batch_size_per_gpu"]) == (15, 3)
    assert (found["gradient_clipping"], found["steps_per_print"]) == (1.0, 7), "the job's keys where it has none"
    assert "wandb" not in found
    assert OWN["zero_optimization"] == {"stage": 1}, "the script's own is left as it is"
    merged(made, {})
    assert watcher.seen == [["configured", OWN]], "its first, once"


def test_what_was_taken_out_of_a_config_since_its_first_run_stays_out(context: Callable) -> None:
    first = {**OWN, "scheduler": {"type": "WarmupLR"}, "steps_per_print": 3}
    made, _ = context(make_candidate(2, 3, 5), quiet=False, profile=ScriptProfile(config=first))
    added = {"zero_allow_untested_optimizer": True}
    made.job = replace(made.job, base_config={**first, **added})
    found = merged(made, {"zero_optimization": {"stage": 1}, "steps_per_print": 9})
    assert not {"scheduler", "gradient_clipping", "wandb"} & found.keys()
    assert (found["steps_per_print"], found["zero_allow_untested_optimizer"]) == (9, True), "autotune's own is added"
    assert (found["zero_optimization"]["stage"], found["train_batch_size"]) == (2, 15)


@pytest.mark.parametrize(
    ("first", "now", "bf16", "fp16"),
    [
        ({"bf16": {"enabled": True}}, {"bf16": {"enabled": True}}, True, None),
        ({"bf16": {"enabled": True}}, {"fp16": {"enabled": True, "loss_scale": 0}}, None, True),
        ({"bf16": {"enabled": True}}, {"bf16": {"enabled": False}}, False, None),
        ({"bf16": {"enabled": True}}, {}, None, None),
        ({"bf16": {"enabled": True}}, {"bf16": {"enabled": "auto"}}, True, None),
        ({"bf16": {"enabled": "auto"}}, {}, True, None),  # as the command's flags say, in the first run and now
    ],
)
def test_the_precision_is_that_of_the_present_config(
    context: Callable, first: dict, now: dict, bf16: bool | None, fp16: bool | None
) -> None:
    made, _ = context(make_candidate(2, 3, 5), profile=ScriptProfile(config=first))
    made.job = replace(made.job, precision="bf16", base_config=first)
    found = merged(made, {**OWN, **now})
    assert (found.get("bf16", {}).get("enabled"), found.get("fp16", {}).get("enabled")) == (bf16, fp16)
    assert merged(made, found) == found, "what is merged once more is what it was"


def test_a_script_as_it_is_loses_its_trackers_alone(context: Callable) -> None:
    made, _ = context()
    assert merged(made, OWN) == {key: value for key, value in OWN.items() if key != "wandb"}


def test_a_real_training_keeps_its_trackers(context: Callable) -> None:
    made, _ = context(make_candidate(2, 3, 5), quiet=False)
    assert merged(made, OWN)["wandb"] == {"enabled": True}


def test_arguments_name_merged_files(context: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RANK", "1")
    text = f"// with a comment\n{json.dumps(OWN)}"
    (tmp_path / "ds.json").write_text(text)
    argv = ("train.py", "--deepspeed", "ds.json", "--batch", "1", "--lr=3")
    made, _ = context(make_candidate(2, 3, 5), argv=argv, flags=(("train_micro_batch_size_per_gpu", "--batch"),))
    flag, path, *rest = merged_arguments(made)
    assert (flag, rest) == ("--deepspeed", ["--batch", "3", "--lr=3"])
    assert Path(path).parent == tmp_path
    assert "rank1" in Path(path).name, "every rank writes its own"
    assert json.loads(Path(path).read_text())["zero_optimization"]["stage"] == 2
    assert (tmp_path / "ds.json").read_text() == text
    plain, _ = context(argv=argv)
    assert merged_arguments(plain) == list(argv[1:])


def test_of_several_files_the_first_engines_is_merged(
    context: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RANK", "0")
    (tmp_path / "actor.json").write_text(json.dumps(OWN))
    (tmp_path / "critic.json").write_text(json.dumps({**OWN, "zero_optimization": {"stage": 2}}))
    argv = ("train.py", "--critic=critic.json", "--actor=actor.json", "--again", "actor.json")
    made, _ = context(make_candidate(3, 3, 5), argv=argv, cwd=str(tmp_path), profile=ScriptProfile(config=OWN))
    critic, actor, _, again = merged_arguments(made)
    assert critic == "--critic=critic.json"
    for path in (actor.removeprefix("--actor="), again):
        assert json.loads(Path(path).read_text())["zero_optimization"]["stage"] == 3
    elsewhere, _ = context(make_candidate(3, 3, 5), argv=argv, cwd=str(tmp_path), profile=ScriptProfile(config={}))
    assert merged_arguments(elsewhere) == list(argv[1:]), (
        "the script changes what it reads: its engine is given the keys"
    )


def test_a_batch_that_is_held_is_the_scripts_own(context: Callable, tmp_path: Path) -> None:
    flags = (("train_micro_batch_size_per_gpu", "--batch"),)
    held = {"argv": ("train.py", "--batch", "1"), "flags": flags, "profile": ScriptProfile(batch_note="it has its own")}
    made, _ = context(make_candidate(2, 3, 5), **held)
    assert merged(made, OWN)["train_batch_size"] == 4
    assert "train_micro_batch_size_per_gpu" not in merged(made, OWN)
    assert merged(made, OWN)["zero_optimization"]["stage"] == 2
    assert merged_arguments(made) == ["--batch", "1"]
    assert made.batch is None
    assert context(make_candidate(2, 3, 5))[0].batch == (3, 5)


@pytest.mark.parametrize("path", ["/some/ds.json", None])
def test_a_config_beside_the_script_is_announced(
    context: Callable, monkeypatch: pytest.MonkeyPatch, path: str | None
) -> None:
    monkeypatch.delenv("ACCELERATE_USE_DEEPSPEED", raising=False)
    monkeypatch.delenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", raising=False)
    made, _ = context(ds_config=path)
    announce_to_accelerate(made)
    assert os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE") == path
    assert ("ACCELERATE_USE_DEEPSPEED" in os.environ) == (path is not None)
    made.patches.close()
    assert "ACCELERATE_USE_DEEPSPEED" not in os.environ
