"""T5 by transformers' Trainer, whose batch stands in its arguments."""

from typing import Any

import torch
import torch.distributed
from transformers import HfArgumentParser, T5Config, T5ForConditionalGeneration, Trainer, TrainingArguments


class Pairs(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """48 tokens in, 24 out; the same in every process."""

    def __len__(self) -> int:
        return 65_536

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(at)
        words = torch.randint(1, 4096, (72,), generator=generator)
        return {"input_ids": words[:48], "labels": words[48:]}


def main() -> None:
    trained_by: Any = TrainingArguments  # the parser's own annotation admits no class
    (arguments,) = HfArgumentParser(trained_by).parse_args_into_dataclasses()
    shape: dict[str, Any] = {"vocab_size": 4096, "d_model": 192, "d_kv": 48, "d_ff": 768, "num_layers": 3}
    shape |= {"num_heads": 4, "decoder_start_token_id": 0}
    model = T5ForConditionalGeneration(T5Config(**shape))
    # T5 takes `num_items_in_batch` and does not divide by it: without this line gradients grow with the accumulation.
    model.accepts_loss_kwargs = False  # type: ignore[assignment]
    Trainer(model, arguments, train_dataset=Pairs()).train()
    if torch.distributed.is_initialized():  # Trainer leaves it open
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
