"""Without a GPU that can be used, CPU ranks are used only if they are asked for; the error names the reason."""

from pathlib import Path

import pytest

from autotune.commands import doctor
from autotune.errors import UserError
from autotune.problem import nvml
from autotune.problem.hardware import detect
from autotune.util.interpreter import OWN, Interpreter
from tests.fake_driver import DRIVER_NOT_LOADED, LIB_RM_VERSION_MISMATCH, Card, Driver, Slice

CPU = "; add --device cpu for CPU ranks, call `autotune plan --gpu NAME`, or see `autotune doctor`"
NONE = f"found no GPU on this machine{CPU}"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root of a machine without a GPU."""
    monkeypatch.setattr(nvml, "_ROOT", tmp_path)
    return tmp_path


@pytest.fixture
def no_library(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One without NVML."""
    import pynvml

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "CDLL", lambda name: (_ for _ in ()).throw(OSError(name)))
    return root


def there(root: Path, *names: str, text: str = "") -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def card_on_the_bus(root: Path, vendor: str = "0x10de", kind: str = "0x030200") -> None:
    there(root, "sys/bus/pci/devices/0000:01:00.0/vendor", text=f"{vendor}\n")
    there(root, "sys/bus/pci/devices/0000:01:00.0/class", text=f"{kind}\n")


def failing(driver: Driver, code: int) -> None:
    driver.cards = [Card("NVIDIA GeForce RTX 3090", 24)]
    driver.failing = {"nvmlInitWithFlags": code}
    driver.write()


def refused(interpreter: Interpreter = OWN) -> str:
    with pytest.raises(UserError) as caught:
        detect("auto", None, interpreter=interpreter)
    return str(caught.value)


def test_an_update_has_left_the_old_module_running(driver: Driver, root: Path) -> None:
    failing(driver, LIB_RM_VERSION_MISMATCH)
    said = refused()
    assert said.startswith("found no GPU that can be used: NVIDIA's driver does not answer (RM has detected an NVML/RM")
    assert said.endswith(CPU)
    assert "\n" not in said
    assert detect("cpu", None).device == "cpu"


@pytest.mark.parametrize("hidden", ["", "NoDevFiles", "0,0"])
def test_whoever_hides_all_gpus_gets_cpu_ranks(
    driver: Driver, root: Path, hidden: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(driver, LIB_RM_VERSION_MISMATCH)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert refused() == NONE
    driver.failing = {}
    driver.write()
    assert refused() == NONE, "the driver answers, too"


def test_a_library_without_its_module_is_no_gpu(driver: Driver, root: Path) -> None:
    """Images and login nodes have NVML and no card."""
    failing(driver, DRIVER_NOT_LOADED)
    assert refused() == NONE
    card_on_the_bus(root, vendor="0x8086")
    assert refused() == NONE, "another maker's"
    card_on_the_bus(root, kind="0x040300")
    assert refused() == NONE, "NVIDIA's, but a sound device"
    card_on_the_bus(root)
    assert refused() == (
        "found no GPU that can be used: an NVIDIA card (0000:01:00.0 on the PCI bus) is there, but NVIDIA's driver does "
        "not answer (Driver Not Loaded)" + CPU
    )


def test_without_nvml_a_machine_has_cpu_ranks(no_library: Path) -> None:
    card_on_the_bus(no_library)  # an old card for the screen
    there(no_library, "dev/dxg", "dev/dri/card0")  # WSL has the first for Intel's graphics
    assert refused() == NONE


@pytest.mark.parametrize(
    ("files", "sign"),
    [
        (["dev/nvidia0", "dev/nvidiactl"], "/dev/nvidia0"),
        (["dev/nvhost-gpu"], "/dev/nvhost-gpu"),
        (["dev/dxg", "usr/lib/wsl/lib/libnvidia-ml.so.1"], "/dev/dxg"),
    ],
)
def test_a_device_without_nvml(no_library: Path, files: list[str], sign: str) -> None:
    there(no_library, *files)
    lacks = f"{sign} is there, but not NVML's library (a container needs NVIDIA_DRIVER_CAPABILITIES=compute,utility)"
    assert refused() == f"found no GPU that can be used: {lacks}{CPU}"
    finding = next(iter(doctor._gpus(OWN)))
    assert (finding.level, finding.found) == ("bad", lacks)
    with pytest.raises(UserError, match=f"found no GPU that can be used: {sign} is there"):
        detect("cuda", None)


def _ranks(torch: str | None, cuda: str | None = None) -> Interpreter:
    """An environment with this torch."""
    return Interpreter({"executable": "/other/bin/python", "versions": {"torch": torch}, "cuda": cuda})


@pytest.mark.parametrize(
    ("ranks", "tuned"),
    [
        (_ranks("2.8.0+rocm6.4"), False),
        (_ranks("2.6.0a0+git8d4926e"), False),  # as AMD builds it
        (_ranks("2.8.0+cpu"), True),
        (_ranks("2.8.0+cu128", "12.8"), True),
        (_ranks(None), True),
    ],
)
def test_an_amd_gpu_that_training_would_use(no_library: Path, ranks: Interpreter, tuned: bool) -> None:
    """A Ryzen's graphics have /dev/kfd, too: what torch is built for decides."""
    assert refused(ranks) == NONE, "no such device"
    there(no_library, "dev/kfd")
    if tuned:
        assert refused(ranks) == NONE
    else:
        assert (
            refused(ranks)
            == f"found no GPU that can be used: /dev/kfd is there, an AMD GPU, and only NVIDIA's are tuned{CPU}"
        )


def test_cards_of_which_none_is_left(driver: Driver, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert refused() == NONE, "a driver without a card"
    driver.cards = [Card("NVIDIA GeForce RTX 3090", 24), Card("NVIDIA GeForce RTX 3090", 24)]
    driver.write()
    for wanted in ("2", "GPU-nobodys"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", wanted)
        assert (
            refused() == f"found no GPU that can be used: CUDA_VISIBLE_DEVICES={wanted} names none of the 2 GPUs{CPU}"
        )
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    driver.cards = [Card("NVIDIA A100-SXM4-40GB", 40, mig=True)]
    driver.write()
    assert "every GPU is in MIG mode and has no slice" in refused()
    driver.cards[0].slices = [Slice("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 4.75)]
    driver.write()
    assert detect("auto", None).device == "cuda"
