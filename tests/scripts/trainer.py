"""A Trainer script: HfArgumentParser, a collator that pads, everything else left to transformers."""

import torch
import torch.distributed
from transformers import AutoModelForCausalLM, HfArgumentParser, LlamaConfig, Trainer, TrainingArguments, set_seed


class Texts(torch.utils.data.Dataset):
    """Sequences of 8 to 32 tokens, the same in every process."""

    def __init__(self, count: int = 4096) -> None:
        generator = torch.Generator().manual_seed(1)
        lengths = torch.randint(8, 33, (count,), generator=generator)
        self.items = [torch.randint(1, 512, (int(length),), generator=generator) for length in lengths]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, at: int) -> torch.Tensor:
        return self.items[at]


def collate(items: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    ids = torch.nn.utils.rnn.pad_sequence(items, batch_first=True)
    return {"input_ids": ids, "labels": ids.masked_fill(ids == 0, -100), "attention_mask": (ids > 0).long()}


def main() -> None:
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    set_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    trainer = Trainer(AutoModelForCausalLM.from_config(config), args, collate, Texts())
    trainer.train()
    if torch.distributed.is_initialized():  # Trainer leaves it open
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
