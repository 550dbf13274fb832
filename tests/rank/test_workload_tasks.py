"""Real engines of models beside causal language models, and the batches that they are trained with."""

import pytest
import torch

from autotune.errors import UserError
from autotune.executors.base import MeasureSpec
from autotune.predict.trace import trace_job
from autotune.problem.job import Job, Lora
from autotune.problem.models import ModelSpec, resolve_model
from autotune.problem.outcome import Outcome
from autotune.rank.model_builder import task_model, transformers_config
from autotune.rank.workload import synthetic_batches
from tests.conftest import Bench, make_candidate, make_job

MEASURE_SPEC = MeasureSpec(min_seconds=0.0, min_steps=2, max_steps=2)
QWEN = {
    "model_type": "qwen2_5_vl",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
    "image_token_id": 511,
    "video_token_id": 510,
    "vision_start_token_id": 509,
    "vision_end_token_id": 508,
    "vision_config": {
        "model_type": "qwen2_5_vl",
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 4,
        "out_hidden_size": 64,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "window_size": 56,
        "fullatt_block_indexes": [1],
    },
}
IDEFICS = {
    "model_type": "idefics3",
    "image_token_id": 511,
    "scale_factor": 2,
    "pad_token_id": 0,
    "text_config": {
        "model_type": "llama",
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "pad_token_id": 0,
    },
    "vision_config": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 64,
        "patch_size": 16,
    },
}
PALIGEMMA = {
    "model_type": "paligemma",
    "image_token_index": 511,
    "hidden_size": 64,
    "projection_dim": 64,
    "text_config": {
        "model_type": "gemma",
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 16,
    },
    "vision_config": {
        "model_type": "siglip_vision_model",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 56,
        "patch_size": 14,
        "projection_dim": 64,
    },
}
GEMMA = {
    "model_type": "gemma3",
    "image_token_index": 511,
    "mm_tokens_per_image": 4,
    "text_config": {**PALIGEMMA["text_config"], "model_type": "gemma3_text", "pad_token_id": 0},  # type: ignore[dict-item]
    "vision_config": {**PALIGEMMA["vision_config"], "image_size": 64, "patch_size": 16},  # type: ignore[dict-item]
}
MODERN = {
    "model_type": "modernbert",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "pad_token_id": 0,
    "cls_token_id": 1,
    "sep_token_id": 2,
}
BART = {
    "model_type": "bart",
    "vocab_size": 512,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "max_position_embeddings": 128,
}


def made_here(config: dict[str, object], task: str, **changes: object) -> Job:
    values = {"ranks": 2, "seq_len": 32, "precision": "fp32", **changes}
    return Job(ModelSpec(str(config["model_type"]), config, "here"), task=task, **values)  # type: ignore[arg-type]


def measure(bench: Bench, job: Job, *stages: int) -> list[Outcome]:
    """On the shared fork server, which any job can use."""
    bench.executor.job = job
    return [
        bench.run(make_candidate(stage, 2, 2, activation_checkpointing=stage == 3), measure_spec=MEASURE_SPEC)
        for stage in stages
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "task", "stages", "tokens"),
    [
        ("tiny-bert", "classification", (1, 3), 32),
        ("tiny-bert", "masked-lm", (2,), 32),
        pytest.param("tiny-t5", "seq2seq", (0, 3), 64, marks=pytest.mark.slow),
        pytest.param("tiny-mixtral", "causal-lm", (2, 3), 32, marks=pytest.mark.slow),
        pytest.param("tiny-llava", "image-text", (2, 3), 32, marks=pytest.mark.slow),
    ],
)
def test_engines_of_every_kind(bench: Bench, model: str, task: str, stages: tuple[int, ...], tokens: int) -> None:
    for outcome in measure(bench, make_job(model=model, task=task), *stages):
        assert outcome.ok, outcome
        assert outcome.measurement.tokens_per_second / outcome.measurement.samples_per_second == pytest.approx(tokens)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "task"),
    [
        ("tiny-bert", "masked-lm"),
        pytest.param("tiny-mixtral", "causal-lm", marks=pytest.mark.slow),
        pytest.param("tiny-llava", "image-text", marks=pytest.mark.slow),
    ],
)
def test_adapters_of_every_kind(bench: Bench, model: str, task: str) -> None:
    job = make_job(model=model, task=task, lora=Lora(4))
    (outcome,) = measure(bench, job, 2)
    assert outcome.ok, outcome
    trace = trace_job(job)
    assert trace.exact
    assert 0 < sum(trace.parameters) < 0.2 * trace.frozen


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("config", "task", "size"),
    [
        (QWEN, "image-text", 56),
        pytest.param(IDEFICS, "image-text", None, marks=pytest.mark.slow),
        pytest.param(PALIGEMMA, "image-text", None, marks=pytest.mark.slow),
        pytest.param(GEMMA, "image-text", None, marks=pytest.mark.slow),
        (MODERN, "masked-lm", None),
        pytest.param(BART, "seq2seq", None, marks=pytest.mark.slow),
        (BART, "classification", None),
        pytest.param(
            {**BART, "encoder_layerdrop": 0.1, "decoder_layerdrop": 0.1}, "seq2seq", None, marks=pytest.mark.slow
        ),
        ({**MODERN, "problem_type": "multi_label_classification"}, "classification", None),
    ],
)
def test_batches_are_what_a_forward_takes(config: dict[str, object], task: str, size: int | None) -> None:
    job = made_here(config, task, image_size=size)
    model = task_model(transformers_config(job.model), job)
    batch = next(synthetic_batches(job, 2, torch.device("cpu"), 0))
    loss = model(**batch).loss
    assert loss.isfinite()
    loss.backward()
    if task == "classification" and model.config.is_encoder_decoder:
        return  # it looks for the last token of a sequence by value: no trace
    trace = trace_job(job)
    assert trace.exact, trace.note
    assert sum(trace.parameters) == sum(p.numel() for p in model.parameters() if p.requires_grad)


def test_an_image_that_does_not_fit() -> None:
    with pytest.raises(UserError, match=r"an image of 56 pixels takes 16 tokens: --seq-len 16 leaves no room for text"):
        trace_job(make_job(model="tiny-llava", task="image-text", seq_len=16))
    with pytest.raises(UserError, match="--image-size 60: expected a multiple of 28"):
        trace_job(made_here(QWEN, "image-text", image_size=60))
    unknown = {**PALIGEMMA, "model_type": "aya_vision"}
    with pytest.raises(UserError, match="how aya_vision takes images is not known here"):
        trace_job(made_here(unknown, "image-text"))


def test_labels_of_what_is_learnt() -> None:
    masked = next(
        synthetic_batches(make_job(model="tiny-bert", task="masked-lm", seq_len=400), 4, torch.device("cpu"), 0)
    )
    assert 0.1 < (masked["labels"] != -100).float().mean() < 0.2
    image = next(synthetic_batches(make_job(model="tiny-llava", task="image-text"), 2, torch.device("cpu"), 0))
    assert ((image["input_ids"] == 4095) == (image["labels"] == -100)).all()
    assert (image["input_ids"] == 4095).sum() == 2 * 16
    answers = next(synthetic_batches(make_job(model="tiny-bert", task="question-answering"), 2, torch.device("cpu"), 0))
    assert set(answers) == {"input_ids", "start_positions", "end_positions"}
    lengths = ((8, 90), (64, 1))
    pairs = synthetic_batches(
        make_job(model="tiny-t5", task="seq2seq", seq_len=64, lengths=lengths), 2, torch.device("cpu"), 0
    )
    widths = [
        (batch["input_ids"].shape[1], batch["labels"].shape[1]) for _, batch in zip(range(12), pairs, strict=False)
    ]
    assert widths[:2] == [(64, 64)] * 2
    assert (8, 8) in widths


@pytest.mark.slow
def test_of_experts_only_those_that_tokens_go_to_compute() -> None:
    spec = resolve_model("tiny-mixtral")
    one, two = (
        trace_job(Job(ModelSpec("it", {**spec.config, "num_experts_per_tok": n}, "here"), 2, 32, "fp32"))
        for n in (1, 2)
    )
    assert one.parameters == two.parameters, "all experts are there"
    products = 3 * 2 * 128 * 256 * 32 * 4  # of one expert for each token: three matrices, in four layers
    assert two.plain.flops[0] - one.plain.flops[0] == products
    assert two.plain.flops[1] - one.plain.flops[1] == 2 * products
    assert two.plain.after_forward[1] > one.plain.after_forward[1]
    more = {**spec.config, "num_local_experts": 16}
    wide = trace_job(Job(ModelSpec("it", more, "here"), 2, 32, "fp32"))
    router = 2 * 128 * 8 * 32 * 4
    assert wide.plain.flops[0] - two.plain.flops[0] == router, "more experts cost their router alone"
    assert sum(wide.parameters) > 1.5 * sum(two.parameters)
