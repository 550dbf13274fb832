"""Small rebuilds of public training scripts, a few lines each: `public.py WAY its arguments`.

docs/script-details.md names the source of each. Models and data are made up; loops, parsers and configs have the structure
of the source.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import deepspeed
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

WIDTH = 16
ZERO = {"reduce_bucket_size": 500_000, "allgather_bucket_size": 500_000}
ADAM = {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}}
STEPS = 200


def net(width: int = WIDTH, seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(width, 64), torch.nn.Tanh(), torch.nn.Linear(64, width))


def rows(count: int = 16384) -> torch.Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(1))


def loader(batch_size: int, **how: Any) -> DataLoader[torch.Tensor]:
    data: Any = rows()
    return DataLoader(data, batch_size, sampler=DistributedSampler(data, shuffle=False), drop_last=True, **how)


def engine_of(
    module: torch.nn.Module, micro_batch: int | None, accumulation: int | None, stage: int, **more: Any
) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": {"stage": stage, **ZERO},
        "optimizer": ADAM,
        "zero_allow_untested_optimizer": True,
        **more,
    }
    config = {key: value for key, value in config.items() if value is not None}
    return deepspeed.initialize(model=module, model_parameters=module.parameters(), config=config)[0]


def train(engine: Any, batches: Any, loss_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    for x in batches:
        engine.backward(loss_of(engine(x), x))
        engine.step()
        if engine.global_steps >= STEPS:
            break


def squared(out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (out - x).square().mean()


def integers(words: list[str], **defaults: int) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for name, value in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--local_rank", type=int, default=-1)
    return parser.parse_args(words)


def minrf(words: list[str]) -> None:
    """Options by click, the whole batch and a rank's beside each other, an exponential average of the weights."""
    import click

    @click.command()
    @click.option("--local_rank", default=-1)
    @click.option("--train_batch_size", default=32)
    @click.option("--per_device_train_batch_size", default=4)
    @click.option("--zero_stage", default=2)
    def main(local_rank: int, train_batch_size: int, per_device_train_batch_size: int, zero_stage: int) -> None:
        module = net()
        engine = engine_of(
            module,
            per_device_train_batch_size,
            None,
            zero_stage,
            train_batch_size=train_batch_size,
            gradient_clipping=0.3,
        )
        average = [p.detach().clone() for p in module.parameters()]
        for step, x in enumerate(loader(per_device_train_batch_size)):
            noise = torch.randn_like(x)
            engine.backward(squared(engine((x + noise) / 2), noise - x))
            engine.step()
            if step % 8 == 0:
                for kept, p in zip(average, module.parameters(), strict=True):
                    kept.lerp_(p.detach(), 0.01)

    main(words, standalone_mode=False)


def latent_diffusion(words: list[str]) -> None:
    """A generator that encodes batches with a frozen model; half of the conditions are dropped by `random`."""
    import random

    args = integers(words, batch_size=8, ga_steps=2)
    encoder = net(seed=1).requires_grad_(False)

    def latents() -> Iterator[torch.Tensor]:
        for x in loader(args.batch_size):
            emb = encoder(x)
            for row in emb:
                if random.randint(0, 100) < 20:
                    row.zero_()
            yield emb

    train(engine_of(net(), args.batch_size, args.ga_steps, 1), latents(), squared)


def controlnet(words: list[str]) -> None:
    """accelerate with a YAML of its own, whose batch size lies three levels deep; a frozen model beside the trained."""
    import yaml
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin

    parser = argparse.ArgumentParser()
    parser.add_argument("--cfg_path", required=True)
    args = parser.parse_args(words)
    with open(args.cfg_path) as file:
        cfg = yaml.safe_load(file)
    size, steps = cfg["dataset"]["train"]["kwargs"]["batch_size"], cfg["accelerate"]["accumulation"]
    plugin = {"zero_optimization": {"stage": 1, **ZERO}, "train_micro_batch_size_per_gpu": size}
    plugin |= {"gradient_accumulation_steps": steps, "zero_allow_untested_optimizer": True}
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=plugin))
    frozen, trained = net(seed=1).requires_grad_(False), net()
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-3)
    data: Any = rows()
    model, optimizer, batches = accelerator.prepare(trained, optimizer, DataLoader(data, size))
    for x in batches:
        with accelerator.accumulate(model):
            accelerator.backward(squared(frozen(model(x)), x))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 5)
            optimizer.step()
            optimizer.zero_grad()


def cifar_moe(words: list[str]) -> None:
    """A mixture of experts; parameters in groups that DeepSpeed splits by expert."""
    from deepspeed.moe.layer import MoE
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    args = integers(words, batch_size=4)
    deepspeed.init_distributed()

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.moe = MoE(WIDTH, torch.nn.Linear(WIDTH, WIDTH), num_experts=2, ep_size=1, k=1, min_capacity=0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.moe(x)[0]

    module = Net()
    groups = split_params_into_different_moe_groups_for_optimizer({"params": list(module.parameters()), "name": "all"})
    config = {"train_micro_batch_size_per_gpu": args.batch_size, "zero_optimization": {"stage": 1, **ZERO}}
    config |= {"optimizer": ADAM, "gradient_accumulation_steps": 2}
    engine = deepspeed.initialize(model=module, model_parameters=groups, config=config)[0]
    train(engine, loader(args.batch_size), squared)


def surgery(words: list[str]) -> None:
    """Two tasks, whose gradients at the shared output are projected when they conflict (PCGrad)."""
    args = integers(words, bs=4)

    class Shared(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk = net()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = self.trunk(x)
            leaf = out.detach().requires_grad_()
            one, other = (torch.autograd.grad(task, leaf)[0] for task in (squared(leaf, x), (leaf + x).abs().mean()))
            dot = (one * other).sum(dim=1, keepdim=True).clamp(max=0)
            return (out * (one - dot / other.square().sum(dim=1, keepdim=True) * other + other)).sum()

    engine = engine_of(Shared(), args.bs, 2, 0)
    train(engine, loader(args.bs), lambda loss, x: loss)


def webdataset(words: list[str]) -> None:
    """Shards without a length, read by worker processes; it prints nothing and leaves through `sys.exit`."""
    args = integers(words, batch_size=4, accum_freq=2)

    class Shards(IterableDataset[torch.Tensor]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            generator = torch.Generator().manual_seed(rank)
            while True:
                yield torch.randn(WIDTH, generator=generator)

    engine = engine_of(net(), args.batch_size, args.accum_freq, 2)
    rank = torch.distributed.get_rank()
    train(engine, DataLoader(Shards(), args.batch_size, num_workers=1), squared)
    sys.exit(0)


def imagenet(words: list[str]) -> None:
    """`--batch-size` is that of all GPUs together."""
    parser = argparse.ArgumentParser()
    parser.add_argument("-b", "--batch-size", type=int, default=16)
    parser.add_argument("--iter-size", type=int, default=2)
    args = parser.parse_args(words)
    deepspeed.init_distributed()
    size = args.batch_size // torch.distributed.get_world_size()
    train(engine_of(net(), size, args.iter_size, 1), loader(size), squared)


def rlhf(words: list[str]) -> None:
    """The whole batch and the micro-batch are flags; the accumulation is computed."""
    args = integers(words, train_batch_size=32, micro_train_batch_size=2)
    engine = engine_of(net(), args.micro_train_batch_size, None, 2, train_batch_size=args.train_batch_size)
    train(engine, loader(args.micro_train_batch_size), squared)


def tokens(words: list[str]) -> None:
    """`--max_tokens` of a batch of equally long rows."""
    args = integers(words, max_tokens=64, update_freq=2)
    size = args.max_tokens // 8

    class Embedding(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embed, self.head = torch.nn.Embedding(64, WIDTH), torch.nn.Linear(WIDTH, 64)

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.cross_entropy(
                self.head(self.embed(input_ids)).flatten(0, 1), input_ids.flatten()
            )

    engine = engine_of(Embedding(), size, args.update_freq, 1)
    rank = torch.distributed.get_rank()
    texts = torch.randint(0, 64, (65536, 8), generator=torch.Generator().manual_seed(1))
    train(engine, (texts[(2 * at + rank) * size :][:size] for at in range(2000)), lambda loss, ids: loss)


def scaled_by_hand(words: list[str]) -> None:
    """A loss scale and its inverse on the gradients are the script's own, as is the clipping."""
    args = integers(words, batch_size=8)
    module = net()
    engine = engine_of(module, args.batch_size, 2, 0)
    for x in loader(args.batch_size):
        engine.backward(squared(engine(x), x) * 1024)
        if engine.is_gradient_accumulation_boundary():
            for p in module.parameters():
                if p.grad is not None:
                    p.grad /= 1024
            torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        engine.step()


def muon(words: list[str]) -> None:
    """Momentum orthogonalized for each matrix, rows drawn at random offsets, learning rate set in each step."""
    args = integers(words, device_batch_size=4, batch_size=16)
    accumulation = args.batch_size // args.device_batch_size // int(os.environ["WORLD_SIZE"])

    class Muon(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for p in group["params"]:
                    kept = self.state[p].setdefault("momentum", torch.zeros_like(p)).mul_(0.95).add_(p.grad)
                    change = torch.linalg.svd(kept, full_matrices=False) if p.dim() == 2 else None
                    p.add_(change[0] @ change[2] if change else kept, alpha=-group["lr"])

    module, data = net(), rows()
    engine = deepspeed.initialize(
        model=module,
        optimizer=Muon(module.parameters(), {"lr": 0.02}),
        config={
            "train_micro_batch_size_per_gpu": args.device_batch_size,
            "gradient_accumulation_steps": accumulation,
            "zero_optimization": {"stage": 0, **ZERO},
            "zero_allow_untested_optimizer": True,
        },
    )[0]
    for step in range(STEPS):
        for group in engine.optimizer.param_groups:
            group["lr"] = 0.02 * (1 - step / STEPS)
        for _ in range(accumulation):
            x = data[torch.randint(len(data), (args.device_batch_size,))]
            engine.backward(squared(engine(x), x))
            engine.step()


def own_generators(words: list[str]) -> None:
    """Noise from a seeded generator of the script's own, rows from one without a seed."""
    import secrets

    args = integers(words, bs=3, ga=4)
    engine = engine_of(net(), args.bs, args.ga, 1)
    noise, data = torch.Generator().manual_seed(7), rows()
    order = torch.Generator().manual_seed(secrets.randbits(32))
    while engine.global_steps < STEPS:
        x = data[torch.randint(len(data), (args.bs,), generator=order)]
        target = torch.randn(x.shape, generator=noise)
        engine.backward(squared(engine((x + target) / 2), target - x))
        engine.step()


WAYS = {
    way.__name__: way
    for way in (
        *(minrf, latent_diffusion, controlnet, cifar_moe, surgery, webdataset, imagenet),
        *(rlhf, tokens, scaled_by_hand, muon, own_generators),
    )
}


def run(ways: dict[str, Callable[[list[str]], None]]) -> None:
    """Run the way that the command names; DeepSpeed's launcher puts `--local_rank` before it."""
    at = next(at for at, word in enumerate(sys.argv) if word in ways)
    ways[sys.argv[at]]([*sys.argv[1:at], *sys.argv[at + 1 :]])


if __name__ == "__main__":
    run(WAYS)
