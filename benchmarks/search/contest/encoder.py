"""A BERT classifier on texts of many lengths, whose loader `deepspeed.initialize` makes."""

import argparse
from typing import Any

import deepspeed
import torch
import torch.distributed
from torch.nn.utils.rnn import pad_sequence
from transformers import BertConfig, BertForSequenceClassification

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--steps", type=int, default=100_000)
deepspeed.add_config_arguments(parser)
arguments = parser.parse_args()


def collate(texts: list[tuple[torch.Tensor, int]]) -> dict[str, torch.Tensor]:
    ids = pad_sequence([ids for ids, _ in texts], batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": torch.tensor([label for _, label in texts])}


torch.manual_seed(0)
lengths = torch.randint(16, 97, (8192,)).tolist()
texts = [(torch.randint(1, 4096, (length,)), length % 2) for length in lengths]
shape: dict[str, Any] = {"vocab_size": 4096, "hidden_size": 192, "intermediate_size": 768, "num_hidden_layers": 4}
model = BertForSequenceClassification(BertConfig(**shape, num_attention_heads=4))
engine, _, loader, _ = deepspeed.initialize(
    args=arguments, model=model, model_parameters=model.parameters(), training_data=texts, collate_fn=collate
)
while engine.global_steps < arguments.steps:
    for batch in loader:
        engine.backward(engine(**{name: value.to(engine.device) for name, value in batch.items()}).loss)
        engine.step()
        if engine.global_steps >= arguments.steps:
            break
torch.distributed.destroy_process_group()
