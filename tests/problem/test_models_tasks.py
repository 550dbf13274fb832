"""What a model can be trained for, by its configuration alone."""

import json
from importlib import resources

import pytest

from autotune.commands.setup import longest_sequence
from autotune.errors import UserError
from autotune.problem.job import Job
from autotune.problem.models import TASKS, default_task, image_size_of, resolve_model, shipped_models, task_of, tasks_of
from tests.conftest import make_job


@pytest.mark.parametrize(
    ("config", "task"),
    [
        ({"model_type": "llama"}, "causal-lm"),
        ({"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]}, "classification"),
        ({"model_type": "bert"}, "masked-lm"),
        ({"model_type": "bert", "architectures": ["BertModel"]}, "masked-lm"),
        ({"model_type": "bert", "is_decoder": True}, "causal-lm"),
        ({"model_type": "qwen2_5_vl", "architectures": ["Qwen2_5_VLForConditionalGeneration"]}, "image-text"),
        ({"model_type": "unheard-of", "architectures": ["NewForMaskedLM"]}, "masked-lm"),
        ({}, "causal-lm"),
    ],
)
def test_the_default_is_what_the_configuration_is_for(config: dict[str, object], task: str) -> None:
    assert default_task(config) == task == task_of(config, None, "it")


def test_a_task_that_there_is_not() -> None:
    bert = {"model_type": "bert"}
    with pytest.raises(UserError, match=r"^--task poetry: expected one of causal-lm, masked-lm, classification, "):
        task_of(bert, "poetry", "bert")
    with pytest.raises(UserError) as caught:
        task_of(bert, "seq2seq", "my-bert")
    assert str(caught.value) == (
        "--task seq2seq: transformers has no such head for my-bert (bert); it has causal-lm, masked-lm, classification, "
        "token-classification, question-answering"
    )
    assert task_of({"model_type": "unheard-of"}, "seq2seq", "new") == "seq2seq", "building it will show"


def test_the_table_is_the_installed_librarys() -> None:
    from transformers.models.auto import modeling_auto

    names = (
        "CAUSAL_LM",
        "MASKED_LM",
        "SEQUENCE_CLASSIFICATION",
        "TOKEN_CLASSIFICATION",
        "QUESTION_ANSWERING",
        "SEQ_TO_SEQ_CAUSAL_LM",
        "IMAGE_TEXT_TO_TEXT",
    )
    table = json.loads((resources.files("autotune") / "data" / "tasks.json").read_text())
    assert list(table) == list(TASKS)
    for task, name in zip(TASKS, names, strict=True):
        theirs = set(getattr(modeling_auto, f"MODEL_FOR_{name}_MAPPING_NAMES"))
        lost = theirs - set(table[task]) if task == "causal-lm" else set()
        assert len(theirs & set(table[task])) > 0.9 * len(table[task]), f"{task}: write autotune/data/tasks.json anew"
        assert len(lost) < 10


VISION = {"model_type": "llava", "vision_config": {"image_size": 336}}


@pytest.mark.parametrize(
    ("config", "asked", "found"),
    [
        (VISION, None, None),
        (VISION, 336, None),
        ({"model_type": "qwen2_vl", "vision_config": {}}, 448, 448),
        ({"vision_config": {"image_size": [448, 448]}}, None, None),
        ({"vision_config": {"image_size": {"height": 448, "width": 448}}}, 448, None),
        ({"vision_config": {"image_size": 1540, "model_type": "pixtral"}}, 512, 512),
    ],
)
def test_image_sizes(config: dict[str, object], asked: int | None, found: int | None) -> None:
    assert image_size_of(config, "image-text", asked, "it") == found


@pytest.mark.parametrize(
    ("config", "task", "asked", "message"),
    [
        (
            {"model_type": "qwen2_vl", "vision_config": {}},
            "image-text",
            None,
            "the configuration of it names no image size: give --image-size (height and width in pixels)",
        ),
        (
            VISION,
            "image-text",
            448,
            "--image-size 448: it has a fixed image size of 336 pixels; leave --image-size out",
        ),
        ({}, "causal-lm", 336, "--image-size 336: it has no image input with --task causal-lm; leave --image-size out"),
    ],
)
def test_no_such_image_size(config: dict[str, object], task: str, asked: int | None, message: str) -> None:
    with pytest.raises(UserError) as caught:
        image_size_of(config, task, asked, "it")
    assert str(caught.value) == message


def test_a_task_names_another_study_but_not_the_usual_one() -> None:
    plain, bert = make_job(), make_job(model="tiny-bert", task="classification")
    assert {"task", "image_size"}.isdisjoint(plain.to_json()), "a study of the version before is resumed"
    assert bert.to_json()["task"] == "classification"
    assert Job.from_json(json.loads(json.dumps(bert.to_json()))) == bert
    assert "classification" in bert.summary
    assert bert.key != make_job(model="tiny-bert").key
    images = make_job(model="tiny-llava", task="image-text", image_size=448)
    assert Job.from_json(images.to_json()) == images


def test_tasks_that_a_job_refuses() -> None:
    with pytest.raises(UserError, match="--lengths with --seq-len packs sequences, which is for --task causal-lm"):
        make_job(model="tiny-t5", task="seq2seq", lengths=((8, 1),), packed=True)


def test_tokens_of_an_encoder_decoder_are_source_and_target() -> None:
    assert make_job(model="tiny-t5", task="seq2seq", seq_len=32).tokens_per_sample == 64
    lengths = ((8, 1), (16, 1))
    assert make_job(model="tiny-t5", task="seq2seq", seq_len=16, lengths=lengths).tokens_per_sample == 24
    assert make_job(seq_len=32).tokens_per_sample == 32


def test_positions_that_are_not_tokens() -> None:
    assert longest_sequence(resolve_model("roberta-base").config) == 512
    assert longest_sequence(resolve_model("bert-base-uncased").config) == 512
    assert longest_sequence({"model_type": "t5", "n_positions": 512}) is None


def test_every_shipped_model_has_a_task() -> None:
    for spec in shipped_models().values():
        assert default_task(spec.config) in tasks_of(spec.config), spec.name
