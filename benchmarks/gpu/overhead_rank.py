"""A rank that takes its device, meets its peers, and after each thing that loads something counts the device's bytes."""

from __future__ import annotations

import os
from typing import Any

from autotune.problem.nvml import bytes_of, free_by_uuid, open_nvml

Moment = dict[str, Any]  # bytes by who says so


def child(spec: dict[str, Any]) -> list[Moment]:
    before = free_by_uuid()  # before CUDA is woken
    import torch
    import torch.distributed

    from autotune.rank.devices import make_device

    dist: Any = torch.distributed  # whose FileStore is no export of it by its own annotations
    device = make_device(spec["device"])
    device.setup(0, None, 1)  # every rank has the one GPU
    uuid = getattr(device, "uuid", "") or next(iter(before), "")
    moments: list[Moment] = []

    def look(moment: str) -> None:
        device.synchronize()
        found: Moment = {"moment": moment}
        if spec["device"] == "cuda":
            found |= inside(torch)
        found |= by_nvml(uuid, before)
        if dist.is_initialized():
            found["ours"] = device.joined().get("overhead_bytes")
        moments.append(found)

    look("context")
    meeting = dist.FileStore(spec["store"], spec["world"])
    dist.init_process_group(device.backend, store=meeting, rank=spec["rank"], world_size=spec["world"])
    place = device.torch_device()
    dist.all_reduce(torch.ones(1, device=place))
    look("first all_reduce")
    dist.all_reduce(torch.ones(2**24, device=place))
    look("all_reduce of 64 MiB")
    square = torch.ones(1024, 1024, device=place, dtype=torch.bfloat16, requires_grad=True)
    (square @ square).float().softmax(-1).sum().backward()
    look("matrix products")
    dist.barrier()  # nobody leaves while another counts
    return moments


def inside(torch: Any) -> Moment:
    free, total = torch.cuda.mem_get_info()
    reserved = torch.cuda.memory_reserved()
    return {"reserved": reserved, "total": total, "free": free, "total - free - reserved": total - free - reserved}


def by_nvml(uuid: str, before: dict[str, int]) -> Moment:
    """Both versions of the memory call side by side, and this process's bytes."""
    lib = open_nvml()
    if lib is None or not uuid:
        return {}
    handle = lib.nvmlDeviceGetHandleByUUID(uuid)
    one = lib.nvmlDeviceGetMemoryInfo(handle)
    found = {"v1 total": int(one.total), "v1 used": int(one.used), "v1 free": int(one.free)}
    try:
        two = lib.nvmlDeviceGetMemoryInfo(handle, lib.nvmlMemory_v2)
        found |= {"v2 total": int(two.total), "v2 reserved": int(two.reserved), "v2 used": int(two.used)}
        found["v2 free"] = int(two.free)
    except lib.NVMLError:  # before R510
        pass
    found["device less free by"] = before.get(uuid, 0) - found["v1 free"]
    return found | {"process": bytes_of(os.getpid(), uuid)}
