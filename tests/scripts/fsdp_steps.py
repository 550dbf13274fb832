"""Three optimizer steps of a tiny model on CPU ranks, with FSDP2 of accelerate or with DeepSpeed; prints the losses.

Arguments: model, micro-batch, accumulation, and a DeepSpeed config. Without the last, accelerate's variables say how to shard.
"""

import json
import sys

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


def main() -> None:
    micro_batch, accumulation = map(int, sys.argv[2:4])
    model = made(sys.argv[1])
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=5e-2)
    if len(sys.argv) > 4:
        import deepspeed

        model, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=sys.argv[4])

        def step(loss: torch.Tensor) -> None:
            model.backward(loss)
            model.step()
    else:
        from accelerate import Accelerator
        from accelerate.state import PartialState
        from accelerate.utils import DistributedType

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
    if rank == 0:
        print(json.dumps({"model": type(model).__name__, "losses": losses}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
