"""A model of one's own, without a training script: what `--workload mine:build` asks for."""

from __future__ import annotations

from collections.abc import Iterator

import torch


class Encoder(torch.nn.Module):
    """Marks that a transformer reads from a spectrogram. The forward returns the loss; DeepSpeed does the rest."""

    def __init__(self, bands: int = 80, width: int = 128, layers: int = 2, marks: int = 64) -> None:
        super().__init__()
        self.into = torch.nn.Linear(bands, width)
        layer = torch.nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, dropout=0.0)
        self.layers = torch.nn.TransformerEncoder(layer, layers)
        self.out = torch.nn.Linear(width, marks)

    def forward(self, sound: torch.Tensor, marks: torch.Tensor) -> torch.Tensor:
        found = self.out(self.layers(self.into(sound)))
        return torch.nn.functional.cross_entropy(found.flatten(0, 1).float(), marks.flatten())


def build():
    """The model, and a function that gives batches of a micro-batch's size: whatever the forward takes, as tuple or dict."""

    def batches(micro_batch: int) -> Iterator[dict[str, torch.Tensor]]:
        while True:
            yield {"sound": torch.randn(micro_batch, 100, 80), "marks": torch.randint(64, (micro_batch, 100))}

    return Encoder(), batches
