"""Reasons why a machine with a GPU shows no usable one: its study must not silently run on CPU ranks."""

from __future__ import annotations

import os
from pathlib import Path

from autotune.interpreter import current
from autotune.problem.gpus import all_cards, driver_error, selected

_ROOT = Path("/")
_NVIDIA, _DISPLAY = "0x10de", ("0x0300", "0x0302")  # vendor and classes on the PCI bus: VGA and 3D controllers
_MOST_CARDS = 4096
# Error codes of nvml.h. Neither proves a GPU: images and login nodes often have the library without a card.
_DRIVER_NOT_LOADED, _LIBRARY_NOT_FOUND = 9, 12


def unseen_gpu() -> str:
    """Return why a GPU of this machine cannot be used; called if CUDA shows no GPU.

    The result is empty if there is no GPU, or if CUDA_VISIBLE_DEVICES hides all of them, as `""` and `-1` do.
    """
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
    """Check that a value of CUDA_VISIBLE_DEVICES hides all GPUs of any machine."""
    return not wanted.startswith(("GPU-", "MIG-")) and not selected(wanted, [""] * _MOST_CARDS)


def _not_for_cuda(wanted: str | None) -> str:
    cards = all_cards()
    if not cards:
        return ""
    if wanted is not None:
        return f"CUDA_VISIBLE_DEVICES={wanted} names none of the {len(cards)} GPUs"
    return "every GPU is in MIG mode and has no slice"


def _nvidia_sign(with_bus: bool) -> str:
    """Return a file that exists only on machines with an NVIDIA GPU, or a card on the PCI bus if `with_bus`.

    A card without NVIDIA's driver is found on the bus only.
    """
    for name in ("nvidia0", "nvidiactl", "nvhost-gpu"):  # the last is a Jetson's
        if (_ROOT / "dev" / name).exists():
            return f"/dev/{name}"
    # WSL has /dev/dxg for any vendor's GPU; NVIDIA's driver on Windows adds the library.
    if (_ROOT / "dev/dxg").exists() and (_ROOT / "usr/lib/wsl/lib/libnvidia-ml.so.1").exists():
        return "/dev/dxg"
    for device in sorted((_ROOT / "sys/bus/pci/devices").glob("*")) if with_bus else ():
        if _says(device / "vendor") == _NVIDIA and _says(device / "class").startswith(_DISPLAY):
            return f"an NVIDIA card ({device.name} on the PCI bus)"
    return ""


def _torch_is_for_rocm() -> bool:
    """Check that torch is neither for CPUs nor for CUDA: a Ryzen's integrated graphics have /dev/kfd, too."""
    version = current().version("torch")
    return version is not None and current().cuda is None and not version.endswith("+cpu")


def _says(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
