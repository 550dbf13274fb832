import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

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
    made.patches.undo()
    assert "ACCELERATE_USE_DEEPSPEED" not in os.environ
