"""What a CPU rank says of its memory."""

import resource

import pytest
import torch

from autotune.rank import devices
from autotune.util.units import MIB


def test_two_high_waters_of_different_times_are_not_more_than_the_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    device, limits = devices.CpuDevice(), [resource.RLIM_INFINITY]
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: limits.append(pair[0]))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limits[-1], limits[0]))
    status = {"VmData": 600, "RssAnon": 300, "VmHWM": 1900, "RssFile": 100, "RssShmem": 0}
    monkeypatch.setattr(devices, "_status", lambda: {key: size * MIB for key, size in status.items()})
    device.setup(0, 2000 * MIB, torch.get_num_threads())
    monkeypatch.setattr(device, "note", lambda: None)  # samples this process, which earlier tests have grown
    assert device.peaks()["data_bytes"] == 2000 * MIB, "1800 once, and 300 untouched now"
    device.lift_cap()
    assert limits[1] == 2000 * MIB != limits[2]
    assert device.peaks()["data_bytes"] == 2100 * MIB
