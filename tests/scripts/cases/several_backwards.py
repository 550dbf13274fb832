"""Accumulate by hand: the config has accumulation 1, and the loop has four backwards and one step."""

import argparse

import deepspeed
import torch

parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
parser.add_argument("--local_rank", type=int, default=0)
args = parser.parse_args()
deepspeed.init_distributed()
model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.Tanh(), torch.nn.Linear(512, 64))
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
for _ in range(400):
    for _ in range(4):
        x = torch.randn(4, 64)
        engine.backward((engine(x) - x).pow(2).mean() / 4)
    engine.step()
