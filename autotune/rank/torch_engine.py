"""Engine of a reference trial: torch's own DistributedDataParallel or FSDP2 behind DeepSpeed's interface.

Settings of FSDP2 are those of accelerate's plugin (accelerate 1.15, utils/fsdp_utils.py, `fsdp2_prepare_model`): one
group per class of the model's `_no_split_modules`, weights in fp32, `param_dtype` and `reduce_dtype` of the job's
precision, autocast around the forward, and no reduction before the last micro-batch of a step.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Container
from functools import partial
from typing import Any

import torch

from autotune.problem.job import Job
from autotune.problem.training_trace import MOST_STEPS
from autotune.rank.ds_config import may_skip_parameters, torch_optimizer
from autotune.rank.model_builder import DTYPES, build_model, enable_checkpointing, replace_loss


class TorchEngine:
    """The parts of DeepSpeed's engine that `ModelRank` and `TraceRecorder` use, for a named model.

    Args:
        config: the trial's DeepSpeed config, which gives stage, optimizer and clipping.
    """

    def __init__(self, job: Job, device: torch.device, config: dict[str, Any], *, checkpointing: bool) -> None:
        self.world = torch.distributed.get_world_size()
        self._stage = int(config["zero_optimization"].get("stage", 0))
        self._clipping = float(config.get("gradient_clipping", 0.0))
        self._autocast = partial(torch.autocast, device.type, DTYPES[job.precision], enabled=job.precision != "fp32")
        self._is_mixed, self._boundary, self._micro_batch, self._accumulation = job.precision != "fp32", True, 1, 1
        self._steps = 0
        self._norm: Any = None  # of the last step's gradients
        # The base weights of an adapter stay as they are loaded. All trained weights are fp32, like DeepSpeed's masters.
        loaded = job if job.lora is not None else dataclasses.replace(job, precision="fp32")
        shard = partial(_shard, job=job, device=device) if self._stage == 3 else None
        self.module: Any = build_model(loaded, device, {}, shard)
        replace_loss(self.module, job)
        if checkpointing:
            enable_checkpointing(self.module)
        trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        for parameter in trained:
            rounded = parameter.detach().to(DTYPES[job.precision])  # DeepSpeed's masters are copies of 16-bit weights
            if parameter.dtype == torch.float32:
                parameter.detach().copy_(rounded)
            else:
                parameter.data = rounded.float()
        if job.compiled:
            self.module.compile()
        self._model: Any = self.module
        if self._stage == 0 and self.world > 1:
            ids = [device.index] if device.type == "cuda" else None
            skips = may_skip_parameters(job)
            self._model = torch.nn.parallel.DistributedDataParallel(
                self.module, device_ids=ids, find_unused_parameters=skips
            )
        found = torch_optimizer(config["optimizer"])
        assert found is not None  # `why_no_reference`
        self.optimizer: Any = getattr(torch.optim, found[0])(trained, **found[1])
        self._trained = trained

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward."""
        with self._autocast():
            return self._model(*args, **kwargs)

    def set_train_micro_batch_size(self, micro_batch: int) -> None:
        """Set the samples of a forward on this rank."""
        self._micro_batch = micro_batch

    def set_train_batch_size(self, batch: int) -> None:
        """Set the samples of an optimizer step over all ranks."""
        self._accumulation = batch // (self._micro_batch * self.world)

    def gradient_accumulation_steps(self) -> int:
        """Return the micro-batches of an optimizer step."""
        return self._accumulation

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Note whether the coming micro-batch is the last of its step. Ranks reduce gradients only then."""
        self._boundary = is_boundary
        if self._stage == 3:
            self._model.set_requires_gradient_sync(is_boundary)
        elif self.world > 1:
            self._model.require_backward_grad_sync = is_boundary  # as its `no_sync` does

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return True in the last micro-batch of a step."""
        return self._boundary

    def backward(self, loss: Any) -> None:
        """Add the gradients of one micro-batch."""
        (loss / self._accumulation).backward()

    def step(self) -> None:
        """Run the optimizer at the end of a step. DeepSpeed computes a norm in each step, torch only to clip or to trace."""
        if not self._boundary:
            return
        if self._clipping:
            self._norm = torch.nn.utils.clip_grad_norm_(self._trained, self._clipping)
        elif self._steps < MOST_STEPS:
            self._norm = torch.nn.utils.get_total_norm([p.grad for p in self._trained if p.grad is not None])
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._steps += 1

    def get_global_grad_norm(self) -> Any:
        """Return the norm of the last step's gradients, before clipping. Every rank must call this."""
        return self._norm.full_tensor() if hasattr(self._norm, "full_tensor") else self._norm

    def zero_optimization_stage(self) -> int:
        """Return the stage that shards alike: 0 for DDP, 3 for FSDP2."""
        return self._stage

    def zero_optimization(self) -> bool:
        """Return True: the engine keeps the norm with which it steps."""
        return True

    def bfloat16_enabled(self) -> bool:
        """Return False: weights are fp32."""
        return False

    def fp16_enabled(self) -> bool:
        """Return False: no loss is scaled."""
        return False

    def torch_autocast_enabled(self) -> bool:
        """Return True if products have fewer bits than weights."""
        return self._is_mixed


def _shard(model: Any, *, job: Job, device: torch.device) -> None:
    """Shard a model on the host with FSDP2, block by block, which moves it to the device.

    Raises:
        NotImplementedError: this torch cannot shard a model whose ranks may use different parameters.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    low = None if job.precision == "fp32" else DTYPES[job.precision]
    for parameter in model.parameters():
        if parameter.requires_grad:  # adapters on 16-bit weights; shards keep the dtype that they are made with
            parameter.data = parameter.data.float()
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    how: dict[str, Any] = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(param_dtype=low, reduce_dtype=low)}
    blocks = set(getattr(model, "_no_split_modules", None) or ())
    for module in _groups(model, blocks):
        fully_shard(module, **how, reshard_after_forward=True)
    fully_shard(model, **how)
    if may_skip_parameters(job):  # the sizes of reductions would differ between ranks
        if not hasattr(model, "set_reduce_scatter_unused_params"):
            raise NotImplementedError(f"FSDP2 of torch {torch.__version__} hangs if ranks use different parameters")
        model.set_reduce_scatter_unused_params(True)


def _groups(model: Any, blocks: Container[str]) -> list[Any]:
    """Return the modules of these classes, inner ones first, without those that share a weight with the rest of the model.

    FSDP2 takes all modules of a tied weight in one group only, which is the root's (BERT's embeddings and its head).
    """

    def uses(module: Any) -> Counter[int]:
        return Counter(id(weight) for part in module.modules() for weight in part.parameters(recurse=False))

    found = [module for module in model.modules() if type(module).__name__ in blocks and module is not model]
    everywhere = uses(model)
    return [one for one in reversed(found) if all(everywhere[key] == times for key, times in uses(one).items())]
