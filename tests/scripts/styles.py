"""More styles of training scripts, a few lines each: `styles.py WAY its arguments`, in a folder with `public.py`.

`benchmarks/training/winners.py` tunes each and trains its winner without autotune.
"""

import itertools
import sys
from ast import literal_eval
from collections.abc import Iterator
from typing import Any

import deepspeed
import torch
from public import STEPS, WIDTH, engine_of, integers, loader, net, rows, run, squared, train
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset


def tokens_weighted(words: list[str]) -> None:
    """A loss summed over tokens, which the script divides by the tokens of the whole step on all ranks."""
    args = integers(words, micro_bs=2, grad_acc=4)
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Embedding(40, 24), torch.nn.Linear(24, 24), torch.nn.Linear(24, 40))
    engine = engine_of(module, args.micro_bs, args.grad_acc, 2)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 40, (8192, 16), generator=generator)
    ids[torch.arange(16)[None] >= torch.randint(4, 17, (8192, 1), generator=generator)] = 0
    data: Any = ids
    batches = iter(DataLoader(data, args.micro_bs, sampler=DistributedSampler(data, shuffle=False), drop_last=True))
    while len(micros := list(itertools.islice(batches, args.grad_acc))) == args.grad_acc:
        total = torch.tensor(float(sum((one[:, 1:] != 0).sum() for one in micros)))
        torch.distributed.all_reduce(total)
        for one in micros:
            told = engine(one)[:, :-1].flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(told, one[:, 1:].flatten(), ignore_index=0, reduction="sum")
            engine.backward(loss / total * torch.distributed.get_world_size() * args.grad_acc)
            engine.step()


def schedule_in_loop(words: list[str]) -> None:
    """torch's optimizer with two groups, whose schedule the loop advances after each optimizer step; dropout."""
    args = integers(words, per_gpu_batch=2, accumulation=4)
    module = torch.nn.Sequential(net(), torch.nn.Dropout(0.1), torch.nn.Linear(WIDTH, WIDTH))
    matrices, others = ([p for p in module.parameters() if (p.dim() > 1) is wide] for wide in (True, False))
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": others, "weight_decay": 0.0}], lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    config = {"train_micro_batch_size_per_gpu": args.per_gpu_batch, "gradient_accumulation_steps": args.accumulation}
    config |= {"zero_optimization": {"stage": 1, "reduce_bucket_size": 500_000}, "zero_allow_untested_optimizer": True}
    engine = deepspeed.initialize(model=module, optimizer=optimizer, config=config)[0]
    for x in loader(args.per_gpu_batch):
        engine.backward(squared(engine(x), x))
        ends = engine.is_gradient_accumulation_boundary()
        engine.step()
        if ends:
            schedule.step()


# nanoGPT's way: names of the module, which words `--name=value` replace.
batch_size = 6
gradient_accumulation_steps = 8
learning_rate = 1e-3


def nanogpt(words: list[str]) -> None:
    """Names of the module set by `--name=value`; rows drawn at random; the accumulation divided by the ranks."""
    for word in words:
        name, _, value = word.removeprefix("--").partition("=")
        globals()[name] = literal_eval(value)
    deepspeed.init_distributed()
    world = torch.distributed.get_world_size()
    accumulation = gradient_accumulation_steps // world
    engine = engine_of(net(), batch_size, accumulation, 1, gradient_clipping=1.0)
    torch.manual_seed(1337 + torch.distributed.get_rank())
    data = rows()
    while engine.global_steps < STEPS:
        for micro in range(accumulation):
            engine.set_gradient_accumulation_boundary(micro == accumulation - 1)
            x = data[torch.randint(len(data), (batch_size,))]
            engine.backward(squared(engine(x), x))
            engine.step()


def accumulates(words: list[str]) -> None:
    """Gradients summed by the loop itself, in an engine without accumulation."""
    args = integers(words, batch_size=2, accumulate=4)
    engine = engine_of(net(), args.batch_size, 1, 0)
    for at, x in enumerate(loader(args.batch_size), 1):
        engine.backward(squared(engine(x), x) / args.accumulate)
        if at % args.accumulate == 0:
            engine.step()


def cut_by_loop(words: list[str]) -> None:
    """A loader of whole steps, which the loop cuts into parts of its own size."""
    args = integers(words, total_batch=16, chunk=4)
    engine = engine_of(net(), args.total_batch, 1, 0, gradient_clipping=1.0)
    for x in loader(args.total_batch):
        for part in x.split(args.chunk):
            engine.backward(squared(engine(part), part) * len(part) / len(x))
        engine.step()


def gradient_penalty(words: list[str]) -> None:
    """A penalty on the gradient of the output by its input, which takes a second backward."""
    args = integers(words, bs=4, ga=2)
    engine = engine_of(net(), args.bs, args.ga, 1)

    def penalized(x: torch.Tensor) -> torch.Tensor:
        leaf = x.clone().requires_grad_()
        out = engine(leaf)
        (slope,) = torch.autograd.grad(out.square().mean(dim=1).sum(), leaf, create_graph=True)
        return squared(out, x) + 0.1 * slope.square().sum(dim=1).mean()

    for x in loader(args.bs):
        engine.backward(penalized(x))
        engine.step()


def multitask(words: list[str]) -> None:
    """Two tasks of different data, which take turns in micro-batches."""
    args = integers(words, task_batch=4, turns=2)
    engine = engine_of(net(), args.task_batch, args.turns, 1)
    other = (x.flip(1) * 3 for x in loader(args.task_batch))
    turns = itertools.chain.from_iterable(zip(loader(args.task_batch), other, strict=False))
    train(engine, turns, squared)


def mean_teacher(words: list[str]) -> None:
    """A teacher that averages the weights after every micro-batch."""
    args = integers(words, batch=2, acc=4)
    teacher = net(seed=3).requires_grad_(False)
    engine = engine_of(net(), args.batch, args.acc, 1)
    for x in loader(args.batch):
        engine.backward(squared(engine(x), teacher(x.flip(1))))
        engine.step()
        with torch.no_grad():
            for kept, one in zip(teacher.parameters(), engine.module.parameters(), strict=True):
                kept.lerp_(one, 0.004)


def two_models(words: list[str]) -> None:
    """Two models in one loop; only the second one's loss, of negatives from the batch, depends on the cut."""
    args = integers(words, bs=4, ga=2)
    first, second = engine_of(net(), args.bs, args.ga, 1), engine_of(net(seed=1), args.bs, args.ga, 1)
    unit = torch.nn.functional.normalize
    for x in loader(args.bs):
        first.backward(squared(first(x), x))
        first.step()
        likeness = unit(second(x), dim=1) @ unit(x, dim=1).T / 0.1
        second.backward(torch.nn.functional.cross_entropy(likeness, torch.arange(len(x))))
        second.step()


class Stream(IterableDataset[torch.Tensor]):
    """Rows without length, shuffled in a buffer and packed end to end into rows of one length."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        generator = torch.Generator().manual_seed(3 + torch.distributed.get_rank())
        left = torch.empty(0)
        while True:
            while len(left) < WIDTH:
                size = int(torch.randint(3, 40, (), generator=generator))
                left = torch.cat([left, torch.randn(size, generator=generator)])
            yield left[:WIDTH]
            left = left[WIDTH:]


def packed_stream(words: list[str]) -> None:
    """A stream of documents, packed into rows of one length."""
    args = integers(words, rows_per_gpu=4, grad_acc=2)
    deepspeed.init_distributed()
    train(engine_of(net(), args.rows_per_gpu, args.grad_acc, 2), DataLoader(Stream(), args.rows_per_gpu), squared)


def gan(words: list[str]) -> None:
    """Generator and discriminator are engines of their own; neither loss depends on the cut."""
    args = integers(words, bs=4, ga=2)
    g = engine_of(net(), args.bs, args.ga, 1)
    d = engine_of(torch.nn.Sequential(net(seed=1), torch.nn.Linear(WIDTH, 1)), args.bs, args.ga, 1)
    judged = torch.nn.functional.binary_cross_entropy_with_logits
    for real in loader(args.bs):
        with torch.no_grad():
            fake = g(real.flip(1))
        told = d(torch.cat([real, fake]))
        d.backward(judged(told, torch.cat([torch.ones(len(real), 1), torch.zeros(len(real), 1)])))
        d.step()
        fooled = d.module(g(real.flip(1)))
        g.backward(judged(fooled, torch.ones_like(fooled)))
        g.step()
        if g.global_steps >= STEPS:
            break


def accelerated(words: list[str]) -> None:
    """accelerate's own loop: a plugin, `accumulate()`, clipping, and a schedule that it has prepared."""
    import argparse

    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin

    parser = argparse.ArgumentParser()
    parser.add_argument("--train_batch_size", type=int, default=2)
    parser.add_argument("--accumulation", type=int, default=4)
    args = parser.parse_args(words)
    config = {"zero_optimization": {"stage": 1}, "train_micro_batch_size_per_gpu": args.train_batch_size}
    config |= {"gradient_accumulation_steps": args.accumulation, "zero_allow_untested_optimizer": True}
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config={**config, "gradient_clipping": 1.0}))
    data: Any = rows()
    module = net()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    model, optimizer, batches, schedule = accelerator.prepare(
        module, optimizer, DataLoader(data, args.train_batch_size), schedule
    )
    for x in batches:
        with accelerator.accumulate(model):
            accelerator.backward(squared(model(x), x))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()


def fabric(words: list[str]) -> None:
    """Lightning Fabric: its strategy makes the engine, the loop is the script's."""
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DeepSpeedStrategy

    args = integers(words, batch_size=4)
    config = {"train_micro_batch_size_per_gpu": args.batch_size, "zero_optimization": {"stage": 2}}
    config |= {"zero_allow_untested_optimizer": True, "gradient_accumulation_steps": 2}
    made = Fabric(accelerator="cpu", devices=2, strategy=DeepSpeedStrategy(config=config))
    made.launch()
    module = net()
    model, optimizer = made.setup(module, torch.optim.AdamW(module.parameters(), lr=1e-3))
    data: Any = rows()
    for at, x in enumerate(made.setup_dataloaders(DataLoader(data, args.batch_size)), 1):
        made.backward(squared(model(x), x))
        optimizer.step()
        if at >= STEPS:
            break


def hydra(words: list[str]) -> None:
    """Hydra's config groups and overrides; the config of DeepSpeed is a part of Hydra's."""
    import hydra
    from omegaconf import DictConfig, OmegaConf

    @hydra.main(version_base=None, config_path=".", config_name="conf")
    def main(cfg: DictConfig) -> None:
        config: Any = OmegaConf.to_container(cfg.deepspeed, resolve=True)
        module = net()
        engine = deepspeed.initialize(model=module, model_parameters=module.parameters(), config=config)[0]
        train(engine, loader(cfg.data.batch_size), squared)

    sys.argv = [sys.argv[0], *words]
    main()


def token_mean(words: list[str]) -> None:
    """A mean over the tokens of each micro-batch, whose number differs: the usual loss of padded texts."""
    args = integers(words, device_bs=2, grad_accu=4)
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Embedding(50, 24), torch.nn.Linear(24, 24), torch.nn.Linear(24, 50))
    engine = engine_of(module, args.device_bs, args.grad_accu, 1, gradient_clipping=1.0)
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(1, 50, (8192, 24), generator=generator)
    ids[torch.arange(24)[None] >= torch.randint(4, 25, (8192, 1), generator=generator)] = 0
    data: Any = ids
    for x in DataLoader(data, args.device_bs, sampler=DistributedSampler(data, shuffle=False), drop_last=True):
        told = engine(x)[:, :-1].flatten(0, 1)
        engine.backward(torch.nn.functional.cross_entropy(told, x[:, 1:].flatten(), ignore_index=0))
        engine.step()
        if engine.global_steps >= STEPS:
            break


class Gather(torch.autograd.Function):
    """Rows of all ranks, with their gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        every = [torch.empty_like(x) for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather(every, x.contiguous())
        return torch.cat(every)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        whole = gradient.contiguous()
        torch.distributed.all_reduce(whole)
        return whole.chunk(torch.distributed.get_world_size())[torch.distributed.get_rank()]


def contrastive(words: list[str]) -> None:
    """Two views of a row, with negatives gathered from all ranks."""
    args = integers(words, batch_gpu=4, accum_num=2)
    engine = engine_of(net(), args.batch_gpu, args.accum_num, 1)
    for x in loader(args.batch_gpu):
        views = engine(torch.cat([x, x + 0.1 * x.flip(1)])).chunk(2)
        a, b = (Gather.apply(torch.nn.functional.normalize(view, dim=1)) for view in views)
        engine.backward(torch.nn.functional.cross_entropy(a @ b.T / 0.2, torch.arange(len(a))))
        engine.step()
        if engine.global_steps >= STEPS:
            break


def _own_optimizer(module: torch.nn.Module, optimizer: Any, micro_batch: int, accumulation: int, **more: Any) -> Any:
    config = {"train_micro_batch_size_per_gpu": micro_batch, "gradient_accumulation_steps": accumulation}
    config |= {"zero_optimization": {"stage": 1, "reduce_bucket_size": 500_000}, "zero_allow_untested_optimizer": True}
    return deepspeed.initialize(model=module, optimizer=optimizer, config=config, **more)[0]


def one_cycle(words: list[str]) -> None:
    """A schedule over the optimizer steps of the loader's length, which the loop advances."""
    args = integers(words, batch=4, accumulate_grad_batches=2)
    deepspeed.init_distributed()
    batches, module = loader(args.batch), net()
    optimizer = torch.optim.AdamW(module.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 2e-3, total_steps=len(batches) // args.accumulate_grad_batches + 1
    )
    engine = _own_optimizer(module, optimizer, args.batch, args.accumulate_grad_batches)
    for at, x in enumerate(batches, 1):
        engine.backward(squared(engine(x), x))
        engine.step()
        if at % args.accumulate_grad_batches == 0:
            schedule.step()
        if engine.global_steps >= STEPS:
            break


def _classes(x: torch.Tensor) -> torch.Tensor:
    return x.abs().sum(1).long() % 10


def rdrop(words: list[str]) -> None:
    """Two forwards of the same rows under other dropout, whose answers shall agree."""
    args = integers(words, bsz=4, ga=2)
    module = torch.nn.Sequential(net(), torch.nn.Dropout(0.05), torch.nn.Linear(WIDTH, 10))
    engine = engine_of(module, args.bsz, args.ga, 1)
    functional = torch.nn.functional
    for x in loader(args.bsz):
        one, other = engine(x), engine(x)
        told = functional.cross_entropy(one, _classes(x)) + functional.cross_entropy(other, _classes(x))
        apart = functional.kl_div(one.log_softmax(1), other.log_softmax(1), log_target=True, reduction="batchmean")
        engine.backward(told / 2 + apart)
        engine.step()
        if engine.global_steps >= STEPS:
            break


def boundary(words: list[str]) -> None:
    """The loop tells the engine which micro-batch ends a step: every n-th, and the last of an epoch."""
    args = integers(words, mb=2, accumulate=4)
    engine = engine_of(net(), args.mb, args.accumulate, 1, gradient_clipping=1.0)
    batches = loader(args.mb)
    for at, x in enumerate(batches, 1):
        engine.set_gradient_accumulation_boundary(at % args.accumulate == 0 or at == len(batches))
        engine.backward(squared(engine(x), x))
        engine.step()
        if engine.global_steps >= STEPS:
            break


def unfreeze(words: list[str]) -> None:
    """The first layer is frozen for some optimizer steps."""
    args = integers(words, batch=4, ga=2, frozen_steps=8)
    module: Any = net()
    engine = engine_of(module, args.batch, args.ga, 1)
    for x in loader(args.batch):
        module[0].requires_grad_(engine.global_steps >= args.frozen_steps)
        engine.backward(squared(engine(x), x))
        engine.step()
        if engine.global_steps >= STEPS:
            break


def iter_decay(words: list[str]) -> None:
    """A learning rate that the loop itself computes from its iterations; it hardly moves in the first steps."""
    args = integers(words, per_gpu=2, grad_accumulation=4)
    module = net()
    optimizer = torch.optim.AdamW(module.parameters(), lr=2e-3)
    engine = _own_optimizer(module, optimizer, args.per_gpu, args.grad_accumulation)
    for at, x in enumerate(loader(args.per_gpu)):
        for group in engine.optimizer.param_groups:
            group["lr"] = 2e-3 * 0.9998**at
        engine.backward(squared(engine(x), x))
        engine.step()
        if engine.global_steps >= STEPS:
            break


class Speech(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Utterances of many lengths, masked at random by NumPy."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        self.lengths = torch.randint(12, 40, (8192,), generator=generator).tolist()
        self.words = torch.randint(1, 12, (8192, 4), generator=generator)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, at: int) -> tuple[torch.Tensor, torch.Tensor]:
        import numpy as np

        sound = torch.randn(self.lengths[at], WIDTH, generator=torch.Generator().manual_seed(at))
        start = np.random.randint(len(sound) - 4)
        sound[start : start + 4] = 0
        return sound, self.words[at]


def ctc(words: list[str]) -> None:
    """Speech: batches of like lengths from an own batch sampler, padded, masked in workers, CTC loss."""
    args = integers(words, samples_per_gpu=4, update_freq=2)
    deepspeed.init_distributed()
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(WIDTH, 32), torch.nn.Tanh(), torch.nn.Linear(32, 12))
    engine = engine_of(module, args.samples_per_gpu, args.update_freq, 1, gradient_clipping=5.0)
    data = Speech()
    order = sorted(range(len(data)), key=lambda at: data.lengths[at])
    size = args.samples_per_gpu * world
    buckets = [order[at : at + size] for at in range(0, len(order) - size + 1, size)]
    buckets = [buckets[at][rank::world] for at in torch.randperm(len(buckets), generator=torch.Generator()).tolist()]

    def padded(batch: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, ...]:
        sounds, texts = zip(*batch, strict=True)
        lengths = torch.tensor([len(one) for one in sounds])
        return torch.nn.utils.rnn.pad_sequence(list(sounds), batch_first=True), lengths, torch.stack(texts)

    for sounds, lengths, texts in DataLoader(data, batch_sampler=buckets, collate_fn=padded, num_workers=1):
        told = engine(sounds).log_softmax(2).transpose(0, 1)
        sizes = torch.full((len(texts),), texts.shape[1])
        engine.backward(torch.nn.functional.ctc_loss(told, texts, lengths, sizes, zero_infinity=True))
        engine.step()
        if engine.global_steps >= STEPS:
            break


class Quantized(torch.nn.Module):
    """Codes that average the inputs nearest to them, in each forward of the training."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = net(), net(seed=1)
        self.register_buffer("codes", torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(2)))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen = self.inner(x)
        codes: Any = self.codes
        nearest = torch.cdist(seen.detach(), codes).argmin(1)
        picked = codes[nearest].clone()
        if self.training:
            codes.index_copy_(0, nearest, codes[nearest].lerp(seen.detach(), 0.02))
        return self.outer(seen + (picked - seen).detach()), (seen - picked).square().mean()


def codebook(words: list[str]) -> None:
    """Vector quantization, whose codes are averages that every forward moves."""
    args = integers(words, images=2, accumulation=4)
    torch.manual_seed(0)
    engine = engine_of(Quantized(), args.images, args.accumulation, 1)
    for x in loader(args.images):
        out, apart = engine(x)
        engine.backward(squared(out, x) + 0.25 * apart)
        engine.step()
        if engine.global_steps >= STEPS:
            break


class Deep(torch.nn.Module):
    """Layers that are dropped at random, the more the more forwards the model has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(net(seed=at) for at in range(3))
        self.seen = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += self.training
        for layer in self.layers:
            keeps = torch.rand(len(x), 1) >= min(0.5, 0.002 * self.seen)
            x = x + keeps * layer(x)
        return x


def stochastic_depth(words: list[str]) -> None:
    """Layers dropped by a probability that grows with the forwards."""
    args = integers(words, batch_size=2, gradient_accumulation=4)
    train(engine_of(Deep(), args.batch_size, args.gradient_accumulation, 1), loader(args.batch_size), squared)


WAYS = {
    way.__name__: way
    for way in (
        *(tokens_weighted, schedule_in_loop, nanogpt, accumulates, cut_by_loop, gradient_penalty, multitask),
        *(mean_teacher, two_models, packed_stream, gan, accelerated, fabric, hydra),
        *(token_mean, contrastive, one_cycle),
        *(rdrop, boundary, unfreeze, iter_decay, ctc),
        *(codebook, stochastic_depth),
    )
}
if __name__ == "__main__":
    run(WAYS)
