"""Train one step with the facts of a fault, and compare its weights with the same step in plain torch.

Run under torchrun: `faulty.py FACTS`, a JSON list of objects with facts as `autotune/problem/faults.py` names them. For each, rank 0
prints `APART`, the distance between the weight update and that of plain torch on the rows of all ranks, over the latter's norm.
"""

import copy
import json
import sys

import deepspeed
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.utils import groups

MICRO_BATCH = 4
# DeepSpeed builds this op at its first use; gloo alone suffices, and a lock that a killed build left would stop the ranks.
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None


class Model(torch.nn.Module):
    """Two layers; the first is used twice, and the loss stands beside the output, if a fault is about that."""

    def __init__(self, twice: bool, own_loss: bool) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(32, 32), torch.nn.Linear(32, 8)
        self.twice, self.own_loss = twice, own_loss

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = torch.tanh(self.first(x))
        x = self.last(torch.tanh(self.first(x)) if self.twice else x)
        loss = x.float().pow(2).mean()
        return (loss, x) if self.own_loss else (loss,)


def config_of(facts: dict) -> dict:
    zero = {"stage": facts["stage"], "reduce_scatter": facts.get("reduce_scatter", True)}
    if facts.get("offload_optimizer", "none") != "none":
        zero["offload_optimizer"] = {"device": facts["offload_optimizer"]}
    found = {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": facts.get("accumulation", 1),
        "gradient_clipping": 0.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": facts.get("precision") == "bf16"},
        "fp16": {"enabled": facts.get("precision") == "fp16", "initial_scale_power": 8},
    }
    return found | ({"data_types": {"grad_accum_dtype": one}} if (one := facts.get("grad_accum_dtype")) else {})


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer whose first two updates show both the size of a gradient and Adam's counter of steps."""
    return torch.optim.Adam(model.parameters(), lr=1.0, eps=1.0)  # an update large enough for bf16 to show it


def weights_of(model: torch.nn.Module, stage: int) -> list[torch.Tensor]:
    with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=stage == 3):
        return [p.detach().double().clone() for p in model.parameters()]


def apart(facts: dict) -> float:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Model(facts.get("module_reused", False), facts.get("backward_of_one_output", False))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.bfloat16())
    plain = copy.deepcopy(model).double()
    before = [p.detach().clone() for p in plain.parameters()]
    passes = facts.get("accumulation", 1) * facts.get("backwards_per_step", 1)
    data = torch.randn(passes, ranks, MICRO_BATCH, 32)
    scale = 0.1 if facts.get("grad_changed_by_hand") else 1.0
    parts = facts.get("backwards_per_step", 1)

    own = optimizer_of(plain)
    for rows in data:
        (plain(rows.flatten(0, 1).double())[0] / passes).backward()
    for p in plain.parameters():
        p.grad *= scale
    own.step()

    shares = facts.get("sequence_ranks", 1) > 1  # each rank's rows are its part of the sequences (Ulysses)
    groups.mpu = None
    if shares and parallel_state_sp._SEQUENCE_PARALLEL_GROUP is None:
        parallel_state_sp.initialize_sequence_parallel(ranks)
    made = {"model": model, "optimizer": optimizer_of(model), "mpu": parallel_state_sp if shares else None}
    engine, *_ = deepspeed.initialize(**made, config=config_of(facts))
    for number, rows in enumerate(data, 1):
        if facts.get("boundary_by_hand"):
            engine.set_gradient_accumulation_boundary(number == passes)
        x = rows[rank].to(next(model.parameters()).dtype)
        loss = engine(x)[0] / parts
        if facts.get("gathered_loss"):  # as `deepspeed_sp_compute_loss` of transformers does
            loss = torch.stack(differentiable.all_gather(loss)).mean()
        elif shares:
            loss = loss / ranks
        loss.backward() if facts.get("backward_of_one_output") else engine.backward(loss)
        if facts.get("grad_changed_by_hand"):
            for p in engine.parameters():
                if p.grad is not None:
                    p.grad *= scale
        if number % parts == 0 and (number == passes or not facts.get("boundary_by_hand")):
            engine.step()
    after = weights_of(engine.module, facts["stage"])
    theirs = torch.cat([(a - b).flatten() for a, b in zip(after, before, strict=True)])
    dist.barrier()
    ours = torch.cat([(p.detach() - b).flatten() for p, b in zip(plain.parameters(), before, strict=True)])
    return float((theirs - ours).norm() / ours.norm())


def main() -> None:
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True  # torch computes it on every CPU
    deepspeed.init_distributed("gloo")
    for facts in json.loads(sys.argv[1]):
        found = apart(facts)
        if dist.get_rank() == 0:
            print(f"APART {found:.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
