"""Batches with images for vision-language models: pixels as each family's processor lays them out, one image a sequence.

Source: transformers 5.23, the `processing_…` and `modeling_…` files of each family. An image takes so many tokens of its
sequence as the model makes features of it; they stand at the sequence's beginning.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autotune.problem.job import Job
from autotune.problem.tasks import told_image_size
from autotune.rank.versions import image_token, takes_image_types

Batch = dict[str, torch.Tensor]
Laid = tuple[Batch, int]  # what the vision tower takes, and the tokens of one image

IGNORED = -100  # as a label


def image_batch(job: Job, config: Any, ids: torch.Tensor) -> Batch:
    """The arguments of one forward: `ids` (rows, tokens) with an image at the beginning of each row.

    Raises:
        ValueError: the family is not known here, or an image leaves no room for text.
    """
    kind = config.model_type
    if kind not in _LAYOUTS:
        raise ValueError(
            f"how {kind} takes images is not known here (known: {', '.join(sorted(_LAYOUTS))}); "
            "give your own batches with --workload"
        )
    rows, width = ids.shape
    size = job.image_size or told_image_size(job.model.config)
    if size is None:
        raise ValueError("the configuration names no image size")
    pixels, tokens = _LAYOUTS[kind](config, size, rows)
    if tokens >= width:
        raise ValueError(f"an image of {size} pixels takes {tokens} tokens: --seq-len {width} leaves no room for text")
    image = image_token(config)
    ids[ids == image] = image - 1 if image else 1
    ids[:, :tokens] = image
    labels = ids.clone()
    labels[:, :tokens] = IGNORED
    batch = {"input_ids": ids, "labels": labels, **pixels}
    name, of_image, of_text = _TYPED.get(kind, ("", 0, 0))
    if name and (name != _IMAGE_TYPES or takes_image_types()):
        types = torch.full_like(ids, of_text)
        types[:, :tokens] = of_image
        batch[name] = types
    return batch


def _square(rows: int, size: int, *images: int) -> torch.Tensor:
    """One RGB image a row. It is grey: an image of zeros is padding to some models."""
    return torch.full((rows, *images, 3, size, size), 0.5)


def _patches(size: int, patch: int) -> int:
    if size % patch:
        raise ValueError(f"an image of {size} pixels is no whole number of patches of {patch}")
    return (size // patch) ** 2


def _whole(config: Any, size: int, rows: int) -> Laid:
    """A feature a patch; CLIP's class token is left out unless the configuration wants it (LLaVA, PaliGemma)."""
    tokens = _patches(size, config.vision_config.patch_size)
    full = getattr(config, "vision_feature_select_strategy", "default") == "full"
    tower = getattr(config.vision_config, "model_type", "")
    return {"pixel_values": _square(rows, size)}, tokens + (full and tower.startswith("clip"))


def _pooled(config: Any, size: int, rows: int) -> Laid:
    """A fixed number of features an image (Gemma 3)."""
    return {"pixel_values": _square(rows, size)}, int(config.mm_tokens_per_image)


def _shuffled(config: Any, size: int, rows: int) -> Laid:
    """Squares of `scale_factor` patches a side make one feature; images of a row have a dimension (Idefics 3, SmolVLM)."""
    tokens = _patches(size, config.vision_config.patch_size) // config.scale_factor**2
    return {"pixel_values": _square(rows, size, 1)}, tokens


def _merged(config: Any, size: int, rows: int) -> Laid:
    """Patches of all images one after another, each a row of its pixels twice over (a picture is a film of one frame), and
    the grid of each image; squares of `spatial_merge_size` patches a side make one feature (Qwen2-VL and its heirs)."""
    vision = config.vision_config
    merged = vision.patch_size * vision.spatial_merge_size
    if size % merged:
        raise ValueError(f"--image-size {size}: expected a multiple of {merged}, the pixels of a merged patch")
    side = size // vision.patch_size
    values = 3 * vision.temporal_patch_size * vision.patch_size**2
    grid = torch.tensor([[1, side, side]] * rows)
    pixels = {"pixel_values": torch.full((rows * side * side, values), 0.5), "image_grid_thw": grid}
    return pixels, side * side // vision.spatial_merge_size**2


_LAYOUTS: dict[str, Callable[[Any, int, int], Laid]] = {
    "llava": _whole,
    "vipllava": _whole,
    "paligemma": _whole,
    "gemma3": _pooled,
    "idefics3": _shuffled,
    "smolvlm": _shuffled,
    "qwen2_vl": _merged,
    "qwen2_5_vl": _merged,
    "qwen3_vl": _merged,
    "qwen3_vl_moe": _merged,
}
_IMAGE_TYPES = "mm_token_type_ids"
# What kind a token is, where training insists on being told: (argument, of the image, of text). PaliGemma's are of the prefix
# and of what is learnt, the others' of images.
_TYPED = {
    "paligemma": ("token_type_ids", 0, 1),
    "gemma3": ("token_type_ids", 1, 0),
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"), (_IMAGE_TYPES, 1, 0)),
}
