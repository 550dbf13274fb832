"""Tasks for which a model can be trained, and the image size in its configuration: plain facts, without transformers.

`data/tasks.json` lists for each task the `model_type`s of transformers' auto classes; a test compares it with the installed ones.
An unlisted `model_type` is never refused here: building the model shows its abilities.
"""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from typing import Any

from autotune.errors import UserError

CAUSAL = "causal-lm"
SEQ2SEQ, IMAGE_TEXT, MASKED = "seq2seq", "image-text", "masked-lm"
CLASSIFICATION, TOKENS, ANSWERS = "classification", "token-classification", "question-answering"
TASKS = (CAUSAL, MASKED, CLASSIFICATION, TOKENS, ANSWERS, SEQ2SEQ, IMAGE_TEXT)
DECODED = (CAUSAL, IMAGE_TEXT)  # each token is predicted from those before it

# Endings of `architectures`. An encoder's pretraining head includes the masked one.
_ENDINGS = {
    "ForCausalLM": CAUSAL,
    "LMHeadModel": CAUSAL,
    "ForMaskedLM": MASKED,
    "ForPreTraining": MASKED,
    "ForSequenceClassification": CLASSIFICATION,
    "ForTokenClassification": TOKENS,
    "ForQuestionAnswering": ANSWERS,
}
# Order of preference if `architectures` does not decide (`…ForConditionalGeneration`, `BertModel`, missing). Encoders also have a
# causal head, which is rarely trained.
_PREFERRED = (IMAGE_TEXT, SEQ2SEQ, MASKED, CAUSAL, CLASSIFICATION, TOKENS, ANSWERS)

# Vision towers that accept images of any size, in whole patches. The size in their configurations is the largest.
_ANY_SIZE = ("pixtral",)


@cache
def _model_types() -> dict[str, frozenset[str]]:
    """Return the `model_type`s of each task."""
    data = json.loads((resources.files("autotune") / "data" / "tasks.json").read_text(encoding="utf-8"))
    return {task: frozenset(data[task]) for task in TASKS}


def tasks_of(config: dict[str, Any]) -> tuple[str, ...]:
    """Return the tasks for which transformers has a head; empty for an unlisted `model_type`."""
    return tuple(task for task in TASKS if config.get("model_type") in _model_types()[task])


def default_task(config: dict[str, Any]) -> str:
    """Return the task for which a configuration is published, or else the usual one of its kind."""
    possible = tasks_of(config)
    for architecture in config.get("architectures") or ():
        for ending, task in _ENDINGS.items():
            if str(architecture).endswith(ending) and (task in possible or not possible):
                return task
    if config.get("is_decoder") is True and CAUSAL in possible:
        return CAUSAL
    return next((task for task in _PREFERRED if task in possible), CAUSAL)


def task_of(config: dict[str, Any], asked: str | None, name: str) -> str:
    """Return the task for training a model: the requested one, or the default.

    Raises:
        UserError: there is no such task, or the architecture has no head for it.
    """
    if asked is None:
        return default_task(config)
    if asked not in TASKS:
        raise UserError(f"--task {asked}: expected one of {', '.join(TASKS)}")
    possible = tasks_of(config)
    if possible and asked not in possible:
        kind = config.get("model_type")
        raise UserError(f"--task {asked}: {name} ({kind}) has no such head; it has {', '.join(possible)}")
    return asked


def told_image_size(config: dict[str, Any]) -> int | None:
    """Return height and width of an image in pixels, or None if the configuration does not give them."""
    vision = config.get("vision_config")
    size: Any = vision.get("image_size") if isinstance(vision, dict) else None
    size = config.get("image_size") if size is None else size
    if isinstance(size, dict):
        size = size.get("height")
    if isinstance(size, list | tuple) and size:
        size = size[0]
    return size if isinstance(size, int) and size > 0 else None


def image_size_of(config: dict[str, Any], task: str, asked: int | None, name: str) -> int | None:
    """Return `asked` if it differs from the configuration: height and width of the job's images in pixels.

    Raises:
        UserError: no image size is known, the configuration has another, or the task has no images.
    """
    if asked is not None and asked < 1:
        raise UserError(f"--image-size {asked}: expected height and width in pixels")
    if task != IMAGE_TEXT:
        if asked is not None:
            raise UserError(f"--image-size {asked}: {name} sees no images at --task {task}; leave it out")
        return None
    told = told_image_size(config)
    if told is None and asked is None:
        raise UserError(
            f"the configuration of {name} names no image size: give --image-size (height and width in pixels)"
        )
    vision = config.get("vision_config")
    fixed = told is not None and not (isinstance(vision, dict) and vision.get("model_type") in _ANY_SIZE)
    if fixed and asked not in (None, told):
        raise UserError(f"--image-size {asked}: {name} takes images of {told} pixels; leave it out")
    return asked if asked != told else None
