"""Batches of random numbers for a named model: arguments of each task's forward in the shapes of the job."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from autotune.problem.job import Job
from autotune.problem.tasks import ANSWERS, CLASSIFICATION, IMAGE_TEXT, MASKED, SEQ2SEQ, TOKENS
from autotune.rank.building import DTYPES, transformers_config
from autotune.rank.images import IGNORED, Batch, image_batch
from autotune.rank.versions import packed_mask

Integers = Callable[[tuple[int, ...], int], torch.Tensor]  # arguments: shape, exclusive upper bound

_MASKED_SHARE = 0.15  # Devlin et al. 2019, section 3.1; DataCollatorForLanguageModeling's default


def one_batch(job: Job, config: Any, rows: int, width: int, integers: Integers) -> Batch:
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


def _ended(batch: Batch, config: Any) -> Batch:
    """End each row with the only end-of-sequence token, which an encoder-decoder's classifier reads."""
    end = getattr(config, "eos_token_id", None)
    if config.is_encoder_decoder and isinstance(end, int):
        ids = batch["input_ids"]
        ids[ids == end] = end - 1 if end else 1
        ids[:, -1] = end
    return batch


def synthetic_batches(job: Job, micro_batch: int, device: torch.device, seed: int) -> Iterator[Batch]:
    """Yield endless batches of the job's task, made on the host and copied to the device like a data loader's.

    Every batch has the full sequence length unless the job has a data set's lengths. In that case only the first two
    batches have it: the worst case then runs with and without earlier gradients. The other sequences are drawn from
    these lengths, each batch padded to its longest. Rows of a packed job are full and have `position_ids`.
    """
    generator = torch.Generator().manual_seed(seed)

    def integers(shape: tuple[int, ...], below: int) -> torch.Tensor:
        return torch.randint(0, below, shape, generator=generator)

    config = transformers_config(job.model)
    widths, first = [job.seq_len] * 4, 0
    if job.lengths and not job.packed:
        drawn = draw(job, 16 * micro_batch, generator)
        widths, first = [job.seq_len] * 2 + drawn.view(16, micro_batch).max(dim=1).values.tolist(), 2
    pool = [one_batch(job, config, micro_batch, width, integers) for width in widths]
    for batch in pool:
        if job.task == MASKED:
            chosen = torch.rand(batch["input_ids"].shape, generator=generator) < _MASKED_SHARE
            chosen[:, 0] = True  # a mean over no losses is NaN
            batch["labels"] = batch["labels"].masked_fill(~chosen, IGNORED)
        if job.packed:
            batch["position_ids"] = torch.stack([packed_positions(job, generator) for _ in range(micro_batch)])
            # The first token of a sequence is not predicted from the preceding sequence.
            batch["labels"] = batch["labels"].masked_fill(batch["position_ids"] == 0, IGNORED)
            mask = packed_mask(batch["position_ids"], job.attention, DTYPES[job.precision])
            batch |= {} if mask is None else {"attention_mask": mask}
    if device.type == "cuda":
        pool = [{name: tensor.pin_memory() for name, tensor in batch.items()} for batch in pool]
    yield from (to_device(batch, device) for batch in pool)
    while True:
        yield from (to_device(batch, device) for batch in pool[first:])


def to_device(value: Any, device: torch.device) -> Any:
    """Copy a batch's tensors to the device."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, dict):
        return {key: to_device(item, device) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(to_device(item, device) for item in value)
    return value


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
