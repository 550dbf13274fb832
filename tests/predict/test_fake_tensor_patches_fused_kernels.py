"""Liger's kernels in a trace: what a layer keeps is counted by hand from what each kernel saves for backward."""

from __future__ import annotations

import dataclasses
import sys
import types

import pytest
import torch

from autotune.predict import tracer
from autotune.predict.fake_tensor_patches import liger_kernels
from autotune.predict.predictor import Predictor
from autotune.predict.trace import traced_predictor
from autotune.predict.trace_cache import cache_key, closed_form_trace
from autotune.predict.trace_data import BACKWARD, FORWARD, Trace
from autotune.predict.tracer import _built, trace_model
from autotune.problem.hardware import named_hardware
from autotune.problem.job import Job, parse_lora
from autotune.problem.models import ModelSpec, kernels_of
from autotune.rank.model_builder import transformers_config
from autotune.util import inquiry
from autotune.util.inquiry import PACKAGES
from tests.conftest import make_candidate, make_job

HIDDEN, INNER, HEADS, WORDS, TOKENS = 64, 160, 4, 1000, 96
SHAPE = {
    "vocab_size": WORDS,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "head_dim": HIDDEN // HEADS,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ROW = 4  # bytes of what a norm or attention keeps of a row: 32 bits
WIDTH = 2  # of an element


def job_of(kind: str, layers: int = 2, liger: bool = True, lora: str | None = None, **shape: int) -> Job:
    model = ModelSpec(kind, {"model_type": kind, **SHAPE, "num_hidden_layers": layers, **shape}, "here")
    job = dataclasses.replace(make_job(1, seq_len=TOKENS, precision="bf16"), model=model, liger=liger)
    return dataclasses.replace(job, lora=parse_lora(lora)) if lora else job


def traced(kind: str, layers: int = 2, liger: bool = True, **shape: int) -> Trace:
    return trace_model(job_of(kind, layers, liger, **shape), whole_depth=True)


def kept_by_a_layer(kind: str, **shape: int) -> float:
    """Bytes a token."""
    two, four = (traced(kind, layers, **shape).plain.after_forward[1] for layers in (2, 4))
    return (four - two) / 2 / TOKENS


# Inputs of two norms and of two groups of projections; query, key, value and output; gate, up and their product.
LAYER = WIDTH * (4 * HIDDEN + 4 * HIDDEN + 3 * INNER) + ROW * (2 + HEADS)
# A norm of query and key keeps its input, a row of each head apart.
OF_HEADS = WIDTH * 2 * HIDDEN + ROW * 2 * HEADS


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("kind", "layer"),
    [
        ("llama", LAYER),
        ("qwen3", LAYER + OF_HEADS),
        ("phi3", LAYER + WIDTH * 2 * HIDDEN),  # query and key are cut out of one tensor, which value keeps
        # norms after attention and MLP, too
        pytest.param("gemma3_text", LAYER + OF_HEADS + WIDTH * 2 * HIDDEN + ROW * 2, marks=pytest.mark.slow),
    ],
)
def test_a_layer_keeps_what_its_kernels_save(kind: str, layer: float) -> None:
    assert kept_by_a_layer(kind) == pytest.approx(layer, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "olmo2", "glm4", "mixtral"])
@pytest.mark.parametrize("lora", [None, "r=4"])
def test_two_shallow_traces_tell_a_deep_one(kind: str, lora: str | None) -> None:
    # as few layers as have two such depths: of Gemma 3 every second one attends to a window
    job = job_of(kind, 6, lora=lora, sliding_window_pattern=2) if kind == "gemma3_text" else job_of(kind, 5, lora=lora)
    assert tracer.extrapolation(transformers_config(job.model)) is not None
    quick, whole = trace_model(job), trace_model(job, whole_depth=True)
    for checkpointing in (False, True):
        one, other = quick.of(checkpointing), whole.of(checkpointing)
        assert one.after_forward == pytest.approx(other.after_forward)
        assert one.operators == pytest.approx(other.operators)
        assert one.act_bytes_per_sequence == pytest.approx(other.act_bytes_per_sequence)


@pytest.mark.slow
def test_nothing_but_kernels_changes() -> None:
    (plain, longer), (fused, fused_longer) = (
        [traced("llama", layers, liger) for layers in (2, 4)] for liger in (False, True)
    )
    assert fused.parameters == plain.parameters
    assert sum(fused.plain.flops) == pytest.approx(sum(plain.plain.flops), rel=0.01)
    assert fused.plain.attention == plain.plain.attention
    # of two layers: the loss has few words here, and many chunks
    for phase in (FORWARD, BACKWARD):
        operators, fused_operators = (
            more.plain.operators[phase] - one.plain.operators[phase]
            for one, more in ((plain, longer), (fused, fused_longer))
        )
        moved, fused_moved = (
            more.plain.moved[phase][1] - one.plain.moved[phase][1]
            for one, more in ((plain, longer), (fused, fused_longer))
        )
        assert fused_operators < 0.6 * operators
        assert fused_moved < 0.5 * moved


def test_a_loss_in_chunks_moves_every_logit() -> None:
    one = traced("llama", layers=1).plain
    assert one.moved[FORWARD][1] > 3 * WIDTH * WORDS * TOKENS
    chunks = -(-WORDS // HIDDEN)
    assert one.operators[FORWARD] > 4 * (chunks - 1)


@pytest.mark.slow
def test_the_next_trace_of_the_process_has_them_no_more() -> None:
    before = traced("llama", liger=False)
    function = sys.modules["transformers.models.llama.modeling_llama"].apply_rotary_pos_emb
    traced("llama")
    assert sys.modules["transformers.models.llama.modeling_llama"].apply_rotary_pos_emb is function
    assert traced("llama", liger=False) == before


@pytest.mark.slow
def test_norms_that_liger_leaves_alone_stay() -> None:
    """OLMo 2 has norms of query and key; Liger has kernels for the two others of a layer alone."""
    kernels = kernels_of("olmo2")
    assert kernels is not None
    assert "q_norm" not in kernels.norms
    alone, heads_too = kept_by_a_layer("olmo2"), kept_by_a_layer("exaone4")
    # a norm of transformers' keeps its input in 32 bits, and that times the factor of its row in 16, beside the row's own
    assert alone > heads_too


@pytest.mark.slow
def test_what_they_do_not_know_is_as_without() -> None:
    bert = make_job(1, model="tiny-bert", task="masked-lm", seq_len=32)
    assert trace_model(dataclasses.replace(bert, liger=True)) == trace_model(bert)


def test_a_decoder_in_a_model_that_they_do_not_know_stays_as_it_is() -> None:
    """Liger asks for the type of the whole model."""
    decoder = _built(job_of("llama"), transformers_config(job_of("llama").model)).model
    outer = torch.nn.ModuleDict({"language_model": decoder})
    for kind, replaced in (("llava_next", False), ("llava", True)):
        outer.config = types.SimpleNamespace(model_type=kind)  # type: ignore[assignment]
        with liger_kernels(outer):
            assert ("forward" in vars(decoder.norm)) == replaced


@pytest.mark.slow
def test_experts_keep_gate_and_up_of_the_rows_that_chose_them() -> None:
    chosen = 2
    experts = {"num_local_experts": 8, "num_experts_per_tok": chosen}
    apart = kept_by_a_layer("mixtral", **experts) - (LAYER - WIDTH * 3 * INNER)
    routing = 8 * (WIDTH + 4 + 4) + chosen * 8 * 4  # scores of all, and what each chosen row is found by
    assert WIDTH * chosen * 2 * INNER < apart < WIDTH * chosen * 2 * INNER + routing


@pytest.mark.slow
def test_gradients_of_frozen_experts_are_made_too() -> None:
    """With adapters the whole weights of a layer's experts are there twice for a moment."""
    shape = {"num_local_experts": 8, "num_experts_per_tok": 2}
    run = trace_model(job_of("mixtral", 1, lora="r=4,targets=q_proj+v_proj", **shape), whole_depth=True).plain
    experts = WIDTH * 8 * 3 * INNER * HIDDEN
    highest = max(fixed for fixed, phase in zip(run.fixed, run.phase, strict=True) if phase == BACKWARD)
    assert experts < highest < 1.5 * experts
    every = trace_model(job_of("mixtral", 1, **shape), whole_depth=True).plain
    assert run.flops[BACKWARD] > 0.8 * every.flops[BACKWARD]


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["llama", "mixtral", "granite"])
def test_they_run_under_autocast(kind: str) -> None:
    job = dataclasses.replace(
        job_of(kind), precision="fp32", base_config={"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    )
    assert job.autocast == "bfloat16"
    plain, fused = (trace_model(dataclasses.replace(job, liger=liger)).plain for liger in (False, True))
    assert fused.after_forward[1] < plain.after_forward[1]


@pytest.mark.slow
def test_under_autocast_the_heads_gradient_is_summed_where_it_is_but_in_some_versions() -> None:
    """From 16-bit logits into 32 bits, with newer ones. In 32 bits alone all make it apart."""
    mixed = dataclasses.replace(
        job_of("llama", 1), precision="fp32", base_config={"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    )
    pure = dataclasses.replace(job_of("llama", 1), precision="fp32")

    def highest(job: Job, loss: str) -> float:
        run = trace_model(job, loss=loss).plain
        return max(fixed for fixed, phase in zip(run.fixed, run.phase, strict=True) if phase == FORWARD)

    apart = highest(mixed, "chunked-apart") - highest(mixed, "chunked")
    assert apart > 3 * WORDS * HIDDEN
    assert highest(pure, "chunked-apart") == highest(pure, "chunked")


class Decoder(torch.nn.Module):
    """Of a type, with a head; it makes its logits 32 bits wide, as Mllama's does."""

    def __init__(self, kind: str, words: int = WORDS) -> None:
        super().__init__()
        self.config = types.SimpleNamespace(model_type=kind)
        self.head = torch.nn.Linear(HIDDEN, words, bias=False, dtype=torch.bfloat16)

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.head

    def forward(self, hidden: torch.Tensor) -> object:
        return types.SimpleNamespace(logits=self.head(hidden).float())


def test_what_a_model_does_to_its_logits_is_nothing_that_the_kernel_reads() -> None:
    """Mllama's decoder makes them 32 bits wide, Granite and Gemma scale and cap them."""
    hidden = torch.zeros(1, TOKENS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    loss = tracer._chunked_loss(Decoder("mllama"), {"hidden": hidden}, apart=False)
    of_hidden, of_weight = loss.grad_fn.saved_tensors
    assert (of_hidden.shape, of_hidden.dtype) == ((TOKENS, HIDDEN), torch.bfloat16)
    assert (of_weight.shape, of_weight.dtype) == ((WORDS, HIDDEN), torch.bfloat16)


@pytest.mark.parametrize(
    ("kind", "version", "rows"),
    [("gpt_oss", "0.8.3", TOKENS), ("gpt_oss", "0.8.2", TOKENS // 8), ("llama", "0.8.3", TOKENS // 8)],
)
def test_chunks_of_gpt_oss_are_larger(monkeypatch: pytest.MonkeyPatch, kind: str, version: str, rows: int) -> None:
    monkeypatch.setattr(tracer, "version_of", lambda package: version)
    seen: list[int] = []

    class Seen(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            made = func(*args, **(kwargs or {}))
            if isinstance(made, torch.Tensor) and made.shape[1:] == (8 * HIDDEN,) and made.shape[0] != HIDDEN:
                seen.append(made.shape[0])
            return made

    hidden = torch.zeros(1, TOKENS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    with Seen():
        tracer._chunked_loss(Decoder(kind, 8 * HIDDEN), {"hidden": hidden}, apart=False)
    assert max(seen) == rows


@pytest.mark.slow
def test_norms_that_are_trained_whole_beside_adapters_are_replaced_too() -> None:
    saved = "r=4,targets=q_proj,saved=norm+input_layernorm+post_attention_layernorm"
    alone, whole = (
        trace_model(job_of("llama", lora=lora), whole_depth=True).plain for lora in ("r=4,targets=q_proj", saved)
    )
    without = trace_model(job_of("llama", liger=False, lora=saved), whole_depth=True).plain
    first = TOKENS * (WIDTH * HIDDEN + ROW)  # whose input no adapter asks a gradient of
    assert whole.after_forward[1] == alone.after_forward[1] + first
    assert without.after_forward[1] > whole.after_forward[1]


def test_an_older_version_leaves_a_newer_model_as_it_is() -> None:
    decoder = _built(job_of("llama"), transformers_config(job_of("llama").model)).model
    outer = torch.nn.ModuleDict({"language_model": decoder})
    outer.config = types.SimpleNamespace(model_type="qwen3_vl")  # type: ignore[assignment]
    for version, replaced in (("0.6.3", False), ("0.6.4", True), (None, True)):
        with liger_kernels(outer, version):
            assert ("forward" in vars(decoder.norm)) == replaced
        vars(decoder.norm).pop("forward", None)


def test_a_trace_is_of_one_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of another Python's, which tells what is in `inquiry.PACKAGES`."""
    assert "liger_kernel" in PACKAGES
    for liger, count in ((True, 2), (False, 1)):
        keys = set()
        for version in ("0.8.2", "0.8.3"):
            versions = {"liger_kernel": version}
            monkeypatch.setattr(inquiry, "version", lambda name, versions=versions: versions.get(name, "1"))
            keys.add(cache_key(job_of("llama", liger=liger)))
        assert len(keys) == count


@pytest.mark.slow
def test_the_head_is_the_whole_models_from_beginning_to_end_of_a_pass() -> None:
    """At stage 3: no module of its own asks for it."""
    head = WIDTH * WORDS * HIDDEN
    run, without = traced("llama").plain, traced("llama", liger=False).plain
    assert min(run.in_use) >= head
    assert min(without.in_use) < head


@pytest.mark.slow
def test_a_checkpoint_keeps_a_layers_input_alone() -> None:
    two, four = (traced("llama", layers).of(True).after_forward[1] for layers in (2, 4))
    assert (four - two) / 2 / TOKENS == WIDTH * HIDDEN


@pytest.mark.slow
def test_a_heads_gradient_is_there_once() -> None:
    """It waits from forward on, and becomes the parameter's own."""
    run, without = traced("llama").plain, traced("llama", liger=False).plain
    head = WIDTH * WORDS * HIDDEN
    assert run.after_forward[0] - without.after_forward[0] == pytest.approx(head, abs=8)
    most = max(run.gradients)
    early = [fixed for fixed, made in zip(run.fixed, run.gradients, strict=True) if 0 < made < 0.9 * most]
    assert max(early) < 0.5 * head, "but for what the embedding makes last"


@pytest.mark.slow
def test_logits_are_never_there_but_in_granite() -> None:
    whole = {kind: traced(kind, layers=1).plain for kind in ("llama", "granite")}
    most = {kind: max(run.per_sequence) / TOKENS for kind, run in whole.items()}
    assert most["granite"] - most["llama"] > 0.9 * 4 * WORDS
    # the gradients of head and hidden states are made in forward, and wait
    assert whole["llama"].after_forward[0] - whole["granite"].after_forward[0] == WIDTH * WORDS * HIDDEN


def test_what_is_made_apart_is_there_in_16_and_32_bits_beside_the_sum() -> None:
    in_place, apart = (trace_model(job_of("llama", 1), loss=loss).plain for loss in ("chunked", "chunked-apart"))
    forward = [
        max(f for f, phase in zip(one.fixed, one.phase, strict=True) if phase == FORWARD) for one in (in_place, apart)
    ]
    assert forward[1] - forward[0] == pytest.approx((WIDTH + 4) * WORDS * HIDDEN, rel=0.01)
    assert apart.after_forward == in_place.after_forward


def test_a_closed_form_has_no_logits_either() -> None:
    without, fused = (closed_form_trace(job_of("llama", liger=liger), "why") for liger in (False, True))
    less = without.plain.after_forward[1] - fused.plain.after_forward[1]
    assert less == TOKENS * WORDS * (WIDTH + 4 + 4)
    halfway = closed_form_trace(job_of("granite"), "why")
    assert halfway.plain.after_forward[1] - fused.plain.after_forward[1] == TOKENS * WORDS * (WIDTH + 4)
    assert fused.plain.after_forward[0] == WIDTH * WORDS * HIDDEN


@pytest.mark.slow
def test_a_candidate_with_them_is_predicted_by_its_own_trace() -> None:
    job = job_of("llama", liger=False)
    assert cache_key(job) != cache_key(job_of("llama"))
    predictor = traced_predictor(job, named_hardware("a100-80", 1), traced("llama", liger=False))
    plain, fused = make_candidate(0, 8), make_candidate(0, 8).but(liger_kernel=True)
    table = predictor.table([plain, fused])
    assert table.peak[1] < table.peak[0]
    assert table.step[1] < table.step[0]
    off = predictor.table([plain.but(liger_kernel=False)])
    assert (off.peak[0], off.step[0]) == (table.peak[0], table.step[0])
    assert len(predictor._traces) == 2
    alone = Predictor(job_of("llama"), named_hardware("a100-80", 1), traced("llama")).table([plain])
    assert (table.peak[1], table.step[1]) == pytest.approx((alone.peak[0], alone.step[0]))


def test_backward_writes_over_what_it_is_given() -> None:
    """A layer's backward has its kept tensors and little beside them: gates' gradients take their operands' place."""
    run = traced("llama", layers=1).plain
    highest = max(each for each, phase in zip(run.per_sequence, run.phase, strict=True) if phase == BACKWARD)
    beside = (highest - run.after_forward[1]) / TOKENS
    assert beside < WIDTH * (2 * HIDDEN + INNER)
