"""Adapters as people write them: `r=64 targets=c_attn,c_proj,w1,w2 + trainable wte,lm_head`, `LoRA rank 16, all-linear`."""

from __future__ import annotations

import re
from functools import cache

from autotune.problem.job import NF4, Lora
from autotune.problem.models import ModelSpec
from benchmarks.predict.published.rows import Row
from benchmarks.predict.published.words import LeftOut, UnknownWord, bare, remarks_of, vocabulary

RANK, TARGETS = 8, ("q", "v")  # peft's defaults
_RANK = re.compile(r"\b(?:lora[ _-]*)?(?:rank|r)\s*(?:[=: ]\s*|(?=\d))(\d+)\b|\blora[- _]?(\d+)\b")
_NUMBER_ALONE = re.compile(r"(?:lora)?\s*\(?\s*(\d+)\s*\)?")
_ALL = re.compile(
    r"\b(?:all|every)[- _](?:linear(?:[- _](?:layers?|modules?|projections?))?|layers?|modules?|projections?|weights)\b|\ball$"
)
_SCALE = re.compile(
    r"\b(?:lora[ _-]*)?(?:alpha|a)\s*[=: ]\s*[\d.]+(?:\s*\*?\s*r\b)?|\b\d+(?:\.\d+)?\s*[mb]\b|\bbias\s*=\s*\w+"
)
_DROPOUT = re.compile(r"\b(?:lora[ _-]*)?dropout\s*[=: ]\s*([\d.]+)")
_WHOLE = re.compile(r"(?:\+|and|with)?\s*\b(?:trainable|saved|modules_to_save\s*=?)\s+([\w,.\s]+)")
IN_4_BITS = re.compile(
    r"\bq-?lora\b(?:\s+nf4\b)?|\bnf4\b"
)  # base weights in bitsandbytes' nf4, or another one of its size
_LIST = re.compile(r"\b(?:target_modules|target modules|targets?)\b\s*(?:=|:|\s)\s*[\[({]?([^\]})]*)")


def lora_of(row: Row) -> Lora | None:
    """The adapters of a row; None: all is trained.

    Raises:
        LeftOut: part of the model is frozen without adapters, or the cell has a word or target that nobody knows.
    """
    quantize = NF4 if IN_4_BITS.search(row["lora"].lower()) else ""
    text = IN_4_BITS.sub("lora", row["lora"].lower().replace("α", "alpha"))
    if "frozen" in text or "freeze" in text:
        raise LeftOut("part of the model is frozen without adapters")
    head = bare(re.sub(r"\[([^\]]*)\]", r"\1", text))
    if (row.unknown("lora") and not re.search(r"rank|\br\b|lora", head)) or _denies(head):
        return None
    if re.match(r"(?:none|no|full|not)\b", head) and not re.search(r"\br\s*=|rank", head):
        raise UnknownWord("lora", row["lora"])
    rest, saved = head, tuple[str, ...]()
    if whole := _WHOLE.search(rest):
        saved = tuple(_embedding(name) for name in re.split(r"[\s,]+", whole.group(1).strip()) if name)
        rest = rest.replace(whole.group(), " ")
    dropout = _DROPOUT.search(rest)
    rank = _RANK.search(rest) or _RANK.search(remarks_of(text)) or _NUMBER_ALONE.fullmatch(text.strip())
    listed = _LIST.search(rest)
    for found in (dropout, rank):
        rest = rest.replace(found.group(), " ") if found else rest
    named = _targets(listed.group(1) if listed else "", strict=True) if listed else ()
    if listed:
        rest = rest.replace(listed.group(), " ")
        named = tuple(name for name in named if name)
    if not named and _ALL.search(rest.strip(" ,")):
        named, rest = ("all_linear",), _ALL.sub(" ", rest)
    named = named or _targets(_SCALE.sub(" ", rest), strict=False) or _in_brackets(text)
    number = int(next(filter(None, rank.groups()))) if rank else RANK
    share = float(dropout.group(1)) if dropout else 0.0
    return Lora(number, named or TARGETS, saved=saved, dropout=share, quantize=quantize)


def _denies(head: str) -> bool:
    """Whether a cell says that all is trained: `full-parameter fine-tuning`, `no adapters`."""
    words, known = set(re.findall(r"[a-z0-9]+", head)), vocabulary()["lora"]
    if not words <= set(known["none"]):
        return False
    adapters = words & {"lora", "adapter", "adapters", "peft"}
    return bool(words & set(known["denials"]) or (words and not adapters))


def _in_brackets(text: str) -> tuple[str, ...]:
    """Targets that stand in the brackets of a cell, where nothing else does: `lora (q,k,v,o of llm; rank unknown)`."""
    first = remarks_of(text).split(";")[0]
    try:
        return _targets(first, strict=False) if first.strip() else ()
    except UnknownWord:
        return ()  # prose


@cache
def _meanings() -> dict[str, tuple[str, ...]]:
    """Roles of each name of a target, by its letters and digits."""
    targets = vocabulary()["lora"]["targets"]
    # whole phrases stand for themselves; only "all linear modules" is no list of roles
    return {
        _key(name): (roles,) if roles == "all-linear" else tuple(roles.split())
        for roles, names in targets.items()
        for name in names
    }


def _key(name: str) -> str:
    """A target's name as the vocabulary has it: without its path, and with all that parts words as `_`."""
    return re.sub(r"[\W_]+", "_", name.strip().lower()).strip("_")


def _targets(text: str, *, strict: bool) -> tuple[str, ...]:
    """The targets that a text lists, as it names them, or the phrase that means them.

    Args:
        strict: every word is a target; else words that cells have beside them are passed over.

    Raises:
        UnknownWord: one is no target that anybody knows.
    """
    text = re.sub(r"\((?:[^)]*)\)?", " ", text).strip(" ,;+")
    text = re.sub(r"\ball[- _]linear\b", "all_linear", text)
    if _key(text) in _meanings():
        return (_key(text),)
    passed = set(vocabulary()["lora"]["words"])
    found = []
    for part in re.split(r"\s*[,;+&/|]\s*|\s+and\s+|'|\"", text):
        words = part.split()
        if not words:
            continue
        if (phrase := _known(part, single=len(words) == 1, strict=strict)) is not None:
            found.append(phrase)
            continue
        for word in words:
            if (name := _known(word, single=True, strict=strict)) is not None:
                found.append(name)
            elif word.strip(".:=-") not in passed and not word.strip(".:=-").isdigit():
                raise UnknownWord("lora", word)
    return tuple(found)


def _known(name: str, *, single: bool, strict: bool) -> str | None:
    """The name of a target; a word like `all` or `default` is one only in a list of targets."""
    last = name.strip().split(".")[-1]
    for key in (_key(name), _key(last) if single else ""):
        if key in _meanings() and (
            strict or key not in ("all", "default", "linear", "full", "all_layers", "all_modules")
        ):
            return key
    return None


def _embedding(name: str) -> str:
    roles = _meanings().get(_key(name), ())
    return {"embed": "embed_tokens", "head": "lm_head"}.get(roles[0], name) if len(roles) == 1 else name


def targets_in(model: ModelSpec, names: tuple[str, ...]) -> tuple[str, ...]:
    """Names of modules as this model has them.

    Raises:
        UnknownWord: a name that no vocabulary has.
        LeftOut: the model has no such module.
    """
    kind, tables = str(model.config["model_type"]), vocabulary()["lora"]["modules"]
    own = {**tables["llama"], **tables.get(kind, {})}
    found: list[str] = []
    for name in names:
        if _key(name) == "w2":  # Qwen's own code calls its gate w2, Llama's its projection down
            roles: tuple[str, ...] = ("gate",) if model.name.startswith("qwen") else ("down",)
        elif _key(name) in _meanings():
            roles = _meanings()[_key(name)]
        else:
            raise UnknownWord("lora", name)
        if roles == ("all-linear",):
            return ("all-linear",)
        modules = [module for role in roles for module in own.get(role, ())]
        if not modules:
            raise LeftOut(f"column lora: {model.name} has no {name!r}")
        found += modules
    return tuple(dict.fromkeys(found))
