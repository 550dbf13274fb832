"""Supervised fine-tuning with LoRA by TRL's SFTTrainer, with DeepSpeed by --deepspeed. It knows nothing of autotune.

`--model Qwen/Qwen2.5-0.5B` takes a model and tokenizer of the Hub; without it both are made here, small, and nothing is
downloaded.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2Config,
)
from trl import SFTConfig, SFTTrainer


@dataclass
class Model:
    model: str | None = field(default=None, metadata={"help": "a model of the Hub"})
    lora_r: int = field(default=8, metadata={"help": "rank of the adapters"})


def small() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A Qwen 2 with random weights, and a tokenizer of letters."""
    letters = ["[PAD]", "[END]", *map(chr, range(32, 127)), "\n"]
    raw = Tokenizer(models.WordLevel({letter: at for at, letter in enumerate(letters)}, unk_token="[PAD]"))
    raw.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="[PAD]", eos_token="[END]")
    config = Qwen2Config(
        vocab_size=len(letters),
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return AutoModelForCausalLM.from_config(config), tokenizer


def main() -> None:
    words = [*sys.argv[1:], *([] if torch.cuda.is_available() else ["--use_cpu", "True", "--bf16", "False"])]
    arguments, own = HfArgumentParser((SFTConfig, Model)).parse_args_into_dataclasses(words)
    if own.model:
        model, tokenizer = AutoModelForCausalLM.from_pretrained(own.model), AutoTokenizer.from_pretrained(own.model)
    else:
        model, tokenizer = small()
    texts = Dataset.from_list([{"text": f"{n} times {n} is {n * n}.\n" * (1 + n % 4)} for n in range(4000)])
    adapters = LoraConfig(r=own.lora_r, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    trainer = SFTTrainer(model, arguments, train_dataset=texts, processing_class=tokenizer, peft_config=adapters)
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
