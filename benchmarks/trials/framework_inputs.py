"""A tiny model, its tokenizer, and data, as the frameworks take them: `python framework_inputs.py FOLDER`.

Run in the environment that will read them, since a newer transformers writes files that an older one does not read. It needs
nothing but transformers and tokenizers.
"""

import json
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

ROWS = 4000
SENTENCE = "the tuner measures what people train and says how fast it runs on which machine with how much memory left"
# What axolotl and LLaMA-Factory put around a row: else its bytes alone would fill a sequence.
AROUND = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request. "
    "### Instruction: ### Response: You are a helpful assistant. Alibaba Cloud Qwen created by system user"
)
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORDS = SENTENCE.split()
chosen = random.Random(0)


def text(fewest: int, most: int) -> str:
    return " ".join(chosen.choice(WORDS) for _ in range(chosen.randint(fewest, most)))


def make_model(folder: Path) -> None:
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    raw.train_from_iterator([f"{AROUND} {text(200, 200)}" for _ in range(50)], trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=raw,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        model_max_length=512,
        chat_template=TEMPLATE,
    ).save_pretrained(folder)
    shape: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4}
    config = Qwen2Config(
        vocab_size=2048,
        **shape,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)


def write_rows(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def make_data(folder: Path) -> None:
    alpaca = [{"instruction": text(5, 20), "input": "", "output": text(10, 60)} for _ in range(ROWS)]
    write_rows(folder / "alpaca.jsonl", alpaca)
    chats = [
        [{"role": "user", "content": row["instruction"]}, {"role": "assistant", "content": row["output"]}]
        for row in alpaca
    ]
    write_rows(folder / "messages" / "train.jsonl", [{"messages": chat} for chat in chats])
    pairs = [{"prompt": text(8, 8), "chosen": text(8, 24), "rejected": text(8, 24)} for _ in range(ROWS)]
    write_rows(folder / "pairs" / "train.jsonl", pairs)
    known = {"local": {"file_name": "alpaca.jsonl", "formatting": "alpaca"}}
    (folder / "dataset_info.json").write_text(json.dumps(known))


if __name__ == "__main__":
    make_model(Path(sys.argv[1]) / "model")
    make_data(Path(sys.argv[1]))
