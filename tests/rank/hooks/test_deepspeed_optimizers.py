from collections.abc import Callable

import torch

from autotune.rank.hooks import deepspeed


def steps(count: int) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(count):
        weight.sum().backward()
        optimizer.step()


def test_training_without_deepspeed_is_noticed_at_the_second_step(context: Callable) -> None:
    made, watcher = context()
    deepspeed.install_optimizers(made)
    steps(1)
    assert watcher.seen == []
    steps(1)
    assert watcher.seen == [["strayed"]]


def test_an_engine_may_step_its_optimizers(context: Callable) -> None:
    made, watcher = context()
    deepspeed.install_optimizers(made)
    made.engine = object()
    steps(3)
    assert watcher.seen == []


class DeepSpeedCPUAdam(torch.optim.AdamW):
    __module__ = "deepspeed.ops.adam.cpu_adam"


class Mine(DeepSpeedCPUAdam):
    pass


def test_the_class_of_an_optimizer_is_that_of_its_kernels(context: Callable) -> None:
    made, _ = context()
    weights = [torch.nn.Parameter(torch.ones(2))]
    assert deepspeed.kind_of(made, Mine(weights)) == "DeepSpeedCPUAdam"
    assert deepspeed.kind_of(made, torch.optim.AdamW(weights)) == ""
    assert deepspeed.kind_of(made, None) == ""
    made.accelerated = True
    assert deepspeed.kind_of(made, Mine(weights)) == "", "accelerate makes it of any where the script's config offloads"


class Derived(torch.optim.AdamW):
    pass


def test_how_torchs_own_step_is_what_they_were_made_with() -> None:
    weights = [torch.nn.Parameter(torch.ones(2))]
    told = deepspeed.torchs_of(torch.optim.AdamW(weights, fused=True))
    assert told == {"class": "AdamW", "fused": True, "foreach": None}
    assert deepspeed.torchs_of(torch.optim.SGD(weights, foreach=False))["foreach"] is False
    for other in (Derived(weights), DeepSpeedCPUAdam(weights), None):
        assert deepspeed.torchs_of(other) == {}, "it may step in a way of its own"
