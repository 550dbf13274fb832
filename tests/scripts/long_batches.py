"""A Trainer script whose 7th, 19th and 40th batches are far longer than the others. It saves as it goes, and writes down
which samples each step trained on."""

import json
import os
import time
from dataclasses import dataclass, field

import torch
import torch.distributed
from transformers import AutoModelForCausalLM, HfArgumentParser, LlamaConfig, Trainer, TrainingArguments, set_seed


@dataclass
class Ours:
    long: int = field(default=512, metadata={"help": "tokens of a long sequence"})
    long_steps: str = field(default="7,19,40")
    global_batch: int = field(default=8)
    seen: str = field(default="seen")


class Texts(torch.utils.data.Dataset):
    def __init__(self, ours: Ours, count: int) -> None:
        steps = {int(step) - 1 for step in ours.long_steps.split(",") if step}
        self.length = [ours.long if at // ours.global_batch in steps else 32 for at in range(count)]

    def __len__(self) -> int:
        return len(self.length)

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(at)
        return {"index": torch.tensor(at), "ids": torch.randint(1, 512, (self.length[at],), generator=generator)}


def collate(items: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    ids = torch.stack([item["ids"] for item in items])
    return {"input_ids": ids, "labels": ids, "index": torch.stack([item["index"] for item in items])}


class InOrder(Trainer):
    seen = "seen"

    def _get_train_sampler(self, *args):  # the samples' order is part of what the test counts
        return torch.utils.data.SequentialSampler(self.train_dataset)

    def compute_loss(self, model, inputs, *args, **kwargs):
        index = inputs.pop("index").tolist()
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        note(self.seen, step=self.state.global_step, samples=index)
        return loss


def note(seen: str, **entry: object) -> None:
    with open(f"{seen}.rank{os.environ['RANK']}.jsonl", "a") as file:
        file.write(json.dumps({**entry, "at": time.time()}) + "\n")


def main() -> None:
    ours, args = HfArgumentParser((Ours, TrainingArguments)).parse_args_into_dataclasses()
    set_seed(0)
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=4096,
    )
    InOrder.seen = ours.seen
    note(ours.seen, started=True)
    args.remove_unused_columns = False
    trainer = InOrder(AutoModelForCausalLM.from_config(config), args, collate, Texts(ours, 60 * ours.global_batch))
    trainer.train()
    if torch.distributed.is_initialized():  # Trainer leaves it open
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
