"""DDP and FSDP2 on two ranks, measured like any candidate, against DeepSpeed's engine on the same weights and rows."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest

from autotune.problem.candidate import Candidate
from autotune.problem.job import Lora
from autotune.problem.models import CAUSAL, IMAGE_TEXT, MASKED
from autotune.problem.training_trace import TrainingTrace
from autotune.rank.ds_config import may_skip_parameters, torch_optimizer, trial_config, why_no_reference
from autotune.search.certificate import Verdict, compare
from tests.conftest import make_candidate, make_job
from tests.rank.conftest import Parent, make_spec

REQUEST: dict[str, Any] = {"min_steps": 3, "max_steps": 3, "min_seconds": 0.0, "max_seconds": 60.0, "full": True}


def traced(parent: Parent, folder: Path, candidate: Candidate, *, cold: bool = False, **job: Any) -> TrainingTrace:
    """The trace of a group of two ranks that train the candidate; `cold` ranks see this process's variables."""
    folder.mkdir()
    made = make_job(2, **job)
    spec = make_spec(folder, made, config=trial_config(candidate, made), checkpointing=candidate.checkpointing)
    ranks = parent.start("autotune.rank.model_rank", spec, 2, cold=cold)
    for rank in ranks:
        rank.wait_for("phase", phase="ready")
    for rank in ranks:
        rank.channel.send("measure", micro_batch=candidate.micro_batch, accumulation=candidate.accumulation, **REQUEST)
    answers = [rank.wait_for("measured") for rank in ranks]
    for rank in ranks:
        rank.channel.send("stop")
        assert rank.exit_status() == 0
    assert all(answer["data_bytes"] > 0 for answer in answers)
    trace = TrainingTrace.merged([answer["trace"] for answer in answers])
    assert not trace.missing
    return trace


@pytest.mark.main_path
@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "config"),
    [("fp32", {"gradient_clipping": 0.5}), pytest.param("bf16", {}, marks=pytest.mark.slow)],
    ids=["fp32", "bf16"],
)
def test_ddp_and_fsdp2_train_what_zero_trains(
    parent: Parent, tmp_path: Path, precision: str, config: dict[str, Any]
) -> None:
    job: dict[str, Any] = {"precision": precision, "base_config": config}
    own, plain = make_candidate(2, 2, 2), make_candidate(0, 2, 2, activation_checkpointing=True)
    zero = traced(parent, tmp_path / "zero", own, **job)
    assert zero.initial
    for name, candidate in (("ddp", plain), ("fsdp2", make_candidate(3, 2, 2))):
        trace = traced(parent, tmp_path / name, candidate, torch_alone=True, **job)
        found = compare(zero, own, trace, candidate, is_users=False)
        assert found.verdict is Verdict.SAME, f"{name}: {found.text}"
        assert trace.initial == pytest.approx(zero.initial, abs=1e-3), "the same initial weights"
        assert trace.precision == ("fp32" if precision == "fp32" else "mixed")
        close = 1e-4 if precision == "fp32" else 5e-3
        for mine, theirs in zip(trace.steps, zero.steps, strict=False):
            assert mine.loss == pytest.approx(theirs.loss, rel=close)
            assert mine.gradient_norm == pytest.approx(theirs.gradient_norm, rel=close)
            assert mine.update == pytest.approx(theirs.update, rel=0.05)


def assert_same_training(zero: TrainingTrace, other: TrainingTrace) -> None:
    assert other.initial == pytest.approx(zero.initial, abs=1e-3), "the same initial weights"
    for mine, theirs in zip(other.steps, zero.steps, strict=False):
        assert mine.loss == pytest.approx(theirs.loss, rel=1e-4)
        assert mine.gradient_norm == pytest.approx(theirs.gradient_norm, rel=1e-4)
        assert mine.update == pytest.approx(theirs.update, rel=0.05)


# Liger's loss reads the head's weight without calling the head, within the model's forward (liger-kernel 0.8.5,
# transformers/model/llama.py, `lce_forward`). The kernels themselves need a GPU.
LIGER = """
import types
from torch.nn.functional import cross_entropy, linear, pad

def _apply_liger_kernel_to_instance(model, **options):
    def forward(self, labels, **inputs):
        hidden = self.model(**inputs).last_hidden_state
        logits = linear(hidden, self.lm_head.weight).float().flatten(0, 1)
        return {"loss": cross_entropy(logits, pad(labels[:, 1:], (0, 1), value=-100).flatten())}

    model.forward = types.MethodType(forward, model)
"""


@pytest.mark.slow
def test_references_train_with_a_loss_that_reads_the_heads_weight(
    parent: Parent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "liger_kernel" / "transformers").mkdir(parents=True)
    (tmp_path / "liger_kernel" / "transformers" / "__init__.py").write_text(LIGER)
    zero = traced(parent, tmp_path / "zero", make_candidate(2, 2, 2))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    for stage in (0, 3):
        candidate = make_candidate(stage, 2, 2)
        trace = traced(parent, tmp_path / f"torch{stage}", candidate, cold=True, torch_alone=True, loss="liger")
        assert_same_training(zero, trace)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3], ids=["ddp", "fsdp2"])
def test_references_train_compiled(parent: Parent, tmp_path: Path, stage: int) -> None:
    zero = traced(parent, tmp_path / "zero", make_candidate(2, 2, 2))
    compiled = traced(parent, tmp_path / "torch", make_candidate(stage, 2, 2), torch_alone=True, compiled=True)
    assert_same_training(zero, compiled)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("model", "task", "stage", "lora"),
    [
        ("tiny-llava", IMAGE_TEXT, 0, None),
        ("tiny-bert", MASKED, 3, None),
        ("tiny-mixtral", CAUSAL, 3, None),
        ("tiny-llama", CAUSAL, 3, Lora(8)),
    ],
    ids=["ddp-unused-parameters", "fsdp2-tied-weights", "fsdp2-experts", "fsdp2-adapters"],
)
def test_unused_tied_and_frozen_weights_are_trained_as_they_should(
    parent: Parent, tmp_path: Path, model: str, task: str, stage: int, lora: Lora | None
) -> None:
    job: dict[str, Any] = {"model": model, "task": task, "seq_len": 64, "precision": "bf16", "lora": lora}
    trace = traced(parent, tmp_path / "torch", make_candidate(stage, 1, 2), torch_alone=True, **job)
    assert len(trace.counted) >= 3


@pytest.mark.parametrize(
    ("changes", "stage", "why"),
    [
        ({}, 0, ""),
        ({"ranks": 1}, 0, ""),
        ({"ranks": 1}, 3, "several ranks"),
        ({"optimizer": "lion"}, 0, "no optimizer Lion"),
        ({"precision": "fp16"}, 0, "fp16"),
        ({"workload": "mine:build"}, 0, "named models"),
        ({"lora": Lora(8)}, 3, ""),
        ({"lora": Lora(8, quantize="nf4")}, 3, "4-bit weights"),
        ({"base_config": {"bf16": {"bf16_master_weights_and_grads": True}}}, 0, "kept in bf16"),
        (
            {"base_config": {"scheduler": {"type": "WarmupLR", "params": {}}, "optimizer": {"type": "SGD"}}},
            0,
            "scheduler",
        ),
        ({"base_config": {"data_types": {"grad_accum_dtype": "bf16"}}}, 0, "data_types"),
        ({"compiled": True}, 3, ""),
        ({"compiled": True, "base_config": {"compile": {"deepcompile": True}}}, 3, "no counterpart of compile"),
        ({"loss": "liger"}, 3, ""),
    ],
)
def test_a_job_that_torch_cannot_run_alike_has_no_reference(changes: dict[str, Any], stage: int, why: str) -> None:
    found = why_no_reference(make_candidate(stage), dataclasses.replace(make_job(precision="bf16"), **changes))
    assert why in found
    assert bool(why) == bool(found)


@pytest.mark.parametrize(
    ("task", "config", "skips"), [(CAUSAL, {}, False), (CAUSAL, {"num_local_experts": 8}, True), (MASKED, {}, True)]
)
def test_ddp_searches_for_unused_parameters_of_models_that_may_have_some(
    task: str, config: dict[str, Any], skips: bool
) -> None:
    job = make_job()
    model = dataclasses.replace(job.model, config={**job.model.config, **config})
    assert may_skip_parameters(dataclasses.replace(job, model=model, task=task)) is skips


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        (
            {"type": "AdamW", "params": {"lr": 1.0, "torch_adam": True, "fused": True}},
            ("AdamW", {"lr": 1.0, "fused": True}),
        ),
        ({"type": "Adam", "params": {"adam_w_mode": False, "torch_adam": True}}, ("Adam", {})),
        ({"type": "Adam", "params": {"torch_adam": True}}, ("AdamW", {})),
        ({"type": "adamw", "params": {"lr": 2.0}}, ("AdamW", {"lr": 2.0, "weight_decay": 0.0, "fused": True})),
        ({"type": "SGD", "params": {"lr": 1.0, "momentum": 0.9}}, ("SGD", {"lr": 1.0, "momentum": 0.9})),
        ({"type": "Lamb"}, None),
    ],
)
def test_torch_gets_the_optimizer_that_deepspeed_would_make(section: dict[str, Any], expected: Any) -> None:
    assert torch_optimizer(section) == expected
