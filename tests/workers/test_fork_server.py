"""What the fork server does once, so that no rank does it again."""

import sys
from types import SimpleNamespace

import pytest

from autotune.workers import fork_server


def test_the_processor_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def get_cpu_info() -> dict[str, str]:
        asked.append(1)
        return {"arch": "X86_64"}

    stub = SimpleNamespace(get_cpu_info=get_cpu_info)
    monkeypatch.setitem(sys.modules, "cpuinfo", stub)
    fork_server._cache_cpuinfo()
    first = stub.get_cpu_info()
    first["arch"] = "changed by whoever asked"
    assert stub.get_cpu_info() == {"arch": "X86_64"}
    assert len(asked) == 1


def test_a_processor_that_cannot_be_known_is_deepspeeds_to_complain_of(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ValueError("no answer")

    stub = SimpleNamespace(get_cpu_info=fail)
    monkeypatch.setitem(sys.modules, "cpuinfo", stub)
    fork_server._cache_cpuinfo()
    assert stub.get_cpu_info is fail
