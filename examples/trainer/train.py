"""A training script as people have it: Hugging Face's Trainer, arguments on the command line, DeepSpeed by --deepspeed.

It knows nothing of autotune. Texts are bytes, so there is no tokenizer to download; `--model NAME` takes a model of the Hub
instead of the small one that is made here.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, HfArgumentParser, LlamaConfig, Trainer, TrainingArguments


@dataclass
class Data:
    text: Path = field(default=Path(__file__), metadata={"help": "a text file to train on"})
    length: int = field(default=128, metadata={"help": "bytes a sequence"})
    model: str | None = field(default=None, metadata={"help": "a model of the Hub, its weights made anew"})


class Bytes(torch.utils.data.Dataset):
    """A file's bytes in pieces of one length, over and over."""

    def __init__(self, path: Path, length: int, pieces: int = 20_000) -> None:
        self.bytes = torch.tensor(list(path.read_bytes()))
        self.length, self.pieces = length, pieces

    def __len__(self) -> int:
        return self.pieces

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        first = at * 17 % max(1, len(self.bytes) - self.length)
        ids = self.bytes[first : first + self.length]
        return {"input_ids": ids, "labels": ids}


def main() -> None:
    words = [*sys.argv[1:], *([] if torch.cuda.is_available() else ["--use_cpu", "True"])]
    arguments, data = HfArgumentParser((TrainingArguments, Data)).parse_args_into_dataclasses(words)
    small = LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4
    )
    config = AutoConfig.from_pretrained(data.model) if data.model else small
    trainer = Trainer(AutoModelForCausalLM.from_config(config), arguments, train_dataset=Bytes(data.text, data.length))
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
