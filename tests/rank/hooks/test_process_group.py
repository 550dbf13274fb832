from collections.abc import Callable
from typing import Any

import pytest

from autotune.rank.hooks import process_group
from tests.rank.hooks.conftest import make_context


def join_again() -> list[str]:
    """What a script's own `init_process_group`, for two ranks at a port, comes to: without the hook and with it."""
    import torch.distributed
    from torch.distributed import distributed_c10d

    def try_to_join(module: Any) -> str:
        try:
            module.init_process_group("gloo", init_method="tcp://127.0.0.1:1", rank=0, world_size=2)
        except ValueError as error:
            return str(error)
        return f"{torch.distributed.get_world_size()} rank"

    found = [try_to_join(torch.distributed)]
    context, _ = make_context(quiet=False)
    process_group.install(context)
    found += [try_to_join(torch.distributed), try_to_join(distributed_c10d)]
    torch.distributed.destroy_process_group()
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    return [*found, f"{torch.distributed.get_world_size()} rank"]


def leave(quiet: bool) -> list[bool]:
    """Whether the rank's group is there after the script has ended one of its own, and then the rank's."""
    import torch.distributed

    context, _ = make_context(quiet=quiet)
    process_group.install(context)
    own = torch.distributed.new_group([0])
    torch.distributed.destroy_process_group(own)
    found = [torch.distributed.is_initialized()]
    torch.distributed.destroy_process_group(group=None)
    return [*found, torch.distributed.is_initialized()]


def leave_a_measurement() -> list[bool]:
    return leave(quiet=True)


def leave_a_training() -> list[bool]:
    return leave(quiet=False)


def join_late() -> list[Any]:
    """Return the calls of the rank's `join` around calls of a script that has no group yet."""
    import deepspeed
    import torch.distributed

    torch.distributed.destroy_process_group()
    calls: list[str] = []

    def join(backend: str) -> None:
        calls.append(backend)
        assert not torch.distributed.is_initialized()
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        deepspeed.init_distributed(dist_backend="gloo", verbose=False)

    context, _ = make_context(quiet=False)
    context.join = join
    process_group.install(context)
    found: list[Any] = [torch.distributed.is_initialized(), len(calls)]
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl", init_method="tcp://127.0.0.1:1", rank=0, world_size=2)
    deepspeed.init_distributed()
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    return [*found, calls, torch.distributed.get_world_size(), mesh.size()]


def test_the_rank_joins_its_group_when_the_script_creates_one(in_rank: Callable[..., Any]) -> None:
    assert in_rank(join_late) == [False, 0, ["cpu:gloo,cuda:nccl"], 1, 1]


@pytest.mark.slow
def test_a_script_that_ends_the_group_at_its_end_is_still_measured(in_rank: Callable[..., Any]) -> None:
    assert in_rank(leave_a_measurement) == [True, True]
    assert in_rank(leave_a_training) == [True, False]


def test_the_scripts_group_is_the_ranks(in_rank: Callable[..., Any]) -> None:
    refused, *joined = in_rank(join_again)
    assert "twice" in refused, "torch's own"
    assert joined == ["1 rank", "1 rank", "1 rank"]
