import dataclasses
from importlib import metadata

import pytest

from autotune.problem.hardware import detect
from autotune.search.fingerprint import differences, fingerprint, package_versions
from tests.conftest import make_job


def test_every_leaf_that_differs_is_named() -> None:
    assert differences({"a": {"b": 1}, "c": 2}, {"a": {"b": 2}, "c": 2}) == ["a.b: 1 -> 2"]
    assert differences({"a": 1}, {"b": {"c": 2}}) == ["a: 1 -> null", 'b: null -> {"c": 2}']
    (line,) = differences({"a": "x" * 100}, {"a": None})
    assert len(line) < 80


def test_a_fingerprint_is_of_job_machine_and_packages() -> None:
    hardware = detect("cpu", 2)
    mark = fingerprint(make_job(), hardware)
    booted = dataclasses.replace(hardware, memory_bytes=hardware.memory_bytes - 4096)
    assert fingerprint(make_job(), booted) == mark, "main memory differs a little from boot to boot"
    assert differences(mark, fingerprint(make_job(seq_len=64), hardware)) == ["job.seq_len: 32 -> 64"]
    capped = dataclasses.replace(hardware, memory_cap_bytes=2**30)
    assert differences(mark, fingerprint(make_job(), capped)) == ["hardware.memory_cap_bytes: null -> 1073741824"]


def test_a_package_that_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == "deepspeed":
            raise metadata.PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(metadata, "version", version)
    assert package_versions() == {"torch": "1.0", "deepspeed": "missing", "transformers": "1.0", "optuna": "1.0"}
