"""A small loop, with DeepSpeed by itself or by accelerate's launcher, that writes down how it was started and what it trains."""

import argparse
import json
import os
import sys

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--config")
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--steps", type=int, default=40)
args = parser.parse_args()
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
data = torch.utils.data.TensorDataset(torch.randn(4096, 16), torch.randint(0, 4, (4096,)))


def with_deepspeed() -> tuple:
    import deepspeed

    engine, _, loader, _ = deepspeed.initialize(
        model=net, model_parameters=net.parameters(), training_data=data, config=args.config
    )
    return engine, loader, engine


def with_accelerate() -> tuple:
    from accelerate import Accelerator, PartialState
    from accelerate.utils import DummyOptim

    if not torch.cuda.is_available():
        PartialState(cpu=True)  # as Trainer does: `Accelerator(cpu=True)` leaves DeepSpeed out, accelerate 1.15
    accelerator = Accelerator()
    loader = torch.utils.data.DataLoader(data, batch_size=2)
    # as accelerate's own examples have it
    configured = "optimizer" in accelerator.state.deepspeed_plugin.deepspeed_config
    optimizer = (DummyOptim if configured else torch.optim.AdamW)(net.parameters())
    model, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    return model, loader, (accelerator, optimizer)


by_accelerate = os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"
model, loader, stepper = with_accelerate() if by_accelerate else with_deepspeed()
engine = model
while hasattr(engine, "module") and not hasattr(engine, "zero_optimization_stage"):
    engine = engine.module
if int(os.environ["RANK"]) == 0:
    with open("told.json", "w") as file:
        names = ("WORLD_SIZE", "TORCHELASTIC_RUN_ID", "LOCAL_SIZE", "ACCELERATE_MIXED_PRECISION", "MINE")
        told = {
            "argv": sys.argv[1:],
            "env": {name: os.environ[name] for name in names if name in os.environ},
            "stage": engine.zero_optimization_stage(),
            "micro_batch": engine.train_micro_batch_size_per_gpu(),
            "accumulation": engine.gradient_accumulation_steps(),
        }
        json.dump(told, file)
done = 0
while done < args.steps:
    for x, y in loader:
        if by_accelerate:
            accelerator, optimizer = stepper
            with accelerator.accumulate(model):
                accelerator.backward(torch.nn.functional.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
            done += accelerator.sync_gradients
        else:
            loss = torch.nn.functional.cross_entropy(model(x), y)
            engine.backward(loss)
            boundary = engine.is_gradient_accumulation_boundary()
            engine.step()
            done += boundary
        if done >= args.steps:
            break
