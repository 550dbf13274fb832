"""Batches with images for vision-language models, one image per sequence, laid out as each family's processor does.

Source: transformers 5.23, the `processing_…` and `modeling_…` files of each family. An image takes as many tokens of
its sequence as the model makes features of it. These tokens stand at the beginning of the sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autotune.problem.job import Job
from autotune.problem.tasks import told_image_size
from autotune.rank.versions import image_token, takes_image_types

Batch = dict[str, torch.Tensor]
Laid = tuple[Batch, int]  # inputs of the vision tower, and the tokens of one image

IGNORED = -100  # label of tokens without a loss


def image_batch(job: Job, config: Any, ids: torch.Tensor) -> Batch:
    """Return the arguments of one forward: `ids` (rows, tokens) with an image at the beginning of each row.

    Raises:
        ValueError: the model family is unknown, or an image leaves no tokens for text.
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
    """Return one grey RGB image per row. Some models treat an image of zeros as padding."""
    return torch.full((rows, *images, 3, size, size), 0.5)


def _patches(size: int, patch: int) -> int:
    if size % patch:
        raise ValueError(f"an image of {size} pixels is no whole number of patches of {patch}")
    return (size // patch) ** 2


def _whole(config: Any, size: int, rows: int) -> Laid:
    """One feature per patch; CLIP's class token is dropped unless the configuration keeps it (LLaVA, PaliGemma)."""
    tokens = _patches(size, config.vision_config.patch_size)
    full = getattr(config, "vision_feature_select_strategy", "default") == "full"
    tower = getattr(config.vision_config, "model_type", "")
    return {"pixel_values": _square(rows, size)}, tokens + (full and tower.startswith("clip"))


def _pooled(config: Any, size: int, rows: int) -> Laid:
    """A fixed number of features per image (Gemma 3)."""
    return {"pixel_values": _square(rows, size)}, int(config.mm_tokens_per_image)


def _shuffled(config: Any, size: int, rows: int) -> Laid:
    """One feature per square of `scale_factor` patches a side; images of a row have a dimension (Idefics 3, SmolVLM)."""
    tokens = _patches(size, config.vision_config.patch_size) // config.scale_factor**2
    return {"pixel_values": _square(rows, size, 1)}, tokens


def _merged(config: Any, size: int, rows: int) -> Laid:
    """One feature per square of `spatial_merge_size` patches a side (Qwen2-VL and its successors).

    Pixel rows are the patches of all images in order, together with the grid of each image. Each row holds its pixels
    twice, because a picture is treated as a film of identical frames.
    """
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
# Token types for training with images: (argument, value for image tokens, value for text tokens). PaliGemma's types
# separate prefix from target, the others' images from text.
_TYPED = {
    "paligemma": ("token_type_ids", 0, 1),
    "gemma3": ("token_type_ids", 1, 0),
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"), (_IMAGE_TYPES, 1, 0)),
}
