"""Training loops as people write them, a few lines each: `ways.py WAY --deepspeed_config ds.json [batch=4]`.

tests/test_ways.py knows how many sequences a step of each trains on.
"""

import argparse
import dataclasses
import json
import os
from collections import UserDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch.utils.data import DataLoader, IterableDataset

TOKENS, WORDS = 8, 64
STEPS = 60


class Net(torch.nn.Module):
    """Gives its mean logit as the loss, alone or in whatever a way wants."""

    def __init__(self, wrap: Any = lambda loss: loss) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(WORDS, 16)
        self.head = torch.nn.Linear(16, WORDS)
        self.wrap = wrap

    def forward(self, input_ids: Any, position_ids: Any = None, cu_seqlens: Any = None) -> Any:
        return self.wrap(self.head(self.embed(input_ids)).square().mean())


class Data(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self, size: int = 4096) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, place: int) -> torch.Tensor:
        if place >= self.size:
            raise IndexError(place)
        return torch.full((TOKENS,), place % WORDS)


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(Data())


@dataclasses.dataclass
class Bag:
    """A batch of the script's own class."""

    name: str
    ids: torch.Tensor


class BagNet(Net):
    def forward(self, bag: Any) -> Any:  # type: ignore[override]
        return super().forward(bag.ids if isinstance(bag, Bag) else torch.tensor(bag))


def ids(rows: int, tokens: int = TOKENS) -> torch.Tensor:
    return torch.randint(0, WORDS, (rows, tokens))


def engine_of(args: argparse.Namespace, net: torch.nn.Module | None = None, **more: Any) -> Any:
    net = Net() if net is None else net
    made = deepspeed.initialize(args=args, model=net, model_parameters=net.parameters(), **more)
    note("engine", [micro(made[0]), made[0].gradient_accumulation_steps()])
    return made if more else made[0]


def note(name: str, what: Any) -> None:
    """For the test, in the folder whose files outlive a trial."""
    if torch.distributed.get_rank() == 0:
        os.makedirs("seen", exist_ok=True)
        Path("seen", f"{name}.json").write_text(json.dumps(what))


def train(engine: Any, batches: Any) -> None:
    for batch in batches:
        engine.backward(engine(batch))
        engine.step()


def micro(engine: Any) -> int:
    return int(engine.train_micro_batch_size_per_gpu())


# -- the ways ------------------------------------------------------------------------------------------------------------


def engine_backward(args: argparse.Namespace) -> None:
    engine = engine_of(args)
    train(engine, (ids(micro(engine)) for _ in range(STEPS)))


def loss_backward(args: argparse.Namespace) -> None:
    engine = engine_of(args)
    for _ in range(STEPS):
        engine(ids(micro(engine))).backward()
        engine.step()


def loss_backward_of_its_own_batch(args: argparse.Namespace) -> None:
    engine = engine_of(args)
    for _ in range(STEPS):
        engine(ids(2)).backward()
        engine.step()


def constant_batch(args: argparse.Namespace) -> None:
    train(engine_of(args), (ids(4) for _ in range(STEPS)))


def accumulation_by_hand(args: argparse.Namespace) -> None:
    engine = engine_of(args)
    for _ in range(STEPS):
        for _ in range(3):
            engine.backward(engine(ids(micro(engine))))
        engine.step()


def groups_of_eight(args: argparse.Namespace) -> None:
    """As TRL's GRPO checks: the samples of a step over two ranks are whole groups."""
    engine = engine_of(args)
    assert 2 * micro(engine) * engine.gradient_accumulation_steps() % 8 == 0, "no whole groups"
    train(engine, (ids(micro(engine)) for _ in range(8 * STEPS)))


def accumulates_to_its_global_batch(args: argparse.Namespace) -> None:
    """As Megatron-DeepSpeed does: the micro-batch is what it is told, and accumulation what is left."""
    engine = engine_of(args)
    times = max(1, int(args.settings[0]) // (2 * micro(engine)))
    for step in range(8 * STEPS):
        engine.set_gradient_accumulation_boundary(step % times == times - 1)
        train(engine, [ids(micro(engine))])


def one_or_four(args: argparse.Namespace) -> None:
    engine = engine_of(args)
    assert micro(engine) in (1, 4), "one or four"
    train(engine, (ids(micro(engine)) for _ in range(8 * STEPS)))


def two_forwards(args: argparse.Namespace) -> None:
    engine = engine_of(args)
    for _ in range(STEPS):
        engine.backward(engine(ids(micro(engine))) + engine(ids(micro(engine))))
        engine.step()


def several_losses(args: argparse.Namespace) -> None:
    engine = engine_of(args, Net(lambda loss: (loss, 2 * loss)))
    for _ in range(STEPS):
        one, other = engine(ids(micro(engine)))
        (one + other).backward() if args.loss else engine.backward(one + 0.1 * other)
        engine.step()


def objects(args: argparse.Namespace) -> None:
    engine = engine_of(args, BagNet())
    train(engine, (Bag("a batch", ids(micro(engine))) for _ in range(STEPS)))


def plain_lists(args: argparse.Namespace) -> None:
    engine = engine_of(args, BagNet())
    train(engine, (ids(micro(engine)).tolist() for _ in range(STEPS)))


def flattened(args: argparse.Namespace) -> None:
    engine = engine_of(args)
    for _ in range(STEPS):
        places = torch.arange(TOKENS).repeat(micro(engine))[None]
        engine.backward(engine(ids(1, places.shape[1]), position_ids=places))
        engine.step()


def without_positions(args: argparse.Namespace, borders: bool = False) -> None:
    """Laid end to end in one row, with what tells them apart known to the model alone, or given as borders."""
    engine = engine_of(args)
    for _ in range(STEPS):
        more = {"cu_seqlens": TOKENS * torch.arange(micro(engine) + 1)} if borders else {}
        engine.backward(engine(ids(1, TOKENS * micro(engine)), **more))
        engine.step()


def with_borders(args: argparse.Namespace) -> None:
    without_positions(args, borders=True)


def packed(args: argparse.Namespace) -> None:
    engine = engine_of(args)
    for step in range(STEPS):
        places = torch.cat([torch.arange(2 + step % 3), torch.arange(6 - step % 3)]).repeat(micro(engine), 1)
        engine.backward(engine(ids(micro(engine)), position_ids=places))
        engine.step()


def full_row(rows: int) -> dict[str, torch.Tensor]:
    """As TRL's `packing` has it: rows of up to 64 tokens, each of as many texts as fit, laid end to end."""
    places = []
    for _ in range(rows):
        cut = int(torch.randint(8, 48, ()))
        texts = [cut, int(torch.randint(60, 65, ())) - cut]
        places += [
            torch.arange(text) for text in (texts if torch.rand(()) < 0.5 else [cut // 2, cut - cut // 2, texts[1]])
        ]
    row = torch.cat(places)[None]
    return {"input_ids": ids(1, row.shape[1]), "position_ids": row}


def full_rows(args: argparse.Namespace) -> None:
    engine = engine_of(args)
    for _ in range(STEPS):
        engine.backward(engine(**full_row(micro(engine))))
        engine.step()


def four_full_rows(args: argparse.Namespace) -> None:
    engine = engine_of(args)
    for _ in range(STEPS):
        engine.backward(engine(**full_row(4)))
        engine.step()


def rows_now_full_now_not(args: argparse.Namespace) -> None:
    engine = engine_of(args)
    for step in range(STEPS):
        engine.backward(engine(**full_row(1 + step * step % 7 * 3)))
        engine.step()


def iterable_dataset(args: argparse.Namespace) -> None:
    engine = engine_of(args)
    train(engine, DataLoader(Stream(), batch_size=micro(engine)))


def loader_before(args: argparse.Namespace) -> None:
    with open(args.deepspeed_config) as file:
        loader = DataLoader(Data(), batch_size=json.load(file)["train_micro_batch_size_per_gpu"])
    train(engine_of(args), loader)


def deepspeed_io(args: argparse.Namespace) -> None:
    engine, _, loader, _ = engine_of(args, training_data=Data())
    train(engine, loader)


def from_yaml(args: argparse.Namespace) -> None:
    import yaml

    with open("train.yaml") as file:
        rows = yaml.safe_load(file)["batch"]
    train(engine_of(args), (ids(rows) for _ in range(STEPS)))


def from_a_setting(args: argparse.Namespace) -> None:
    settings = dict(text.split("=") for text in args.settings)
    train(engine_of(args), (ids(int(settings["batch"])) for _ in range(STEPS)))


def evaluation_between(args: argparse.Namespace) -> None:
    engine = engine_of(args)
    for _ in range(STEPS):
        train(engine, [ids(micro(engine))])
        engine.eval()
        with torch.no_grad():
            engine(ids(16))
        engine.train()


def evaluation_mode(args: argparse.Namespace) -> None:
    """As `from_pretrained` returns a model."""
    engine = engine_of(args, Net().eval())
    train(engine, (ids(micro(engine)) for _ in range(STEPS)))


def evaluation_with_gradients(args: argparse.Namespace) -> None:
    engine = engine_of(args)
    for _ in range(STEPS):
        engine.eval()
        engine(ids(16))
        engine.train()
        train(engine, [ids(micro(engine))])


def compiled(args: argparse.Namespace) -> None:
    engine = engine_of(args, torch.compile(Net(), backend="eager"))
    train(engine, (ids(micro(engine)) for _ in range(STEPS)))


def past_the_engine(args: argparse.Namespace) -> None:
    engine = engine_of(args)
    for _ in range(STEPS):
        engine.backward(engine.module(ids(micro(engine))))
        engine.step()


def unlike_lengths(args: argparse.Namespace) -> None:
    engine = engine_of(args, Net())
    engine.module.forward = lambda rows: Net.forward(engine.module, torch.cat(rows))
    # lengths in turn, so that the mean over a batch's tokens does not depend on its cut
    train(engine, ([torch.arange(3 + place % 2) for place in range(micro(engine))] for _ in range(STEPS)))


def queries_and_documents(args: argparse.Namespace) -> None:
    engine = engine_of(args)
    for _ in range(STEPS):
        loss = engine(ids(micro(engine))) + engine(ids(3 * micro(engine), 2 * TOKENS))
        engine.backward(loss)
        engine.step()


def features(args: argparse.Namespace) -> None:
    """Images with their labels: no tokens anywhere."""
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.Linear(4 * 36, 10))
    engine = engine_of(args, net)
    for _ in range(STEPS):
        images, labels = torch.rand(micro(engine), 3, 8, 8), torch.randint(0, 10, (micro(engine),))
        engine.backward(torch.nn.functional.cross_entropy(engine(images), labels))
        engine.step()


class ImageNet(Net):
    def forward(self, images: Any, targets: Any = None) -> Any:  # type: ignore[override]
        return super().forward((torch.stack([one.mean((1, 2)) for one in images]) * WORDS).long())


def detection(args: argparse.Namespace) -> None:
    """Images of unlike sizes in a list, as torchvision's detectors take them."""
    engine = engine_of(args, ImageNet())
    for step in range(STEPS):
        images = [torch.rand(3, 8 + step % 3, 8 + place) for place in range(micro(engine))]
        engine.backward(engine(images, [{"boxes": torch.rand(2, 4)} for _ in images]))
        engine.step()


class Seeing(Net):
    def forward(self, input_ids: Any, images: Any) -> Any:  # type: ignore[override]
        return super().forward(input_ids) + images.mean()


def with_images(engine: Any, images: Any) -> None:
    """Images with up to three texts each, as LISA's collate function gives them."""
    for _ in range(STEPS):
        texts = int(torch.randint(1, 4, (images(),)).sum())
        engine.backward(engine(input_ids=ids(texts), images=torch.rand(images(), 3, 4, 4)))
        engine.step()


def images_and_texts(args: argparse.Namespace) -> None:
    engine = engine_of(args, Seeing())
    with_images(engine, lambda: micro(engine))


def four_images_and_texts(args: argparse.Namespace) -> None:
    with_images(engine_of(args, Seeing()), lambda: 4)


class Graphs:
    """As PyTorch Geometric's `Batch`: what it holds lies in a store."""

    def __init__(self, number: int) -> None:
        sizes = torch.randint(2, 6, (number,))
        nodes = int(sizes.sum())
        starts = torch.cat([torch.zeros(1, dtype=torch.long), sizes.cumsum(0)])
        self._store = UserDict(x=torch.randint(0, WORDS, (nodes,)), edge_index=torch.ones(2, 3 * nodes), ptr=starts)


class GraphNet(Net):
    def forward(self, data: Any) -> Any:  # type: ignore[override]
        return super().forward(data._store["x"])


def graphs(args: argparse.Namespace) -> None:
    engine = engine_of(args, GraphNet())
    for _ in range(STEPS):
        engine.backward(engine(data=Graphs(micro(engine))))
        engine.step()


def clouds(args: argparse.Namespace) -> None:
    """Points of one cloud after those of another, from DeepSpeed's own loader."""
    collate = lambda some: torch.cat([torch.randint(0, WORDS, (3 + int(one[0]) % 5,)) for one in some])  # noqa: E731
    engine, _, loader, _ = engine_of(args, training_data=Data(), collate_fn=collate)
    train(engine, loader)


def flag_of_its_own(name: str, default: int) -> int:
    """What a parser of the script's own says, whatever stands in the config."""
    parser = argparse.ArgumentParser()
    parser.add_argument(name, dest="value", type=int, default=default)
    return int(parser.parse_args([]).value)


def stale_config(args: argparse.Namespace) -> None:
    rows = flag_of_its_own("--per_device_train_batch_size", 6)
    train(engine_of(args), (ids(rows) for _ in range(STEPS)))


def accumulation_of_a_flag(args: argparse.Namespace) -> None:
    """The loop steps by a flag, and the engine accumulates once more where its config says so too."""
    times, engine = flag_of_its_own("--gradient_accumulation_steps", 4), engine_of(args)
    for step in range(8 * STEPS):
        engine.backward(engine(ids(micro(engine))))
        if (step + 1) % times == 0:
            engine.step()


def steps_at_every_backward(args: argparse.Namespace) -> None:
    """As accelerate does without `accumulate`, whatever the config says."""
    engine = engine_of(args)
    for _ in range(STEPS):
        engine.set_gradient_accumulation_boundary(True)
        train(engine, [ids(micro(engine))])


def epochs(args: argparse.Namespace) -> None:
    """As Trainer does: an epoch's last step has the batches that are left, however few."""
    engine = engine_of(args)
    loader = DataLoader(Data(116), batch_size=micro(engine))
    for _ in range(STEPS):
        for at, batch in enumerate(loader, 1):
            engine.set_gradient_accumulation_boundary(
                at % engine.gradient_accumulation_steps() == 0 or at == len(loader)
            )
            train(engine, [batch])


def two_engines(args: argparse.Namespace) -> None:
    first, second = engine_of(args), engine_of(args)
    for _ in range(STEPS):
        batch = ids(micro(first))
        train(first, [batch])
        train(second, [batch])


def critic_of(args: argparse.Namespace, **changes: Any) -> Any:
    """Two engines whose config is a dict in the code."""
    with open(args.deepspeed_config) as file:
        config = json.load(file)
    args.deepspeed_config = None
    return engine_of(args, config=config)[0], engine_of(args, config={**config, **changes})[0]


def critic(args: argparse.Namespace) -> None:
    actor, other = critic_of(args)
    for _ in range(STEPS):
        batch = ids(micro(actor))
        train(actor, [batch])
        train(other, [batch])


def critic_of_another_batch(args: argparse.Namespace) -> None:
    """It accumulates twice as often as the actor, and is fed with the actor's batches."""
    actor, other = critic_of(args, gradient_accumulation_steps=4)
    for _ in range(STEPS):
        batch = ids(micro(actor))
        train(actor, [batch])
        train(other, [batch])


def critic_of_its_own_file(args: argparse.Namespace) -> None:
    actor = engine_of(args)
    args.deepspeed_config = args.settings[0]
    other = engine_of(args)
    note("stages", [actor.zero_optimization_stage(), other.zero_optimization_stage()])
    for _ in range(STEPS):
        batch = ids(micro(actor))
        train(actor, [batch])
        train(other, [batch])


def critic_of_unlike_steps(args: argparse.Namespace) -> None:
    actor, other = critic_of(args)
    for step in range(STEPS):
        train(actor, [ids(micro(actor))])
        train(other, [ids(1 + step % 5)])


def time_first(args: argparse.Namespace) -> None:
    engine = engine_of(args)
    train(engine, (ids(micro(engine)).T for _ in range(STEPS)))


def growing_batch(args: argparse.Namespace) -> None:
    engine = engine_of(args)
    train(engine, (ids(micro(engine) + step // 4) for step in range(STEPS)))


def errors_are_skipped(args: argparse.Namespace) -> None:
    engine = engine_of(args)
    while True:
        try:
            train(engine, [ids(4)])
        except Exception as error:
            print(error)


def refuses_other_batches(args: argparse.Namespace) -> None:
    engine = engine_of(args)
    assert micro(engine) == 4, "made for four"
    train(engine, (ids(4) for _ in range(STEPS)))


def one_epoch(args: argparse.Namespace) -> None:
    engine = engine_of(args)
    train(engine, DataLoader(Data(160), batch_size=micro(engine)))


def zero_init(args: argparse.Namespace) -> None:
    with deepspeed.zero.Init(config_dict_or_path=args.deepspeed_config):
        net = Net()
    engine = engine_of(args, net)
    train(engine, (ids(micro(engine)) for _ in range(STEPS)))


def resumes(args: argparse.Namespace) -> None:
    engine = engine_of(args)
    path, state = engine.load_checkpoint("saved")
    assert path is not None, "nothing to resume from"
    train(engine, (ids(micro(engine)) for _ in range(state["step"], STEPS)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("way")
    parser.add_argument("settings", nargs="*")
    parser.add_argument("--loss", action="store_true")
    parser.add_argument("--batch_size", type=int)  # which no way reads
    deepspeed.add_config_arguments(parser)
    args = parser.parse_args()
    deepspeed.init_distributed()
    torch.manual_seed(0)
    globals()[args.way](args)


if __name__ == "__main__":
    main()
