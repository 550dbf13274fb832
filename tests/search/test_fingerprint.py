import dataclasses
import hashlib
import json
from importlib import metadata, util
from pathlib import Path
from types import SimpleNamespace

import pytest

from autotune.commands.setup import study_name
from autotune.problem.hardware import detect, named_hardware
from autotune.problem.job import Job, Script, ScriptProfile
from autotune.search import fingerprint as module
from autotune.search.fingerprint import (
    changes,
    differences,
    fingerprint,
    identity,
    measured_under,
    merged_fingerprint,
    other_variables,
    package_versions,
)
from autotune.util import inquiry
from tests.conftest import make_job


def test_every_leaf_that_differs_is_named() -> None:
    assert differences({"a": {"b": 1}, "c": 2}, {"a": {"b": 2}, "c": 2}) == ["a.b: 1 -> 2"]
    assert differences({"a": [1, [2, 3]]}, {"a": (1, (2, 4), 5)}) == ["a.1.1: 3 -> 4", "a.2: null -> 5"]
    assert differences({"a": [1, [2, 3]]}, {"a": (1, (2, 4))}) == ["a.1.1: 3 -> 4"]
    assert differences({"a": [1]}, {"a": (1,)}) == []
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


# -- what it was measured under ------------------------------------------------------------------------------------------


def test_threads_and_the_variables_that_count_are_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    for name, value in (
        ("NCCL_ALGO", "Ring"),
        ("PYTORCH_ALLOC_CONF", "a:b"),
        ("HOME", "/h"),
        ("CUDA_VISIBLE_DEVICES", "1"),
    ):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("NCCL_PROTO", "")
    mark = fingerprint(make_job(), detect("cpu", 2))
    assert mark["threads_per_rank"] == 3
    ours = {"NCCL_ALGO": "Ring", "PYTORCH_ALLOC_CONF": "a:b"}
    assert ours.items() <= mark["environment"].items()
    assert not {"HOME", "CUDA_VISIBLE_DEVICES", "NCCL_PROTO", "OMP_NUM_THREADS"} & mark["environment"].keys()
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert changes(mark, fingerprint(make_job(), detect("cpu", 2))) == [
        'environment.NCCL_ALGO: "Ring" -> "Tree"',
        'environment.PYTORCH_ALLOC_CONF: "a:b" -> null',
        "threads_per_rank: 3 -> 4",
    ]


def test_what_an_older_version_did_not_write_down_is_not_different() -> None:
    job, hardware = make_job(), detect("cpu", 2)
    old, now = identity(job, hardware), fingerprint(job, hardware)
    assert old.keys() == {"job", "hardware", "versions"}
    assert changes(old, now) == []
    assert changes(now, old) == []
    assert changes({**old, "versions": {**old["versions"], "torch": "1"}}, now)[0].startswith('versions.torch: "1" -> ')
    assert changes(old, fingerprint(make_job(seq_len=64), hardware)) == ["job.seq_len: 32 -> 64"]
    assert merged_fingerprint(old, now) == now
    driven = {**now, "versions": {**now["versions"], "driver": "550.1"}}
    assert changes(driven, now) == [], "a driver that does not answer today is unknown"
    assert merged_fingerprint(driven, now) == driven


def test_what_a_first_run_had_to_build_makes_no_other_job() -> None:
    """One tuner's environment has built what the other's has not."""
    hardware = detect("cpu", 2)
    job, built = (
        dataclasses.replace(make_job(), script=Script(("train.py",), ".", profile=ScriptProfile(trained=(1,), **ops)))
        for ops in ({"ops": ("FusedAdamBuilder",)}, {})
    )
    for old, new in ((job, built), (built, job)):
        before, now = fingerprint(old, hardware), fingerprint(new, hardware)
        assert changes(before, now) == []
        assert merged_fingerprint(before, now) == fingerprint(job, hardware), "and a launch elsewhere has it to build"
    assert changes(fingerprint(job, hardware), fingerprint(make_job(seq_len=64), hardware)) != []


def test_a_variable_that_changes_a_training_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    name, job, hardware = "DS_PIN_MEMORY_BACKEND", make_job(), detect("cpu", 2)
    monkeypatch.delenv(name, raising=False)
    bare = fingerprint(job, hardware)
    monkeypatch.setenv(name, "native")
    assert changes(bare, fingerprint(job, hardware)) == [f'environment.{name}: null -> "native"']
    assert other_variables(bare) == {name: (None, "native")}


def test_what_stands_before_a_command_is_what_is_watched_and_no_secret() -> None:
    theirs = {"NCCL_ALGO": "Ring", "PYTORCH_ALLOC_CONF": "a:b", "LD_PRELOAD": "/a b.so"}
    others = {"HOME": "/h", "HF_TOKEN": "hf_x", "NCCL_TOKEN": "x", "NCCL_A;reboot": "1", "NCCL_DEBUG": "INFO"}
    assert measured_under({"environment": {**theirs, **others}}) == theirs
    assert measured_under({}) == {}


def test_the_version_of_an_images_nccl_package_is_no_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVIDIA's images set NCCL_VERSION, which no library reads. Studies of earlier versions have recorded it."""
    monkeypatch.setenv("NCCL_VERSION", "2.28.3-1")
    job, hardware = make_job(), detect("cpu", 2)
    now = fingerprint(job, hardware)
    assert "NCCL_VERSION" not in now["environment"]
    earlier = {**now, "environment": {**now["environment"], "NCCL_VERSION": "2.27.1-1"}}
    assert changes(earlier, now) == changes(now, earlier) == []
    assert other_variables(earlier) == measured_under({"environment": {"NCCL_VERSION": "2.27.1-1"}}) == {}


def test_what_is_measured_under_does_not_name_another_study(monkeypatch: pytest.MonkeyPatch) -> None:
    before = identity(make_job(), detect("cpu", 2))
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert identity(make_job(), detect("cpu", 2)) == before


def test_another_optuna_makes_no_other_study(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that is measured depends on it; what it was is written down."""
    job, hardware = make_job(), detect("cpu", 2)
    before, name = fingerprint(job, hardware), study_name(job, hardware)
    real = metadata.version
    monkeypatch.setattr(inquiry, "version", lambda package: "9.1" if package == "optuna" else real(package))
    now = fingerprint(job, hardware)
    assert now["versions"]["optuna"] == "9.1" != before["versions"]["optuna"]
    assert changes(before, now) == []
    assert merged_fingerprint(before, now) == now
    assert study_name(job, hardware) == name
    monkeypatch.setattr(inquiry, "version", lambda package: "9.1" if package == "torch" else real(package))
    assert [line.partition(":")[0] for line in changes(before, fingerprint(job, hardware))] == ["versions.torch"]
    assert study_name(job, hardware) != name


def test_studies_that_were_named_by_optunas_version_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until 0.2.0 the version was in the name, and 5.0.0 was the only one that could be installed."""
    job, hardware = make_job(), detect("cpu", 2)
    monkeypatch.setattr(inquiry, "version", lambda package: "5.0.0" if package == "optuna" else "1.0")
    machine = {key: hardware.to_json()[key] for key in ("device", "name", "count", "memory_cap_bytes")}
    old = {"job": job.to_json(), "hardware": machine, "versions": package_versions()}
    key = hashlib.sha256(json.dumps(old, sort_keys=True).encode()).hexdigest()[:6]
    for version in ("5.0.0", "5.1.0"):
        monkeypatch.setattr(inquiry, "version", lambda package, v=version: v if package == "optuna" else "1.0")
        assert study_name(job, hardware).rpartition("-")[2] == key


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("cuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n", {"cuda": "12.8", "nccl": "of cu12"}),
        ("cuda = '13.0'\n", {"cuda": "13.0", "nccl": "of cu13"}),
        ("cuda: Optional[str] = None\n", {}),
        ("", {}),
    ],
)
def test_the_driver_and_what_torch_is_built_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, found: dict
) -> None:
    (tmp_path / "version.py").write_text(text)
    monkeypatch.setattr(util, "find_spec", lambda name: SimpleNamespace(origin=str(tmp_path / "__init__.py")))
    monkeypatch.setattr(inquiry, "version", lambda package: f"of {package.rpartition('-')[2]}")

    lib = SimpleNamespace(nvmlSystemGetDriverVersion=lambda: b"550.54.15")
    monkeypatch.setattr(module, "open_nvml", lambda: lib)
    assert module.driver_versions() == {"driver": "550.54.15", **found}
    mark = fingerprint(make_job(), named_hardware("a100-80gb", 2))
    assert mark["versions"].items() >= {"driver": "550.54.15", **found}.items()
    assert "driver" not in fingerprint(make_job(), detect("cpu", 2))["versions"], "CPU ranks do not ask it"


def test_variables_that_the_script_reads_are_compared_where_both_know_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def mark(read: dict[str, str | None]) -> dict:
        profile = {"environment": read} if read else {}
        return fingerprint(
            make_job(script=Script(("train.py",), ".", profile=ScriptProfile.from_json(profile))), detect("cpu", 2)
        )

    before, now = mark({"BATCH_SIZE": "2", "LR": "1"}), mark({"BATCH_SIZE": "4", "EPOCHS": None})
    assert changes(before, now) == ["BATCH_SIZE is 4 instead of 2"]
    assert changes(before, mark({})) == changes(mark({}), now) == []
    assert merged_fingerprint(before, now)["job"]["script"]["profile"]["environment"] == {
        "BATCH_SIZE": "4",
        "EPOCHS": None,
    }
    monkeypatch.setenv("LR", "1")
    monkeypatch.delenv("BATCH_SIZE", raising=False)
    assert other_variables(before) == {"BATCH_SIZE": ("2", None)}


def test_findings_that_were_stored_before_profiles_had_a_version_are_the_same() -> None:
    script = Script(("train.py",), ".", profile=ScriptProfile(micro_batch=2, trained=(1,)))
    now = json.loads(json.dumps(fingerprint(make_job(script=script), detect("cpu", 2))))
    former = {"micro_batch": 2, "trained": [1], "frozen": 0, "model": "Net", "saved_bytes_per_sample": None}
    before = {**now, "job": {**now["job"], "script": {**now["job"]["script"], "profile": former}}}
    assert changes(before, now) == []
    assert Job.from_json(before["job"]) == Job.from_json(now["job"])
    with pytest.raises(ValueError, match="newer"):
        ScriptProfile.from_json({"version": 3})
