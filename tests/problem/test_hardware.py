import contextlib

import pytest

from autotune.errors import UserError
from autotune.problem import hardware
from autotune.problem.hardware import Hardware, detect, facts_for, gpu_table, named_gpu, named_hardware
from autotune.units import GIB


class FakeNvml:
    def __init__(self, names: list[str], gib: int = 24) -> None:
        self.names, self.gib = names, gib

    def nvmlDeviceGetCount(self) -> int:
        return len(self.names)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        return 0

    def nvmlDeviceGetName(self, handle: int) -> str:
        return self.names[handle]

    def nvmlDeviceGetMemoryInfo(self, handle: int):  # type: ignore[no-untyped-def]
        return type("M", (), {"total": self.gib * GIB, "used": 0})


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml(["NVIDIA GeForce RTX 3090"] * 4)
    monkeypatch.setattr(hardware, "nvml", lambda: contextlib.nullcontext(fake))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return fake


def test_gpus_are_found_and_known(four_gpus: FakeNvml) -> None:
    found = detect("auto", None)
    assert (found.device, found.count, found.facts) == ("cuda", 4, "rtx3090")
    assert found.gpu_facts is not None
    assert found.gpu_facts.tflops == 71
    assert Hardware.from_json(found.to_json()) == found


def test_more_gpus_than_there_are_are_never_silently_fewer(
    four_gpus: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=r"found 4.*try --gpus 4"):
        detect("cuda", 8)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,GPU-abc,9,0")
    assert detect("cuda", None).count == 2
    with pytest.raises(UserError, match="found 2"):
        detect("auto", 3)


def test_without_a_gpu() -> None:
    with pytest.raises(UserError, match="--device cpu --gpus 2"):
        detect("auto", 2)
    with pytest.raises(UserError, match="no GPU found"):
        detect("cuda", None)
    assert detect("auto", None).device == "cpu"
    for bad in (0, -1):
        with pytest.raises(UserError, match="at least 1"):
            detect("cpu", bad)
    with pytest.raises(UserError, match="auto, cuda or cpu"):
        detect("tpu", 1)
    with pytest.raises(UserError, match="at most"):
        detect("cpu", 4096)


def test_caps_and_headroom() -> None:
    with pytest.raises(UserError, match="above the capacity"):
        detect("cpu", 2, memory_cap_bytes=2**50)
    capped = detect("cpu", 2, memory_cap_bytes=GIB, headroom=0.1)
    assert capped.capacity_bytes == GIB
    assert capped.ceiling_bytes == int(0.9 * GIB)


def test_the_table_of_gpus() -> None:
    assert len(gpu_table()) >= 20
    for name, row in gpu_table().items():
        assert named_gpu(name) is row
        assert row.memory_gib > 0
        assert row.tflops >= row.fp32_tflops / 2
    assert named_gpu("H100").name == "h100"
    assert named_gpu("NVIDIA A100").name == "a100-80gb"
    with pytest.raises(UserError, match="did you mean rtx3090"):
        named_gpu("rtx3091")
    assert named_hardware("rtx4090", 4).count == 4
    with pytest.raises(UserError):
        named_hardware("rtx4090", 0)
    assert facts_for("NVIDIA A100-SXM4-40GB", 40 * GIB).name == "a100-40gb"  # type: ignore[union-attr]
    assert facts_for("Voodoo 2", GIB) is None
