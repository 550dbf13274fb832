"""Pretraining whose script cuts the sequences of its loader, to four tokens more in each optimizer step."""

import argparse

import deepspeed
import torch
from torch import nn

LENGTH = 64


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.tokens(ids)).flatten(0, 1), labels.flatten())


parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
parser.add_argument("--local_rank", type=int, default=-1)
args = parser.parse_args()
deepspeed.init_distributed("gloo")
torch.manual_seed(0)
model, rows = Model(), torch.randint(0, 32, (2048, LENGTH + 1))
data = torch.utils.data.TensorDataset(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
engine, _, loader, _ = deepspeed.initialize(
    args=args, model=model, model_parameters=model.parameters(), training_data=data
)
for ids, labels in loader:
    length = min(LENGTH, 4 + 4 * engine.global_steps)
    engine.backward(engine(ids[:, :length], labels[:, :length]))
    engine.step()
