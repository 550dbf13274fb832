"""Without a GPU that can be used, CPU ranks are used only if they are asked for; the error names the driver's reason."""

import pytest

from autotune.errors import UserError
from autotune.problem.hardware import detect
from tests.fake_driver import DRIVER_NOT_LOADED, LIB_RM_VERSION_MISMATCH, Card, Driver, Slice

CPU = "; add --device cpu for CPU ranks, call `autotune plan --gpu NAME`, or see `autotune doctor`"
NONE = f"found no GPU on this machine{CPU}"


def refused() -> str:
    with pytest.raises(UserError) as caught:
        detect("auto", None)
    return str(caught.value)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (LIB_RM_VERSION_MISMATCH, "RM has detected an NVML/RM version mismatch"),
        (DRIVER_NOT_LOADED, "Driver Not Loaded"),
    ],
)
def test_a_driver_that_returns_an_error(driver: Driver, code: int, said: str) -> None:
    driver.cards = [Card("NVIDIA GeForce RTX 3090", 24)]
    driver.failing = {"nvmlInitWithFlags": code}
    driver.write()
    line = refused()
    assert line.startswith(f"found no GPU that can be used: NVIDIA's driver does not answer: {said}")
    assert line.endswith(CPU)
    assert "\n" not in line
    assert detect("cpu", None).device == "cpu"


def test_a_machine_without_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    import pynvml

    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "CDLL", lambda name: (_ for _ in ()).throw(OSError(name)))
    assert refused() == NONE


def test_cards_of_which_none_is_left(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    assert refused() == NONE, "a driver without a card"
    driver.show(Card("NVIDIA GeForce RTX 3090", 24), Card("NVIDIA GeForce RTX 3090", 24))
    for wanted in ("2", "GPU-nobodys"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", wanted)
        assert (
            refused() == f"found no GPU that can be used: CUDA_VISIBLE_DEVICES={wanted} names none of the 2 GPUs{CPU}"
        )
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    driver.show(Card("NVIDIA A100-SXM4-40GB", 40, mig=True))
    assert "every GPU is in MIG mode and has no slice" in refused()
    driver.cards[0].slices = [Slice("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 4.75)]
    driver.write()
    assert detect("auto", None).device == "cuda"
