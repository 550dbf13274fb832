"""Loops by hand whose training depends on the config in ways that no count of rows shows. The first word names the loop."""

import argparse

import deepspeed
import torch

p = argparse.ArgumentParser()
p.add_argument("way")
p.add_argument("--batch_size", type=int, default=2)
p.add_argument("--gas", type=int, default=2)
p.add_argument("--stage", type=int, default=0)
args = p.parse_args()
deepspeed.init_distributed()
torch.manual_seed(0)
rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
layers = [torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 16)]
if args.way == "dropout":
    layers.insert(2, torch.nn.Dropout(0.2))
model = torch.nn.Sequential(*layers)
data = torch.randn(4096, 16, generator=torch.Generator().manual_seed(1))
config = {
    "train_micro_batch_size_per_gpu": args.batch_size,
    "gradient_accumulation_steps": 1 if args.way == "accumulates" else args.gas,
    "zero_optimization": {"stage": args.stage},
    "zero_allow_untested_optimizer": True,
}
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 1000)
size = engine.train_micro_batch_size_per_gpu()
backwards = 4 if args.way == "accumulates" else 1  # before a step that the config knows to be whole
for at in range(4096 // (size * world)):
    x = data[(at * world + rank) * size :][:size]
    out = engine(x)
    loss = (out - x).square().mean()
    if args.way == "negatives":  # each row is told apart from all others of its micro-batch
        loss = torch.nn.functional.cross_entropy(out @ x.T, torch.arange(len(x)))
    if args.way == "sum":
        loss = loss * size
    engine.backward(loss / backwards)
    if args.way == "clips":
        torch.nn.utils.clip_grad_norm_(engine.module.parameters(), 0.01)
    if (at + 1) % backwards == 0:
        engine.step()
    if args.way == "schedule_of_iterations":
        schedule.step()
