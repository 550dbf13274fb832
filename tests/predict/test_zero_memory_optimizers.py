"""What optimizers keep and take: by the config, and against torch's own where it runs here."""

import dataclasses
import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from autotune.predict.features import columns_of
from autotune.predict.trace import trace_job
from autotune.predict.zero_memory import STATE_BYTES, estimate_memory, muon_sizes, optimizer_of_trials
from autotune.problem.hardware import named_hardware
from autotune.problem.job import OPTIMIZERS, Job, Script, ScriptProfile
from autotune.problem.knobs import RequirementInputs, unscattered_for_muon
from benchmarks.predict.live_error import live_error
from tests.conftest import make_candidate, make_job
from tests.predict.recorded import SEQ_LEN, recorded_trace


def of_config(kind: str, **params: Any) -> tuple[float, float, bool]:
    one = optimizer_of_trials(make_job(base_config={"optimizer": {"type": kind, "params": params}}))
    return one.state_bytes, one.temporary_bytes, one.flattens


@pytest.mark.parametrize(
    ("kind", "params", "expected"),
    [
        ("AdamW", {}, (8, 0, True)),  # DeepSpeed's FusedAdam
        ("AdamW", {"torch_adam": True}, (8, 4, False)),
        ("AdamW", {"torch_adam": True, "fused": True}, (8, 0, False)),
        ("Adagrad", {}, (4, 8, False)),
        ("SGD", {"momentum": 0.9, "weight_decay": 0.1}, (4, 4, False)),
        ("Lion", {}, (4, 0, False)),
    ],
)
def test_the_users_own_optimizer(kind: str, params: dict[str, Any], expected: tuple[float, float, bool]) -> None:
    assert of_config(kind, **params) == expected


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_optimizers_by_name(kind: str) -> None:
    one = optimizer_of_trials(make_job(optimizer=kind))
    assert one.known
    assert one.state_bytes == STATE_BYTES[kind]
    assert one.flattens == (kind == "fused_adam")
    assert one.temporary_bytes == (8 if kind == "adagrad" else 0), "torch's own are fused where they can be"


@pytest.mark.parametrize(
    ("kind", "params"),
    [("AdamW", {"torch_adam": True}), ("Adagrad", {}), ("SGD", {"momentum": 0.9, "weight_decay": 0.1})],
)
def test_torchs_foreach_takes_what_is_said_of_it(kind: str, params: dict[str, Any]) -> None:
    import torch

    from tests.rank.live_rank import PeakTensors

    elements = 1000
    weights = [torch.nn.Parameter(torch.ones(elements)) for _ in range(3)]
    own = {name: value for name, value in params.items() if name != "torch_adam"}
    optimizer = getattr(torch.optim, kind)(weights, lr=0.1, foreach=True, **own)
    for _ in range(2):  # the first step makes the states
        for weight in weights:
            weight.grad = torch.ones(elements)
        with PeakTensors() as live:
            optimizer.step()
        taken = live.peak
    expected = of_config(kind, **params)[1]
    assert taken / (elements * len(weights)) == pytest.approx(expected, abs=0.1)


@pytest.mark.parametrize(
    ("kind", "states"), [("AdamW8bit", 2.03125), ("paged_adamw_8bit", 0), ("lion_8bit", 1.015625), ("Adafactor", 0)]
)
def test_states_that_are_not_as_wide_as_the_weights(kind: str, states: float) -> None:
    one = optimizer_of_trials(make_job(base_config={"optimizer": {"type": kind}}))
    assert one.known
    assert (one.state_bytes, one.follows_weights) == (states, False)


PLAIN = {"bf16": {"enabled": False}}


@pytest.mark.parametrize(("params", "temporary"), [({}, 4), ({"fused": True}, 0)])
def test_plain_torch_takes_foreach_unless_told(params: dict[str, Any], temporary: float) -> None:
    config = {**PLAIN, "optimizer": {"type": "AdamW", "params": params}}
    assert optimizer_of_trials(make_job(precision="bf16", base_config=config)).temporary_bytes == temporary
    assert optimizer_of_trials(make_job(precision="bf16", base_config=PLAIN)).temporary_bytes == 4
    assert not optimizer_of_trials(make_job(precision="bf16", base_config=config)).flattens


@pytest.mark.parametrize(("ranks", "optimizer", "expected"), [(1, "AdamW", 2 * 2), (2, "AdamW", 2 * 2)])
def test_plain_torch_keeps_all_in_the_weights_own_type(ranks: int, optimizer: str, expected: float) -> None:
    job = make_job(ranks, precision="bf16", seq_len=SEQ_LEN, base_config={**PLAIN, "optimizer": {"type": optimizer}})
    trace = recorded_trace(job)
    one = estimate_memory(job, trace, columns_of([make_candidate(0, 1)], job), "cuda")
    elements = sum(trace.parameters)
    assert one.terms["weights"][0] == 2 * elements
    assert (one.resident() - one.terms["weights"] - one.terms["gradients"])[0] == expected * elements
    assert one.terms["gradients"][0] == (2 * elements if ranks > 1 else 0), "DistributedDataParallel's buckets"
    at = one.moments.index("step")
    temporary = 2 if optimizer == "AdamW" else 0
    assert one.terms["copies"][at, 0] == (2 + temporary) * elements


def of_script(profile: dict[str, Any], ranks: int = 2, precision: str = "bf16", **job: Any) -> Job:
    script = Script(("train.py",), ".", profile=ScriptProfile.from_json(profile))
    return make_job(ranks, precision=precision, seq_len=SEQ_LEN, script=script, **job)


def torchs(kind: str, fused: bool | None = None, foreach: bool | None = None) -> dict[str, Any]:
    return {"client_optimizer": True, "torch_optimizer": {"class": kind, "fused": fused, "foreach": foreach}}


@pytest.mark.parametrize(
    ("profile", "expected"),
    [
        ({}, (0, False)),  # of an earlier version: taken for fused
        (torchs("AdamW"), (4, False)),
        (torchs("AdamW", fused=True), (0, False)),
        (torchs("AdamW", foreach=False), (0, False)),
        (torchs("Adagrad"), (8, False)),
        (torchs("SGD"), (0, False)),
        ({"optimizer": "FusedAdam"}, (0, True)),
        ({"optimizer": "DeepSpeedCPUAdam"}, (0, False)),
    ],
)
def test_a_scripts_own_optimizer(profile: dict[str, Any], expected: tuple[float, bool]) -> None:
    one = optimizer_of_trials(of_script(profile))
    assert (one.temporary_bytes, one.flattens) == expected


def test_a_scripts_own_optimizer_steps_whatever_the_config_names() -> None:
    config = {"optimizer": {"type": "AdamW"}}  # DeepSpeed's, which flattens
    assert not optimizer_of_trials(of_script(torchs("AdamW", fused=True), base_config=config)).flattens
    assert optimizer_of_trials(of_script({}, base_config=config)).flattens, "of which nothing is known but the config"
    assert not optimizer_of_trials(of_script({"optimizer": "FusedAdam"}, base_config=PLAIN)).flattens, (
        "nothing wraps it there"
    )


def in_the_step(profile: dict[str, Any], stage: int, device: str, precision: str = "fp32") -> float:
    """Bytes that come and go while it steps."""
    job = of_script(profile, 1, precision)
    candidate = make_candidate(stage, 1, sub_group_size=10**9)
    one = estimate_memory(job, recorded_trace(job), columns_of([candidate], job), device)
    return float(one.terms["copies"][one.moments.index("step"), 0])


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_what_a_scripts_own_optimizer_takes_on_a_gpu(stage: int) -> None:
    trace = recorded_trace(make_job(precision="fp32", seq_len=SEQ_LEN))
    stepped = sum(trace.parameters)
    fused, foreach = (in_the_step(torchs("AdamW", fused=one), stage, "cuda") for one in (True, None))
    # at stages 1 and 2 a second flat copy of the gradients was there before, as large as these
    assert foreach - fused == (0 if stage in (1, 2) else 4 * stepped)
    assert len({in_the_step(torchs("AdamW", fused=one), stage, "cpu") for one in (True, False, None)}) == 1


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_fused_adam_that_the_script_has_made_is_flattened_in_16_bits(precision: str) -> None:
    trace = recorded_trace(make_job(precision=precision, seq_len=SEQ_LEN))
    other, fused = (
        in_the_step(profile, 0, "cuda", precision)
        for profile in ({"optimizer": "FusedLamb"}, {"optimizer": "FusedAdam"})
    )
    assert fused - other == (0 if precision == "fp32" else 4 * sum(trace.parameters))


# -- Muon ----------------------------------------------------------------------------------------------------------------

MUON = {"optimizer": {"type": "Muon", "params": {"lr": 1e-3}}}


@pytest.mark.parametrize(
    ("stage", "out", "momentum"), [(0, "none", 4), (1, "none", 2 * 2), (2, "cpu", 4), (3, "none", 2)]
)
def test_muon_keeps_momentum_for_matrices_and_adams_states_for_the_rest(stage: int, out: str, momentum: int) -> None:
    job = make_job(2, model="llama-3.2-1b", precision="bf16", seq_len=2048, base_config=MUON)
    trace = trace_job(job)
    matrices = sum(muon_sizes(job, trace))
    rest = sum(trace.parameters) - matrices
    vocabulary, hidden = 128256, 2048
    assert vocabulary * hidden < rest < 1.001 * vocabulary * hidden, "the embedding, which is the head, and norms"
    candidate = make_candidate(stage, offload_optimizer=out) if stage else make_candidate()
    columns = columns_of([candidate], job)
    plain = dataclasses.replace(job, base_config={"optimizer": {"type": "SGD"}})
    ours, without = (estimate_memory(one, trace, columns, "cuda") for one in (job, plain))
    ranks = 2 if stage else 1
    states = (momentum * matrices + 8 * rest) / ranks
    less = 4 * sum(trace.parameters) / ranks  # SGD's
    name = "host" if out == "cpu" else "optimizer states"
    kept = ours.terms[name] - without.terms[name]
    assert kept[0] == pytest.approx(states - less, rel=1e-6)


COUNTED = json.loads((Path(__file__).parents[2] / "benchmarks/data/live_tensors_muon_cpu.json").read_text())["rows"]


@pytest.mark.slow
def test_muons_live_bytes_are_met_at_every_stage() -> None:
    """Blocks of at most 256 MiB, which Muon keeps between steps, are as large as these tiny models, and left to the interval.
    So is what it gathers in a step.
    """
    errors = [abs(live_error(row)) for row in COUNTED]
    assert len(errors) > 65
    assert statistics.median(errors) < 0.07
    assert statistics.quantiles(errors, n=10)[-1] < 0.5


def test_muon_steps_gpt2s_embedding_as_its_name_says() -> None:
    """DeepSpeed's rule reads names (deepspeed 0.19.8, __init__.py, `set_optimizer_flags`): `wte` and `wpe` are no `embed`."""
    job = make_job(2, model="gpt2", seq_len=1024, precision="bf16", base_config=MUON)
    vocabulary, positions, hidden = 50257, 1024, 768
    found = muon_sizes(job, trace_job(job))
    assert {vocabulary * hidden, positions * hidden} <= set(found)
    assert sum(found) == vocabulary * hidden + positions * hidden + 12 * 12 * hidden**2


def test_muon_at_stage_3_does_not_scatter() -> None:
    job = make_job(2, precision="bf16", base_config=MUON)
    assert make_candidate(3).ds_config(job)["zero_optimization"]["reduce_scatter"] is False
    assert "reduce_scatter" not in make_candidate(2).ds_config(job)["zero_optimization"]
    own = dataclasses.replace(job, base_config={**MUON, "zero_optimization": {"reduce_scatter": True}})
    circumstances = RequirementInputs.of(own, named_hardware("h100", 2))
    assert "reduce_scatter: false" in unscattered_for_muon(3, circumstances)
    assert not unscattered_for_muon(2, circumstances)
    assert not unscattered_for_muon(3, RequirementInputs.of(job, named_hardware("h100", 2)))
    quantized = dataclasses.replace(job, base_config={**MUON, "zero_optimization": {"zero_quantized_gradients": True}})
    assert "zero_quantized_gradients: false" in unscattered_for_muon(
        3, RequirementInputs.of(quantized, named_hardware("h100", 2))
    )
