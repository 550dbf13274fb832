"""GRPO of TRL with generation by transformers: prompts, rollouts, rewards and updates of a tiny model."""

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast, set_seed
from trl import GRPOConfig, GRPOTrainer, TrlParser

WORDS = ["<pad>", "<eos>", *(f"w{at}" for at in range(254))]


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of whole words."""
    made = Tokenizer(models.WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def reward(completions: list[str], **others: object) -> list[float]:
    """Return the share of distinct words."""
    return [len(set(text.split())) / max(len(text.split()), 1) for text in completions]


def main() -> None:
    """Train."""
    (args,) = TrlParser((GRPOConfig,)).parse_args_and_config()
    set_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        pad_token_id=0,
        eos_token_id=1,
    )
    prompts = Dataset.from_list([{"prompt": f"w{at % 200} w{at % 17} w{at % 5}"} for at in range(2048)])
    trainer = GRPOTrainer(AutoModelForCausalLM.from_config(config), reward, args, prompts, processing_class=tokenizer())
    trainer.train()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
