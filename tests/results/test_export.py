import json
from pathlib import Path

import pytest
import yaml

from autotune.results.export import (
    accelerate_config,
    deepspeed_config,
    hf_deepspeed_config,
    needs,
    training_arguments,
    write_atomically,
    write_export,
)
from tests.conftest import make_candidate, make_job

OWN = {
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95]}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage3_prefetch_bucket_size": 123},
}


def test_the_users_own_config_is_kept_and_nothing_is_invented() -> None:
    bare = deepspeed_config(make_candidate(2, 4, 2), make_job())
    assert "optimizer" not in bare
    assert "scheduler" not in bare
    assert bare["train_batch_size"] == 4 * 2 * 2
    config = deepspeed_config(make_candidate(3, 4, 2), make_job(base_config=OWN))
    assert config["optimizer"] == OWN["optimizer"]
    assert config["scheduler"] == OWN["scheduler"]
    assert config["gradient_clipping"] == 1.0
    assert config["zero_optimization"]["stage3_prefetch_bucket_size"] == 123
    assert config["zero_optimization"]["stage"] == 3


def test_hugging_face_gets_auto_where_it_insists() -> None:
    config = hf_deepspeed_config(make_candidate(2, 4, 2), make_job(base_config=OWN, precision="bf16"))
    for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        assert config[key] == "auto"
    assert config["optimizer"]["params"]["lr"] == "auto"
    assert config["scheduler"]["params"] == {"warmup_num_steps": "auto"}
    assert config["bf16"]["enabled"] == "auto"
    arguments = training_arguments(make_candidate(2, 4, 2, activation_checkpointing=True), make_job(), "cpu")
    assert arguments["per_device_train_batch_size"] == 4
    assert arguments["gradient_accumulation_steps"] == 2
    assert arguments["gradient_checkpointing_kwargs"] == {"use_reentrant": False}
    assert arguments["use_cpu"] is True
    assert "learning_rate" not in arguments


def test_accelerate_points_at_the_config() -> None:
    data = accelerate_config(make_candidate(3), make_job(), "x.json")
    assert data["deepspeed_config"] == {"deepspeed_config_file": "x.json", "zero3_init_flag": True}
    assert data["num_processes"] == 2


def test_what_a_config_cannot_carry_is_said() -> None:
    lines = needs(make_candidate(2, offload_optimizer="cpu", activation_checkpointing=True), make_job())
    assert any("gradient_checkpointing_enable" in line for line in lines)
    assert any("DeepSpeedCPUAdam" in line for line in lines)
    assert not needs(make_candidate(0), make_job(base_config=OWN))
    made = needs(make_candidate(0, attention="sdpa", compile=True), make_job(base_config=OWN))
    assert "attn_implementation='sdpa'" in made[0]
    assert "engine.compile()" in made[1]
    assert "compiled" not in " ".join(needs(make_candidate(0, compile=False), make_job(base_config=OWN, compiled=True)))


@pytest.mark.parametrize("style", ["deepspeed", "accelerate", "hf"])
def test_files_are_whole_and_meta_stands_beside(tmp_path: Path, style: str) -> None:
    out = tmp_path / ("w.yaml" if style == "accelerate" else "w.json")
    files = write_export(make_candidate(2), make_job(), out, {"study": "s"}, style=style)
    assert all(path.exists() for path in files)
    meta = next(path for path in files if path.name.endswith(".meta.json"))
    assert json.loads(meta.read_text())["study"] == "s"
    main = next(path for path in files if path == out)
    assert (yaml.safe_load if style == "accelerate" else json.loads)(main.read_text())


def test_a_failed_write_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "a.json"
    write_atomically(target, "old")
    monkeypatch.setattr("os.replace", lambda *a: (_ for _ in ()).throw(OSError("no")))
    with pytest.raises(OSError, match="no"):
        write_atomically(target, "new")
    assert target.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
