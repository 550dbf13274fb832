"""Model and batches of a rank without a script.

The source is a named model with random weights and synthetic batches, or the model and batches that a function of the
user returns (`--workload package.module:function`).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from autotune.problem.job import Job
from autotune.problem.models import ANSWERS, CLASSIFICATION, IMAGE_TEXT, MASKED, SEQ2SEQ, TOKENS, declared_image_size
from autotune.rank.model_builder import DTYPES, IGNORED, build_model, transformers_config
from autotune.rank.versions import image_token, packed_mask, takes_image_types
from autotune.util.units import MIB

Batch = Any  # a dict of keyword arguments of the model's forward, or a tuple of positional ones
Source = Callable[[int, torch.device, int], Iterator[Batch]]  # arguments: micro-batch, device, seed


def load_builder(reference: str) -> Callable[[], Any]:
    """Import the function `package.module:function`, with the current folder on the path.

    Raises:
        ValueError: there is no such function.
    """
    name, _, function = reference.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found = getattr(importlib.import_module(name), function, None)
    except ImportError as error:
        raise ValueError(f"{reference}: {error}") from None
    if not callable(found):
        raise ValueError(f"{reference}: {name} has no function {function}")
    return found  # type: ignore[no-any-return]


def own_workload(reference: str) -> tuple[torch.nn.Module, Callable[[int], Any]]:
    """Return a model, and a function from a micro-batch size to an iterable of batches, both from the user's function.

    Raises:
        ValueError: there is no such function, or it returns something else.
    """
    made = load_builder(reference)()
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], torch.nn.Module) and callable(made[1])):
        raise ValueError(
            f"{reference}: expected it to return (model, batches), where batches(micro_batch) gives an "
            "iterable of the forward's arguments"
        )
    return made


def loss_of(out: Any) -> torch.Tensor:
    """Return the loss in a forward's result: its `loss`, the first of a tuple, or the tensor itself."""
    if isinstance(out, dict):
        out = out["loss"]
    elif hasattr(out, "loss"):
        out = out.loss
    elif isinstance(out, tuple):
        out = out[0]
    assert isinstance(out, torch.Tensor)
    return out


def forward(model: Any, batch: Batch) -> torch.Tensor:
    """Return the loss of one batch."""
    return loss_of(model(**batch) if isinstance(batch, dict) else model(*batch))


def build(job: Job, device: torch.device, ds_config: dict[str, Any]) -> tuple[torch.nn.Module, Source]:
    """Build the job's model on the device, and the source of its batches. At stage 3 the model is built partitioned."""
    if job.workload is None:
        model = build_model(job, device, ds_config)
        return model, functools.partial(synthetic_batches, job)
    import deepspeed

    partitioned = ds_config.get("zero_optimization", {}).get("stage", 0) == 3
    with deepspeed.zero.Init(config_dict_or_path=ds_config) if partitioned else contextlib.nullcontext():
        model, source = own_workload(job.workload)
    if not partitioned:
        model.to(device=device, dtype=DTYPES[job.precision])
    model.train()

    def endless(micro_batch: int, device: torch.device, seed: int) -> Iterator[Batch]:
        torch.manual_seed(seed)
        while True:
            empty = True
            for batch in source(micro_batch):
                empty = False
                yield to_device(batch, device)
            if empty:
                raise ValueError(f"{job.workload}: batches({micro_batch}) gave nothing")

    return model, endless


# -- synthetic ---------------------------------------------------------------------------------------------------------
#
# Batches of random numbers for a named model: arguments of each task's forward in the shapes of the job.

Integers = Callable[[tuple[int, ...], int], torch.Tensor]  # arguments: shape, exclusive upper bound

_MASKED_SHARE = 0.15  # Devlin et al. 2019, section 3.1; DataCollatorForLanguageModeling's default


def one_batch(job: Job, config: Any, rows: int, width: int, integers: Integers) -> TensorBatch:
    """Return the arguments of one forward with `rows` sequences of `width` tokens.

    Raises:
        ValueError: batches with images cannot be made for the model.
    """
    top = int(config.get_text_config().vocab_size)
    ids = integers((rows, width), top)
    if job.task == IMAGE_TEXT:
        return image_batch(job, config, ids)
    if job.task == ANSWERS:
        return {"input_ids": ids, **{name: integers((rows,), width) for name in ("start_positions", "end_positions")}}
    if job.task == CLASSIFICATION:
        return _ended({"input_ids": ids, "labels": _classes(config, rows, integers)}, config)
    if job.task == TOKENS:
        return {"input_ids": ids, "labels": integers((rows, width), config.num_labels)}
    labels = integers((rows, width), top) if job.task == SEQ2SEQ else ids
    return {"input_ids": ids, "labels": labels}


def _classes(config: Any, rows: int, integers: Integers) -> torch.Tensor:
    """Return one class per row; a number for a regression, a row of labels for multi-label classification."""
    if config.problem_type == "multi_label_classification":
        return integers((rows, config.num_labels), 2).float()
    if config.num_labels == 1:
        return integers((rows,), 2).float()
    return integers((rows,), config.num_labels)


def _ended(batch: TensorBatch, config: Any) -> TensorBatch:
    """End each row with the only end-of-sequence token, which an encoder-decoder's classifier reads."""
    end = getattr(config, "eos_token_id", None)
    if config.is_encoder_decoder and isinstance(end, int):
        ids = batch["input_ids"]
        ids[ids == end] = end - 1 if end else 1
        ids[:, -1] = end
    return batch


def synthetic_batches(job: Job, micro_batch: int, device: torch.device, seed: int) -> Iterator[TensorBatch]:
    """Yield endless batches of the job's task, made on the host and copied to the device like a data loader's.

    Every batch has the full sequence length unless the job has a data set's lengths. In that case only the first two
    batches have it: the worst case then runs with and without earlier gradients. The other sequences are drawn from
    these lengths, each batch padded to its longest. Rows of a packed job are full and have `position_ids`.

    Rows of equal length are the same for every micro-batch, in the same order, so that training traces of two
    micro-batches can be compared step by step.
    """
    generator = torch.Generator().manual_seed(seed)

    def integers(shape: tuple[int, ...], below: int) -> torch.Tensor:
        return torch.randint(0, below, shape, generator=generator)

    def pinned(batch: TensorBatch) -> TensorBatch:
        return {name: tensor.pin_memory() for name, tensor in batch.items()} if device.type == "cuda" else batch

    config = transformers_config(job.model)
    first = 0
    if job.lengths and not job.packed:
        drawn, first = draw(job, 16 * micro_batch, generator), 2
        widths = [job.seq_len] * 2 + drawn.view(16, micro_batch).max(dim=1).values.tolist()
        pool = [_masked(job, one_batch(job, config, micro_batch, width, integers), generator) for width in widths]
    else:
        rows = _pool_rows(job, config, micro_batch, device.type)
        whole = _masked(job, one_batch(job, config, rows, job.seq_len, integers), generator)
        if job.packed:
            whole["position_ids"] = torch.stack([packed_positions(job, generator) for _ in range(rows)])
            # The first token of a sequence is not predicted from the preceding sequence.
            whole["labels"] = whole["labels"].masked_fill(whole["position_ids"] == 0, IGNORED)
        parts = {name: tensor.chunk(rows // micro_batch) for name, tensor in pinned(whole).items()}
        pool = [{name: part[at] for name, part in parts.items()} for at in range(rows // micro_batch)]
        for batch in pool if job.packed else ():
            mask = packed_mask(batch["position_ids"], job.attention, DTYPES[job.precision])
            batch |= {} if mask is None else {"attention_mask": mask}
    pool = [pinned(batch) for batch in pool]  # a view of a pinned tensor is pinned
    yield from (to_device(batch, device) for batch in pool)
    while True:
        yield from (to_device(batch, device) for batch in pool[first:])


_POOL_STEPS = 4  # optimizer steps with distinct rows
_POOL_ROWS = 256  # rows of a rank if its steps may have any number
_POOL_BYTES = {"cuda": 32 * MIB, "cpu": MIB}  # of host memory, which is a CPU rank's device memory, too


def _pool_rows(job: Job, config: Any, micro_batch: int, device: str) -> int:
    """Return the rows of a rank after which they repeat: alike for every micro-batch, as far as host memory allows."""
    of_a_row = one_batch(job, config, 1, job.seq_len, lambda shape, below: torch.zeros(shape, dtype=torch.long))
    most = _POOL_BYTES[device] // sum(tensor.nbytes for tensor in of_a_row.values())
    step = job.global_batch_size // job.data_ranks if job.global_batch_size else _POOL_ROWS // _POOL_STEPS
    rows = next((count for count in (_POOL_STEPS * step, step) if count <= most), 0)
    return math.ceil(max(rows, micro_batch) / micro_batch) * micro_batch if rows else _POOL_STEPS * micro_batch


def _masked(job: Job, batch: TensorBatch, generator: torch.Generator) -> TensorBatch:
    """Ignore the labels of tokens that a masked language model is not asked for."""
    if job.task == MASKED:
        chosen = torch.rand(batch["input_ids"].shape, generator=generator) < _MASKED_SHARE
        chosen[:, 0] = True  # a mean over no losses is NaN
        batch["labels"] = batch["labels"].masked_fill(~chosen, IGNORED)
    return batch


def to_device(value: Any, device: torch.device) -> Any:
    """Copy a batch's tensors to the device."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device, non_blocking=True), value)


def draw(job: Job, count: int, generator: torch.Generator) -> torch.Tensor:
    """Draw (count,) sequence lengths in tokens with the frequencies of the job's data set."""
    tokens, often = (torch.tensor(column) for column in zip(*job.lengths, strict=True))
    return tokens[torch.multinomial(often.double(), count, replacement=True, generator=generator)]


def packed_positions(job: Job, generator: torch.Generator) -> torch.Tensor:
    """Return (seq_len,) position ids of a row of concatenated sequences, the last one truncated.

    Each sequence begins at 0, by which transformers separates them.
    """
    shortest = min(tokens for tokens, _ in job.lengths)
    lengths = draw(job, -(-job.seq_len // shortest), generator)
    starts = torch.cat([torch.zeros(1, dtype=lengths.dtype), lengths.cumsum(0)])
    places = torch.arange(job.seq_len)
    return places - starts[torch.searchsorted(starts, places, right=True) - 1]


# -- images ------------------------------------------------------------------------------------------------------------
#
# Batches with images for vision-language models, one image per sequence, laid out as each family's processor does.
#
# Source: transformers 5.23, the `processing_…` and `modeling_…` files of each family. An image takes as many tokens of
# its sequence as the model makes features of it. These tokens stand at the beginning of the sequence.

TensorBatch = dict[str, torch.Tensor]
Laid = tuple[TensorBatch, int]  # inputs of the vision tower, and the tokens of one image


def image_batch(job: Job, config: Any, ids: torch.Tensor) -> TensorBatch:
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
    size = job.image_size or declared_image_size(job.model.config)
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
