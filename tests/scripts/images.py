"""A Trainer script of a tiny LLaVA with one or two images a sample; with --images_of_first_rank the second rank has none."""

import os
import sys

import torch
import torch.distributed
from transformers import (
    HfArgumentParser,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Trainer,
    TrainingArguments,
    set_seed,
)

FLAG, IMAGE = "--images_of_first_rank", 2
PATCHES = 16  # tokens of an image


class Samples(torch.utils.data.Dataset):
    def __init__(self, images: bool) -> None:
        self.images = images

    def __len__(self) -> int:
        return 1024

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(at)
        images = (1 + at % 2) * self.images
        text = torch.randint(3, 256, (8 + at % 5,), generator=generator)
        pixels = torch.randn(images, 3, 56, 56, generator=generator)
        return {"input_ids": torch.cat([torch.full((PATCHES * images,), IMAGE), text]), "pixel_values": pixels}


def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    ids = torch.nn.utils.rnn.pad_sequence([one["input_ids"] for one in samples], batch_first=True)
    made = {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": ids.masked_fill(ids <= IMAGE, -100)}
    pixels = torch.cat([one["pixel_values"] for one in samples])
    return {**made, "pixel_values": pixels} if len(pixels) else made


def main() -> None:
    images = FLAG not in sys.argv or os.environ.get("RANK", "0") == "0"
    args = HfArgumentParser(TrainingArguments).parse_args([word for word in sys.argv[1:] if word != FLAG])
    args = TrainingArguments(**{**vars(args), "remove_unused_columns": False})
    set_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    text = {"model_type": "llama", "vocab_size": 256, "num_hidden_layers": 2, **shape}
    vision = {"model_type": "clip_vision_model", "num_hidden_layers": 3, "image_size": 56, "patch_size": 14, **shape}
    config = LlavaConfig(text_config=text, vision_config=vision, image_token_index=IMAGE)
    Trainer(LlavaForConditionalGeneration(config), args, collate, Samples(images)).train()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
