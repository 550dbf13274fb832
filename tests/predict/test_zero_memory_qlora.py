"""QLoRA: bytes of 4-bit weights against published figures and real engines, and what is refused."""

from __future__ import annotations

import dataclasses
import math
from contextlib import closing
from pathlib import Path

import pytest

from autotune.commands.plan import plans
from autotune.commands.request import Request
from autotune.errors import UserError
from autotune.executors.local import LocalExecutor
from autotune.predict.features import columns_of
from autotune.predict.step_time import step_work
from autotune.predict.trace import trace_job
from autotune.predict.trace_data import Trace
from autotune.predict.zero_memory import NF4_BYTES, estimate_memory, frozen_width, quantized_sizes
from autotune.problem.hardware import detect
from autotune.problem.job import Job, Lora, parse_lora
from autotune.problem.models import resolve_model
from autotune.problem.space import fitted, load_space
from autotune.util.units import GIB
from tests.conftest import SHORT, make_candidate, make_job
from tests.predict.passes import peaks_of

NF4 = Lora(8, quantize="nf4")


def llama(layers: int, hidden: int, inner: int, key_values: int, vocabulary: int) -> tuple[Job, Trace]:
    """A Llama 2 or CodeLlama of this shape. `key_values` are the elements of a key."""
    layer = [hidden * hidden, hidden * key_values, hidden * key_values, hidden * hidden, *[hidden * inner] * 3]
    sizes = layers * [*layer, hidden, hidden] + [hidden, vocabulary * hidden, vocabulary * hidden]
    job = make_job(precision="bf16", lora=NF4)
    config = {**job.model.config, "hidden_size": hidden, "vocab_size": vocabulary}
    job = dataclasses.replace(job, model=dataclasses.replace(job.model, config=config))
    some = trace_job(make_job(), device="cpu")
    return job, dataclasses.replace(some, parameters=[1], frozen=sum(sizes), frozen_sizes=sizes)


@pytest.mark.parametrize(
    ("shape", "measured_gb"),
    # Lightning-AI/litgpt 4839345, tutorials/resource-tables.md, "Single-GPU Inference", bnb.nf4-dq on an A100
    [
        ((32, 4096, 11008, 4096, 32000), 4.26),  # Llama 2 7B
        ((80, 8192, 28672, 1024, 32000), 37.21),  # Llama 2 70B
    ],
)
def test_weights_in_4_bits_need_what_is_published(shape: tuple[int, int, int, int, int], measured_gb: float) -> None:
    """The rows include a cache of keys and values, and the largest weight while it is dequantized."""
    job, trace = llama(*shape)
    width, dequantized = frozen_width(job, trace)
    predicted_gb = (width * trace.frozen + dequantized) / 1e9
    assert 0.0 < measured_gb - predicted_gb < 0.45
    assert predicted_gb == pytest.approx(measured_gb, rel=0.08)


@pytest.mark.slow
def test_training_needs_what_torchtune_publishes_for_an_8b_model_on_one_4090() -> None:
    """pytorch/torchtune 482734bd5, README: batch 2, packed to 2048, checkpointing, chunked loss, all bf16: 7.4 GiB."""
    modules = "q_proj+k_proj+v_proj+o_proj+gate_proj+up_proj+down_proj"
    job = Job(
        resolve_model("llama-3.1-8b"),
        1,
        2048,
        lora=parse_lora(f"r=8,targets={modules},quantize=nf4"),
        loss="chunked",
        base_config={"bf16": {"enabled": False}},
        torch_alone=True,
    )
    candidate = make_candidate(0, 2, activation_checkpointing=True)
    one = estimate_memory(job, trace_job(job), columns_of([candidate], job), "cuda")
    at = [i for i, name in enumerate(one.moments) if name != "init"]
    assert float(peaks_of(one)[at, 0].max()) / GIB == pytest.approx(7.4, rel=0.05)


@pytest.mark.slow
def test_4_bit_weights_change_weights_and_time_and_nothing_else() -> None:
    plain, quantized = (make_job(precision="bf16", lora=lora) for lora in (dataclasses.replace(NF4, quantize=""), NF4))
    trace = trace_job(quantized, device="cpu")
    columns = columns_of([make_candidate(2, 1)], plain)
    sizes = quantized_sizes(quantized, trace)
    hidden, vocabulary = (plain.model.config[key] for key in ("hidden_size", "vocab_size"))
    assert len(sizes) == 7 * plain.model.config["num_hidden_layers"]
    assert vocabulary * hidden not in sizes
    assert quantized_sizes(plain, trace) == []
    one, other = (estimate_memory(job, trace, columns) for job in (plain, quantized))
    assert one.terms["weights"][0] - other.terms["weights"][0] == pytest.approx(sum(sizes) * (2 - NF4_BYTES))
    of_trained, alike = (each.resident() - each.terms["weights"] for each in (one, other))
    assert of_trained == alike
    assert math.isclose(
        float((other.terms["gathered parameters"] - one.terms["gathered parameters"]).max()), 2 * max(sizes)
    )
    one_work, other_work = (step_work(job, trace, columns, "cuda") for job in (plain, quantized))
    assert one_work.moved[0] < other_work.moved[0] < 2 * one_work.moved[0]


def test_what_qlora_refuses() -> None:
    lora = parse_lora("r=16,quantize=nf4")
    assert parse_lora(str(lora)) == lora == Lora.from_json(lora.to_json())
    assert "quantize" not in Lora(16).to_json()
    for text, said in (("r=16,quantize=int8", "quantize is nf4"), ("r=16,quantize=", "expected r=16")):
        with pytest.raises(UserError, match=said):
            parse_lora(text)
    for request, said in (
        (Request(model="llama-2-7b", lora="r=8,quantize=int8"), "quantize is nf4"),
        (Request(model="mixtral-8x7b", lora="r=8,quantize=nf4"), "keeps all experts of a layer in one parameter"),
    ):
        with pytest.raises(UserError, match=said):
            plans(request, ["rtx4090"], lambda text: None)
    space, notes = fitted(load_space("cpu_demo"), make_job(lora=NF4), detect("cpu", 2))
    assert 3 not in space.knobs["zero_stage"].values
    assert "zero_stage 3 is not for quantize=nf4: 4-bit weights are whole on each rank: left out" in notes


@pytest.mark.slow
def test_real_engines_train_on_4_bit_weights(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed (pip install bitsandbytes)")
    job = Job(resolve_model("tiny-llama"), 2, 16, "fp32", lora=NF4, global_batch_size=8)
    candidates = [make_candidate(stage, 2, 2, offload_optimizer=where) for stage, where in ((0, "none"), (2, "cpu"))]
    with closing(LocalExecutor(job, detect("cpu", 2), tmp_path, candidates)) as executor:
        executor.open(lambda text: None)
        for at, candidate in enumerate(candidates):
            with closing(executor.session(candidate, f"{at:04d}")) as session:
                outcome = session.measure(candidate, SHORT, 300.0)
                assert outcome.measurement is not None, outcome
