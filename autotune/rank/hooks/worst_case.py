"""Hook the batches of `--worst-case`: every row is the largest sample of the script's data, at the longest sequence.

The size of a sample is the memory of its tensors once the script's own collator has made a batch of it alone. The hook
knows nothing of texts or images: more pixels and more images give larger tensors. Each rank of the first run reads the
sizes, and trials reuse what its first rank found for data that begin alike.
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Iterator
from typing import Any

from autotune.errors import Unusable
from autotune.rank.hooks.base import Context, leaves
from autotune.rank.patches import Call
from autotune.rank.versions import import_or_none

_SCAN_SECONDS = 20.0  # limit for one data set; also the longest wait for one sample
_COMPARED = 4  # samples by whose sizes a data set is recognized
_GOLDEN = (math.sqrt(5) - 1) / 2  # multiples of it spread evenly, wherever the scan ends
_UNLIMITED_TOKENS = 10**6  # a tokenizer without a limit names a far larger number
_FILLERS = {"labels": -100, "attention_mask": 1}  # padding is attended to, without a loss; others take 0

_UNREAD = "--worst-case: the script's samples cannot be read by number ({})"


def install(context: Context) -> None:
    """Hook torch's loaders, and record the limit of every new tokenizer of transformers."""
    from torch.utils.data import DataLoader

    own: Any = vars(DataLoader)["_index_sampler"]

    def index_sampler(loader: Any) -> Any:
        return _LargestOnly(context, loader, own.fget(loader))

    context.patches.replace(DataLoader, "_index_sampler", property(index_sampler))
    if (base := import_or_none("transformers", "PreTrainedTokenizerBase")) is None:
        return

    def init(call: Call) -> None:
        call()
        if (longest := getattr(call.owner, "model_max_length", None) or 0) < _UNLIMITED_TOKENS:
            context.allowed_tokens.append(int(longest))

    context.patches.wrap(base, "__init__", init)


class _LargestOnly:
    """Sampler that yields the largest sample's index in place of every index.

    All rows being alike, a step has the same rows however it is cut into micro-batches.
    """

    def __init__(self, context: Context, loader: Any, sampler: Any) -> None:
        self._context, self._loader, self._sampler = context, loader, sampler

    def __iter__(self) -> Iterator[Any]:
        largest = _largest(self._context, self._loader)
        for at in self._sampler:
            if largest is None:
                yield at
            else:
                yield [largest] * len(at) if isinstance(at, list | tuple) else largest

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)


def _largest(context: Context, loader: Any) -> int | None:
    """Return the index of the largest sample; None if all are alike, or none can be read."""
    if loader not in context.scanned:
        context.scanned[loader] = _finding(context, loader)
    found = context.scanned[loader]
    return int(found["index"]) if found and found["bytes"] else None


def _finding(context: Context, loader: Any) -> dict[str, Any] | None:
    """Return index and bytes (0 if all are alike) of the largest sample, and the longest sequence of the data.

    `Context.largest` has it by the number of samples and the sizes of the first that are read. A finding of the first run is
    used for data with its key. None if the samples cannot be read, or could not in the first run.
    """
    recorded = context.script.profile.largest
    try:
        count = len(loader.dataset)
    except TypeError:
        return None  # a stream
    if recorded == {}:
        return None
    step = next(one for one in range(max(1, round(_GOLDEN * count)), count + 2) if math.gcd(one, count) == 1)
    until = time.monotonic() + _SCAN_SECONDS
    sizes: list[tuple[int, int]] = []
    key = ""
    try:
        # no list: it may be billions of samples
        for size in _sizes(loader, (at * step % count for at in range(count))):
            sizes.append(size)
            if len(sizes) == min(count, _COMPARED):
                key = f"{count}-{zlib.crc32(repr(sizes).encode()):08x}"
                if known := {**context.largest, **(recorded or {})}.get(key):
                    context.largest[key] = known
                    return context.largest[key]
            if key and time.monotonic() > until:
                break
    except Exception as error:  # a stream with a length, a collator that needs several samples, a worker that hangs
        context.unread = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    if not key:
        return None
    number = max(range(len(sizes)), key=lambda at: sizes[at])
    alike = len({size for size, _ in sizes}) == 1
    found = {"index": number * step % count, "bytes": 0 if alike else sizes[number][0], "read": len(sizes)}
    found |= {"tokens": max(tokens for _, tokens in sizes), "samples": count}
    context.largest[key] = found
    return found


def _sizes(loader: Any, order: Iterator[int]) -> Iterator[tuple[int, int]]:
    """Yield bytes and tokens of a data set's samples. A worker process reads them, so no state of the script's own changes.

    Raises:
        Exception: a sample cannot be read, or takes longer than `_SCAN_SECONDS`: a lock that another thread of this
            process holds stays locked in the worker.
    """
    import torch
    from torch.utils.data import DataLoader

    collate, batched = loader.collate_fn, loader._auto_collation

    def size_of(items: Any) -> tuple[int, int]:
        made = collate(items if batched else items[0])
        parts = [(name, part) for name, leaf in leaves(made) for part in (leaf if isinstance(leaf, list) else [leaf])]
        tokens = max((part.shape[-1] for name, part in parts if name == "input_ids"), default=0)
        return sum(part.nbytes for _, part in parts), tokens

    class Reader(DataLoader[Any]):
        _index_sampler = property(lambda reader: reader.batch_sampler)  # in place of the hook's

    own: dict[str, Any] = {"worker_init_fn": loader.worker_init_fn, "multiprocessing_context": "fork"}
    own["generator"] = torch.Generator()  # the global one's state would advance
    own["timeout"] = _SCAN_SECONDS
    yield from Reader(loader.dataset, 1, sampler=order, collate_fn=size_of, num_workers=1, **own)


def longest(context: Context, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return a forward's arguments, padded to the longest sequence that the script allows.

    Arguments and tokenizers say it, or else the data, or else the model.

    Raises:
        Unusable: the batch cannot be padded, and no largest sample of the data is known.
    """
    config = getattr(context.engine.module, "config", None)
    positions = getattr(config, "max_position_embeddings", None)
    limits = [*context.allowed_tokens, *([positions] if isinstance(positions, int) else [])]
    if context.largest:
        limits = limits if context.allowed_tokens else [max(one["tokens"] for one in context.largest.values())]
    elif any(getattr(one, "dim", int)() > 1 and one.is_floating_point() for one in kwargs.values()):
        raise Unusable(f"{_UNREAD.format(context.unread)}, so its largest image is unknown: leave it out")
    try:
        return pad_to(args, kwargs, min(limits, default=0), context.unread)
    except Unusable:
        if context.largest:
            return kwargs
        raise


def pad_to(args: tuple[Any, ...], kwargs: dict[str, Any], longest: int, unread: str) -> dict[str, Any]:
    """Return a forward's arguments with all (rows, tokens) tensors padded to `longest` tokens.

    Padding is computed like all other tokens. An error names `unread`, the reason for not reading the samples.

    Raises:
        Unusable: `longest` is 0 (the maximum length is unknown), or the batch cannot be padded.
    """
    import torch

    ids = kwargs.get("input_ids")
    if args or not isinstance(ids, torch.Tensor) or ids.dim() != 2 or "position_ids" in kwargs:
        raise Unusable(
            f"{_UNREAD.format(unread)}, and its batches cannot be padded "
            "(expected input_ids of two dimensions, given by name, not packed): leave it out"
        )
    if not longest:
        raise Unusable(
            "--worst-case: neither the data, max_length, a tokenizer nor the model's configuration says how long a "
            "batch may be: leave it out"
        )
    return padded(args, kwargs, ids, longest)[1]


def padded(
    args: tuple[Any, ...], kwargs: dict[str, Any], ids: Any, longest: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a forward's arguments with all tensors of the shape of `ids` (rows, tokens) padded to `longest` tokens."""
    import torch

    def longer(value: Any, name: str = "") -> Any:
        if ids is None or ids.ndim != 2 or longest <= ids.shape[1] or getattr(value, "shape", None) != ids.shape:
            return value
        return torch.nn.functional.pad(value, (0, longest - ids.shape[1]), value=_FILLERS.get(name, 0))

    return tuple(map(longer, args)), {name: longer(value, name) for name, value in kwargs.items()}
