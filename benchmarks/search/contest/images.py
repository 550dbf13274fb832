"""A convolutional network on images, of torch alone: no transformer, no tokens."""

import argparse

import deepspeed
import torch
import torch.distributed
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--steps", type=int, default=100_000)
deepspeed.add_config_arguments(parser)
arguments = parser.parse_args()


def block(before: int, after: int, stride: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.GroupNorm(8, after), nn.ReLU())


torch.manual_seed(0)
model = nn.Sequential(
    *[block(3, 64, 2), block(64, 128, 2), block(128, 256, 2), block(256, 512, 2)],
    *[nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 1000)],
)
engine, *_ = deepspeed.initialize(args=arguments, model=model, model_parameters=model.parameters())
while engine.global_steps < arguments.steps:
    size = engine.train_micro_batch_size_per_gpu()
    images = torch.randn(size, 3, 64, 64, device=engine.device)
    labels = torch.randint(0, 1000, (size,), device=engine.device)
    engine.backward(nn.functional.cross_entropy(engine(images), labels))
    engine.step()
torch.distributed.destroy_process_group()
