"""Three optimizer steps of each of several tiny models on CPU ranks, with FSDP2 of accelerate or with DeepSpeed; prints the losses.

Arguments: micro-batch, accumulation, and the trainings as a JSON list of objects: `model`, a DeepSpeed `config`, and `variables` of
accelerate, which say how to shard where there is no config.
"""

import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, set_seed


def made(kind: str) -> torch.nn.Module:
    set_seed(0)
    shape = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    if kind == "experts":
        return AutoModelForCausalLM.from_config(MixtralConfig(**shape, num_key_value_heads=4, num_local_experts=4))
    model = AutoModelForCausalLM.from_config(LlamaConfig(**shape))
    if kind != "adapters":
        return model
    return get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))


def trained(kind: str, config: str | None, micro_batch: int, accumulation: int) -> dict[str, Any]:
    """The engine's class, and the losses."""
    model = made(kind)
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=5e-2)
    if config is not None:
        import deepspeed

        model, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

        def step(loss: torch.Tensor) -> None:
            model.backward(loss)
            model.step()
    else:
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState, PartialState
        from accelerate.utils import DistributedType

        AcceleratorState._reset_state()  # of the training before, which may have another precision
        PartialState(cpu=True)  # accelerate calls fully_shard on accelerators alone, but torch shards on CPU ranks too
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        accelerator = Accelerator(gradient_accumulation_steps=accumulation)
        model, optimizer = accelerator.prepare(model, optimizer)

        def step(loss: torch.Tensor) -> None:
            with accelerator.accumulate(model):
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()

    ranks, rank = dist.get_world_size(), dist.get_rank()
    rows = torch.randint(0, 64, (3 * accumulation, ranks, micro_batch, 16), generator=torch.Generator().manual_seed(1))
    losses = []
    for batch in rows[:, rank]:
        loss = model(input_ids=batch, labels=batch).loss
        step(loss)
        dist.all_reduce(mean := loss.detach().float() / ranks)
        losses.append(mean.item())
    return {"model": type(model).__name__, "losses": losses}


def main() -> None:
    micro_batch, accumulation = map(int, sys.argv[1:3])
    found = []
    for training in json.loads(sys.argv[3]):
        os.environ.update(training.get("variables", {}))
        found.append(trained(training["model"], training.get("config"), micro_batch, accumulation))
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
