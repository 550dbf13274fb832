"""Why a machine that has a GPU shows none that can be used: a study there must not silently become one of CPU ranks."""

from __future__ import annotations

import os
from pathlib import Path

from autotune.interpreter import current
from autotune.problem.gpus import all_cards, driver_error, selected

_ROOT = Path("/")
_NVIDIA, _DISPLAY = "0x10de", ("0x0300", "0x0302")  # vendor and classes on the PCI bus: VGA and 3D controllers
_MOST_CARDS = 4096
# nvml.h's numbers. Neither says that there is a GPU: images and login nodes often have the library and no card.
_DRIVER_NOT_LOADED, _LIBRARY_NOT_FOUND = 9, 12


def unseen_gpu() -> str:
    """What keeps a GPU of this machine from being used; an empty string where it has none, or where CUDA_VISIBLE_DEVICES
    hides all of them, as `""` and `-1` do. To be asked where CUDA shows no GPU."""
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is not None and _hides_all(wanted):
        return ""
    error = driver_error()
    if error is None:
        return _not_for_cuda(wanted)
    code = getattr(error, "value", None)  # an ImportError has none
    sign = _nvidia_sign(with_bus=code != _LIBRARY_NOT_FOUND)
    if code is not None and code not in (_DRIVER_NOT_LOADED, _LIBRARY_NOT_FOUND):
        return f"NVIDIA's driver does not answer ({error})"
    if sign and code == _LIBRARY_NOT_FOUND:
        return f"{sign} is there, but not NVML's library (a container needs NVIDIA_DRIVER_CAPABILITIES=compute,utility)"
    if sign:
        return f"{sign} is there, but NVIDIA's driver does not answer ({error})"
    if (_ROOT / "dev/kfd").exists() and _torch_is_for_rocm():
        return "/dev/kfd is there, an AMD GPU, and only NVIDIA's are tuned"
    return ""


def _hides_all(wanted: str) -> bool:
    """Whether a value of CUDA_VISIBLE_DEVICES leaves nothing of any machine."""
    return not wanted.startswith(("GPU-", "MIG-")) and not selected(wanted, [""] * _MOST_CARDS)


def _not_for_cuda(wanted: str | None) -> str:
    cards = all_cards()
    if not cards:
        return ""
    if wanted is not None:
        return f"CUDA_VISIBLE_DEVICES={wanted} names none of the {len(cards)} GPUs"
    return "every GPU is in MIG mode and has no slice"


def _nvidia_sign(with_bus: bool) -> str:
    """A file that only a machine with NVIDIA's GPU has; with_bus: a card without a driver of NVIDIA's is one, too."""
    for name in ("nvidia0", "nvidiactl", "nvhost-gpu"):  # the last is a Jetson's
        if (_ROOT / "dev" / name).exists():
            return f"/dev/{name}"
    # WSL has /dev/dxg for any maker's GPU; what lies beside it comes with the driver on Windows.
    if (_ROOT / "dev/dxg").exists() and (_ROOT / "usr/lib/wsl/lib/libnvidia-ml.so.1").exists():
        return "/dev/dxg"
    for device in sorted((_ROOT / "sys/bus/pci/devices").glob("*")) if with_bus else ():
        if _says(device / "vendor") == _NVIDIA and _says(device / "class").startswith(_DISPLAY):
            return f"an NVIDIA card ({device.name} on the PCI bus)"
    return ""


def _torch_is_for_rocm() -> bool:
    """By what it is not: a Ryzen's own graphics have /dev/kfd as well, and its torch is for CPUs or CUDA."""
    version = current().version("torch")
    return version is not None and current().cuda is None and not version.endswith("+cpu")


def _says(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
