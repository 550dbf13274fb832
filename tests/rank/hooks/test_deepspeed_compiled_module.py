"""A script that compiles its module as one graph keeps that graph, and is still seen."""

import copy

import pytest

from autotune.rank.hooks.deepspeed import watch_module
from tests.rank.hooks.conftest import make_context


@pytest.mark.parametrize("in_place", [True, False])
def test_a_whole_graph_stays_whole(in_place: bool) -> None:
    import torch

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight

    net = Net()
    compiled = net if in_place else torch.compile(net, fullgraph=True, backend="eager")
    if in_place:
        net.compile(fullgraph=True, backend="eager")
    context, watcher = make_context()
    watch_module(context, compiled)
    batch = torch.ones(3, 4)
    assert torch.equal(compiled(batch), net.forward(batch))
    assert watcher.of("rows and tokens") == [[3, 3]]
    compiled.eval()
    compiled(batch)
    assert len(watcher.of("rows and tokens")) == 1, "it trains no more"


def test_a_copy_of_the_module_shares_its_hook() -> None:
    import torch

    net = torch.nn.Identity()
    watch_module(make_context()[0], net)
    assert copy.deepcopy(net)._forward_pre_hooks == net._forward_pre_hooks
