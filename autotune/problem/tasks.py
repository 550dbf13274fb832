"""What a model can be trained for, and what its configuration says of images: plain facts, without transformers.

`data/tasks.json` lists for each task the `model_type`s of transformers' auto classes; a test holds it against the
installed ones. Of a `model_type` that is not listed nothing is refused here: building the model shows what it can.
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

# What `architectures` end in; an encoder's pretraining head is the masked one and more.
_ENDINGS = {
    "ForCausalLM": CAUSAL,
    "LMHeadModel": CAUSAL,
    "ForMaskedLM": MASKED,
    "ForPreTraining": MASKED,
    "ForSequenceClassification": CLASSIFICATION,
    "ForTokenClassification": TOKENS,
    "ForQuestionAnswering": ANSWERS,
}
# Where `architectures` do not say it (`…ForConditionalGeneration`, `BertModel`, nothing): the first that a model has. Encoders
# also have a causal head, which hardly anybody trains.
_PREFERRED = (IMAGE_TEXT, SEQ2SEQ, MASKED, CAUSAL, CLASSIFICATION, TOKENS, ANSWERS)

# Vision towers that take images of any size, in whole patches; what their configurations call a size is the largest.
_ANY_SIZE = ("pixtral",)


@cache
def _model_types() -> dict[str, frozenset[str]]:
    """The `model_type`s of each task."""
    data = json.loads((resources.files("autotune") / "data" / "tasks.json").read_text(encoding="utf-8"))
    return {task: frozenset(data[task]) for task in TASKS}


def tasks_of(config: dict[str, Any]) -> tuple[str, ...]:
    """The tasks that transformers has a head for; empty for a `model_type` that is not known here."""
    return tuple(task for task in TASKS if config.get("model_type") in _model_types()[task])


def default_task(config: dict[str, Any]) -> str:
    """The task that a configuration is published for, or else the usual one of its kind."""
    possible = tasks_of(config)
    for architecture in config.get("architectures") or ():
        for ending, task in _ENDINGS.items():
            if str(architecture).endswith(ending) and (task in possible or not possible):
                return task
    if config.get("is_decoder") is True and CAUSAL in possible:
        return CAUSAL
    return next((task for task in _PREFERRED if task in possible), CAUSAL)


def task_of(config: dict[str, Any], asked: str | None, name: str) -> str:
    """The task to train a model for: as asked for, or the default.

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
    """Height and width of an image in pixels, where the configuration tells; None where it does not."""
    vision = config.get("vision_config")
    size: Any = vision.get("image_size") if isinstance(vision, dict) else None
    size = config.get("image_size") if size is None else size
    if isinstance(size, dict):
        size = size.get("height")
    if isinstance(size, list | tuple) and size:
        size = size[0]
    return size if isinstance(size, int) and size > 0 else None


def image_size_of(config: dict[str, Any], task: str, asked: int | None, name: str) -> int | None:
    """`asked`, where it says more than the configuration does: height and width of the job's images in pixels.

    Raises:
        UserError: nobody says how large images are, the configuration says otherwise, or there are none in the task.
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
