import pytest

from autotune.trial.config import needed_ops, optimizer_section, trial_config
from tests.conftest import make_candidate, make_job


def test_autos_and_trackers_go_and_an_optimizer_comes() -> None:
    base = {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}, "wandb": {"enabled": True}, "gradient_clipping": "auto",
            "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": "auto", "total_num_steps": "auto"}}}  # fmt: skip
    config = trial_config(make_candidate(2), make_job(base_config=base))
    assert config["optimizer"] == {"type": "AdamW", "params": {}}
    assert not {"wandb", "gradient_clipping", "scheduler"} & set(config)
    plain = trial_config(make_candidate(3), make_job())
    assert plain["optimizer"]["type"] == "AdamW"
    assert plain["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] is True


@pytest.mark.parametrize("name", ["adamw", "adam", "fused_adam", "lion", "sgd", "adagrad"])
def test_every_optimizer_has_a_section(name: str) -> None:
    section = optimizer_section(make_job(optimizer=name), make_candidate(2, offload_optimizer="cpu"))
    assert section["params"]["lr"] > 0
    assert "torch_adam" not in section["params"]


def test_ops_that_are_built_before_the_budget() -> None:
    job, offloads = make_job(), [make_candidate(2, offload_optimizer="cpu")]
    assert "CPUAdamBuilder" in needed_ops(offloads, job, "cpu")
    assert "CPUAdamBuilder" not in needed_ops([make_candidate()], job, "cpu")
    assert "CPULionBuilder" in needed_ops(offloads, make_job(optimizer="lion"), "cuda")
    assert "FusedAdamBuilder" in needed_ops([make_candidate()], make_job(optimizer="fused_adam"), "cuda")
    nvme = [make_candidate(3, offload_optimizer="nvme")]
    assert "AsyncIOBuilder" in needed_ops(nvme, job, "cuda")
