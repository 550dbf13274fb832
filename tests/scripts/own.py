"""A workload of one's own: a model that transformers does not know, and where its batches come from."""

import torch


class Regressor(torch.nn.Module):
    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(32, width), torch.nn.GELU(), torch.nn.Linear(width, 1))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return ((self.layers(x) - y) ** 2).mean()


def build():
    def batches(micro_batch: int):
        for _ in range(4):
            yield torch.randn(micro_batch, 32), torch.randn(micro_batch, 1)

    return Regressor(), batches


def wrong():
    return Regressor()
