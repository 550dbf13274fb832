"""The table of what Liger replaces, against its own and against the models, and what follows from it."""

from __future__ import annotations

import dataclasses
import sys
import types

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModel
from transformers.models.mllama.modeling_mllama import MllamaTextModel

from autotune.problem import knobs
from autotune.problem.knobs import RequirementInputs
from autotune.problem.models import (
    _DECODERS,
    _WITH_IMAGES,
    kernels_of,
    liger_replaces_anything,
    loss_in_kernel,
    resolve_model,
)
from autotune.rank.model_builder import use_liger
from autotune.util import inquiry
from tests.conftest import make_job
from tests.problem.test_knobs_requirements import GPUS

# liger-kernel 0.8.5, MODEL_TYPE_TO_APPLY_LIGER_FN
THEIRS = """
deepseek_v2 deepseek_v3 deepseek_v4 exaone4 falcon_h1 gemma gemma2 gemma3 gemma3_text gemma4 gemma4_text glm4 glm4v glm4v_moe gpt_oss
granite hunyuan_v1_dense hunyuan_v1_moe internvl llama llama4 llama4_text llava ministral mistral mixtral mllama mllama_text_model
muse_glimmer nemotron olmo2 olmo3 paligemma phi3 pixtral qwen2 qwen2_5_vl qwen2_5_vl_text qwen2_vl qwen2_vl_text qwen3 qwen3_5
qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next qwen3_vl qwen3_vl_moe qwen3_vl_moe_text qwen3_vl_text smollm3 smolvlm
"""
UNREAD = {"muse_glimmer", "pixtral"}  # one that few have, and a tower


def test_every_type_that_liger_knows_is_here_and_no_other() -> None:
    known = {kind for kind in {*_DECODERS, *_WITH_IMAGES} if liger_replaces_anything(kind)}
    assert known == set(THEIRS.split()) - UNREAD
    assert set(_DECODERS) - known == {"glm4v_text", "glm4v_moe_text"}, "by these names within others alone"


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(_DECODERS))
def test_every_norm_and_rotation_that_is_named_is_in_the_model(kind: str) -> None:
    small = {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 100, "pad_token_id": 0}
    heads = {"head_dim": 16, "num_key_value_heads": 2}
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {kind}")
    config = CONFIG_MAPPING[kind](**small, **heads)
    with torch.device("meta"):
        model = MllamaTextModel(config) if kind == "mllama_text_model" else AutoModel.from_config(config)
    kernels = kernels_of(kind)
    assert kernels is not None
    norms = {
        path.rpartition(".")[2]: type(module).__name__
        for path, module in model.named_modules()
        if path.rpartition(".")[2] in kernels.norms
    }
    assert norms.keys() == kernels.norms
    assert all(name.endswith("RMSNorm") for name in norms.values()), norms
    rotates = [hasattr(sys.modules[type(model).__module__], name) for name in kernels.rotations]
    assert all(rotates) == ("multimodal" not in "".join(kernels.rotations)), (
        "what Liger puts there has another name now"
    )


def test_a_model_with_images_is_its_decoder_with_a_loss() -> None:
    assert kernels_of("qwen2_vl") is None
    assert (liger_replaces_anything("qwen2_vl"), loss_in_kernel("qwen2_vl")) == (True, "chunked")
    assert (liger_replaces_anything("llama4"), loss_in_kernel("llama4")) == (True, "own")
    assert not set(_DECODERS) & set(_WITH_IMAGES)


@pytest.mark.parametrize(
    ("version", "loss"),
    [
        (None, "chunked"),
        ("0.6.1", "chunked"),
        ("0.6.2", "chunked-apart"),
        ("0.8.2", "chunked-apart"),
        ("0.8.3", "chunked"),
    ],
)
def test_some_versions_make_the_heads_gradient_apart(version: str | None, loss: str) -> None:
    assert loss_in_kernel("llama", version) == loss
    assert loss_in_kernel("llava", version) == loss
    assert loss_in_kernel("granite", version) == "fused32"


@pytest.mark.parametrize(
    ("kind", "first"),
    [("llama", "0.6.1"), ("glm4v", "0.6.2"), ("qwen3_vl_moe", "0.6.4"), ("gemma4", "0.8.1"), ("deepseek_v2", "0.8.5")],
)
def test_a_version_knows_what_was_there_when_it_came(kind: str, first: str) -> None:
    before = {"0.6.1": "", "0.6.2": "0.6.1", "0.6.4": "0.6.3", "0.8.1": "0.8.0", "0.8.5": "0.8.4"}[first]
    assert liger_replaces_anything(kind, first)
    assert loss_in_kernel(kind, first).startswith("chunked")
    assert not before or (liger_replaces_anything(kind, before), loss_in_kernel(kind, before)) == (False, "own")


@pytest.mark.parametrize(
    ("version", "torch_version", "loss"),
    [
        ("0.6.1", "2.6.0", "chunked"),
        ("0.8.0", "2.13.0", "chunked-apart"),
        ("0.8.1", "2.8.0", "chunked"),
        ("0.8.5", "2.7.1", "chunked-apart"),
        (None, "2.7.1", "chunked-apart"),
        (None, "2.13.0", "chunked"),
    ],
)
def test_a_sum_in_32_bits_is_another_matter(version: str | None, torch_version: str, loss: str) -> None:
    assert loss_in_kernel("llama", version, wide=True, torch=torch_version) == loss


def test_experts_at_once_came_later() -> None:
    seen = [kernels_of("mixtral", version) for version in ("0.7.0", "0.8.0", None)]
    assert [kernels is not None and kernels.experts for kernels in seen] == [False, True, True]


def test_what_is_not_there_stays() -> None:
    for kind in ("bert", "llava_next", None, ""):
        assert (kernels_of(kind), liger_replaces_anything(kind), loss_in_kernel(kind)) == (None, False, "own")


@pytest.mark.parametrize(
    ("model", "task", "said"),
    [
        ("llama-3.2-1b", "causal-lm", ""),
        ("llama-3.2-1b", "classification", "is for --task causal-lm and --task image-text"),
        (
            "tiny-bert",
            "masked-lm",
            "changes nothing in a model of type bert, as far as autotune knows Liger's kernels (0.8.5)",
        ),
    ],
)
def test_it_needs_a_model_that_it_knows_with_a_head_for_words(model: str, task: str, said: str) -> None:
    job = make_job(model=model, task=task, seq_len=64)
    assert job.model.config == resolve_model(model).config
    assert knobs.liger_model(True, RequirementInputs(job, GPUS)) == said


@pytest.mark.parametrize(("task", "fails"), [("image-text", True), ("causal-lm", False)])
def test_forwards_that_fit_transformers_no_more(task: str, fails: bool) -> None:
    llama = make_job(model="llama-3.2-1b")
    model = dataclasses.replace(llama.model, config={**llama.model.config, "model_type": "llama4"})
    said = knobs.liger_model(True, RequirementInputs(dataclasses.replace(llama, model=model, task=task), GPUS))
    assert said.startswith("fails in a model of type llama4 with images") == fails
    assert bool(said) == fails


@pytest.mark.parametrize(
    ("liger", "transformers", "kind", "said"),
    [
        ("0.8.5", "5.0.0", "llama", ""),
        ("0.8.5", "4.57.6", "llama", "needs transformers 5.0 or newer beside liger_kernel 0.8.5: 4.57.6 is installed"),
        ("0.8.4", "4.57.6", "llama", ""),
        ("0.7.0", "4.51.3", "llama", "needs transformers 4.52 or newer beside liger_kernel 0.7.0: 4.51.3 is installed"),
        ("0.6.1", "4.51.3", "llama", ""),
        (
            "0.6.4",
            "5.0.0",
            "llama",
            "needs liger_kernel 0.6.5 or newer in a model of type llama beside transformers 5.0.0: 0.6.4 is installed",
        ),
        ("0.6.5", "5.0.0", "llama", ""),
        (
            "0.6.5",
            "5.0.0",
            "mixtral",
            "needs liger_kernel 0.7.0 or newer in a model of type mixtral beside transformers 5.0.0: 0.6.5 is installed",
        ),
        ("0.6.5", "4.57.6", "mixtral", ""),
        ("0.7.0", "5.0.0", "mixtral", ""),
        (
            "0.7.0",
            "5.0.0",
            "ministral",
            "needs liger_kernel 0.8.0 or newer in a model of type ministral beside transformers 5.0.0: 0.7.0 is installed",
        ),
        ("0.8.0", "5.0.0", "ministral", ""),
        (None, "5.0.0", "ministral", ""),  # from its source: no version to be told by
    ],
)
def test_its_version_fits_the_model_and_transformers(
    monkeypatch: pytest.MonkeyPatch, liger: str | None, transformers: str, kind: str, said: str
) -> None:
    versions = {"liger_kernel": liger, "transformers": transformers}
    monkeypatch.setattr(inquiry, "has", lambda name: True)
    monkeypatch.setattr(inquiry, "version", lambda name: versions.get(name))
    llama = make_job(model="llama-3.2-1b")
    model = dataclasses.replace(llama.model, config={**llama.model.config, "model_type": kind})
    assert knobs.liger_kernel(True, RequirementInputs(dataclasses.replace(llama, model=model), GPUS)) == said


@pytest.mark.parametrize("adapters", [False, True])
def test_it_is_put_into_the_model_that_adapters_are_around(monkeypatch: pytest.MonkeyPatch, adapters: bool) -> None:
    """Through Liger's own function: transformers before 5 has none."""
    seen: list[object] = []
    package = types.ModuleType("liger_kernel.transformers")
    package._apply_liger_kernel_to_instance = lambda model: seen.append(model)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "liger_kernel", types.ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", package)
    inner = torch.nn.Linear(2, 2)
    outer = torch.nn.Sequential(inner)
    outer.get_base_model = lambda: inner  # type: ignore[assignment]
    use_liger(outer if adapters else inner)
    assert seen == [inner]
