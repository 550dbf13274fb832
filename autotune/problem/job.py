"""Job, Script and LoRA settings."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.errors import UserError
from autotune.masking import learn_data, learn_words
from autotune.problem.models import CAUSAL, SEQ2SEQ, ModelSpec, attention_heads
from autotune.util.bounds import display_value, known_fields, used_fields, whole_number
from autotune.util.interpreter import OWN, Interpreter

# -- sequence parallelism ----------------------------------------------------------------------------------------------

SEQUENCE_RANKS = "sequence_parallel_size"  # key of a DeepSpeed config


def sequence_ranks(found: Mapping[str, Any]) -> int:
    """Return the ranks that share each sequence, by a DeepSpeed config; 1 if each rank has its own."""
    size = found.get(SEQUENCE_RANKS)
    return size if isinstance(size, int) and size > 1 else 1


def counted_ranks(ranks: int, size: int) -> str:
    """Return in words by what a global batch is divided: ranks, or their groups if `size` ranks share each sequence."""
    return f"{ranks} ranks" if size == 1 else f"{ranks // size} group{'s' * (ranks > size)} of {size} ranks"


def near(batch: int, at_once: int) -> str:
    """Return in words the nearest batches that consist of whole micro-batches of all ranks, `at_once` at a time."""
    low = batch // at_once * at_once
    return " or ".join(str(one) for one in (low, low + at_once) if one)


# -- job ---------------------------------------------------------------------------------------------------------------
#
# Job: the training to tune. A Job is frozen, and every study belongs to exactly one Job.

MOST_BATCH = 2**31  # sequences per optimizer step
PRECISIONS = ("bf16", "fp16", "fp32")
# `adamw` is torch's fused AdamW, the default of Hugging Face's Trainer. If it is offloaded, DeepSpeed replaces it by its own.
OPTIMIZERS = ("adamw", "adam", "fused_adam", "lion", "sgd", "adagrad", "muon")


# Ways to compute the loss of a named model: from all logits, from slices of the vocabulary, or by Liger's kernel.
LOSSES = FULL, CHUNKED, LIGER_LOSS = "full", "chunked", "liger"
ATTENTIONS = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")


NF4 = "nf4"  # bitsandbytes' 4-bit type, with double quantization


@dataclass(frozen=True)
class Lora:
    """Low-rank adapters instead of full training."""

    rank: int
    targets: tuple[str, ...] = ("all-linear",)  # names of modules, or `all-linear`
    alpha: int | None = None  # None: twice the rank
    # names of modules that are trained in full, besides the adapters (peft's modules_to_save)
    saved: tuple[str, ...] = ()
    dropout: float = 0.0  # share of each adapter's input; backward keeps a copy of the input and a mask
    # adapters in 32 bits on 16-bit weights, as peft makes them; DeepSpeed's engine casts all to 16 bits
    fp32: bool = False
    quantize: str = ""  # NF4: linear layers of the base model are kept in 4 bits (QLoRA); empty: in the job's precision

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Lora:
        """Return the LoRA settings of JSON data."""
        names = {"targets": tuple(data["targets"]), "saved": tuple(data.get("saved", ()))}
        return cls(**{**known_fields(cls, data), **names})

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON; unused fields that older studies do not know are left out."""
        return used_fields(self, ("targets", "alpha"))

    def __str__(self) -> str:
        """Return the text that `parse_lora` reads."""
        parts = {
            f"r={self.rank}": True,
            f"targets={'+'.join(self.targets)}": self.targets != ("all-linear",),
            f"alpha={self.alpha}": self.alpha is not None,
            f"saved={'+'.join(self.saved)}": self.saved,
            f"dropout={self.dropout:g}": self.dropout,
            f"quantize={self.quantize}": self.quantize,
            "dtype=fp32": self.fp32,
        }
        return ",".join(text for text, is_so in parts.items() if is_so)


def parse_lora(text: str) -> Lora:
    """Parse adapters like `r=16,targets=all-linear,alpha=32,saved=lm_head,dropout=0.05,dtype=fp32`, or `16` for a rank.

    `+` joins several targets.

    Raises:
        UserError: the text has another form, or the rank or the dropout is out of range.
    """
    values: dict[str, str] = {}
    for part in re.sub(r"^(\d+)(?=,|$)", r"r=\1", text).split(","):
        key, equals, value = part.strip().partition("=")
        if not equals or key not in ("r", "targets", "alpha", "saved", "dropout", "dtype", "quantize") or not value:
            raise UserError(f"LoRA {text}: expected r=16,targets=all-linear (or q_proj+v_proj),alpha=32")
        values[key] = value
    rank = whole_number(values.get("r", "16"), f"LoRA {display_value(text)}: r", 1, 4096)
    alpha = whole_number(values["alpha"], f"LoRA {display_value(text)}: alpha", 0, 2**31) if "alpha" in values else None
    try:
        dropout = float(values.get("dropout", "0"))
    except ValueError:
        dropout = -1.0
    if not 0 <= dropout < 1:
        raise UserError(f"LoRA {text}: dropout is a share between 0 and 1")
    if values.get("dtype", "fp32") != "fp32":
        raise UserError(f"LoRA {text}: dtype must be fp32; without it, adapters have the dtype of the weights")
    if (quantize := values.get("quantize", "")) not in ("", NF4):
        raise UserError(f"LoRA {text}: quantize is {NF4}, or left out for weights in the precision of the training")
    saved = tuple(values["saved"].split("+")) if "saved" in values else ()
    targets = tuple(values.get("targets", "all-linear").split("+"))
    return Lora(rank, targets, alpha, saved, dropout, "dtype" in values, quantize)


@dataclass(frozen=True)
class ArgumentFile:
    """YAML or JSON file that a command names and that holds arguments of its training."""

    at: int  # index of the word that names it, in `Script.argv` or in `Script.launcher`
    path: str
    text: str
    data: dict[str, Any]  # parsed, so that a rank needs no parser
    launcher: bool = False  # read by the launcher, not by the script


def _empty() -> Any:
    return field(default_factory=dict)


@dataclass(frozen=True)
class ScriptProfile:
    """Findings of a script's probe run. Until that has run, `micro_batch` is 0.

    The names are those of the ranks' facts, and of the keys in stored studies. Version 1 was stored without its number.
    """

    version: int = 2
    config: dict[str, Any] | None = None  # the script's DeepSpeed config
    precision: str = "fp32"
    model_config: dict[str, Any] = _empty()
    causal: bool = False  # a language model with its own loss
    trained: tuple[int, ...] = ()  # elements of each trained parameter
    frozen: int = 0  # elements of all others
    matrices: tuple[int, ...] = ()  # elements of trained parameters that DeepSpeed has tagged for Muon
    experts_elsewhere: int = 0  # elements of experts that other ranks of an expert-parallel group hold
    sequence_ranks: int = 1  # ranks that share each sequence (Ulysses)
    seq_len: int = 1  # tokens of the longest row
    # tokens of a row in the first and in the last step, if rows grow step by step; and in the data, if it is measured at that
    grows: tuple[int, ...] = ()
    pads_to: int = 0  # tokens to which the forwards of each run are padded, because rows grow to it; 0: none are
    tokens_per_sample: float = 0.0  # mean of the first steps; 0 if unknown
    saved_bytes_per_sample: float = 0.0  # saved for backward; 0 if unknown
    # -- how it trains
    through_arguments: bool = False  # TrainingArguments carry the batch
    averages_by_rank: bool = False  # Trainer averages a loss over each rank's own tokens
    lightning: bool = False
    loader_prepared: bool = False  # accelerate has prepared the script's own loader
    loader_split: bool = False  # accelerate splits that loader's batches over the ranks
    relaunched: int = 0  # ranks that the script starts itself; 1 if unknown
    optimizer: str = ""  # kind of the optimizer that the script makes
    torch_optimizer: dict[str, Any] = _empty()  # class, `fused` and `foreach` of the script's optimizer of torch
    client_optimizer: bool = False  # the script makes its optimizer
    untested_optimizer: bool = False
    levers: tuple[str, ...] = ()  # knobs outside the DeepSpeed config that it has off, and that a hook can turn on
    checkpointing: bool = False  # activation checkpointing can be switched
    checkpointed: bool = False
    checkpointing_call: str = ""  # switches it on in the script's model, unless it is transformers' call
    evaluating: bool = False  # the model trains in evaluation mode
    zero_init: bool = False  # the script builds its model under `deepspeed.zero.Init`
    earlier: int = 0  # engines with an optimizer, built before the one that trains
    kept_configs: tuple[Any, ...] = ()  # ZeRO sections of accelerate's other plugins, which no candidate changes
    boundary_by_hand: bool = False  # the script says which micro-batch ends a step
    unsynced: bool = False  # it sums gradients under `engine.no_sync`
    grad_changed_by_hand: bool = False
    ops: tuple[str, ...] = ()  # builders of DeepSpeed's ops that were first seen in the probe run
    # -- its batch
    micro_batch: int = 0
    accumulation: int = 1
    counted: str = "rows"  # unit of its steps: `rows`, `sequences`, packed `tokens`, or empty if nothing can be counted
    counted_by: str = ""  # tensor that counts the rows; empty: the first
    uncounted: str = ""  # reason for no count
    rows_per_sample: float = 1.0  # units per sample of the micro-batch: 2 if a loss compares pairs
    micros_per_accumulation: float = 1.0  # forwards with a backward, per accumulation step
    accumulated_by_hand: int = 1  # backwards that the script's loop sums in each accumulation step of its config
    # True: an argument sets the micro-batches that the script's loop sums in a step. "cuts": of its engine's batch
    loop_accumulates: bool | str = False
    batch_note: str = ""  # reason for which the batch is kept
    held: dict[str, int] = _empty()  # `micros` and `rows` of each step, if the batch is kept
    beside: dict[str, int] = _empty()  # rows of a step of each auxiliary engine
    # -- what carries it
    flags: tuple[str, ...] = ()  # known flags that its parsers have
    spellings: dict[str, Any] = _empty()  # flag -> words for [no, yes], if these are not `flag False` and `flag True`
    # places that were found to carry a knob, by knob; those of the samples of a rank's step by `train_batch_size`
    found_flags: dict[str, str] = _empty()
    flag_times: dict[str, int] = _empty()  # multiple of the knob that such a place takes, by knob
    attempts: tuple[str, ...] = ()  # lines: what the search for places has tried and seen, and what it has taken
    tried_values: dict[str, int] = _empty()  # values of files and variables in one run of the search for flags
    # -- what else decides it
    variables: dict[str, str] = _empty()  # device variables that its code sets: too late for a rank
    environment: dict[str, str | None] = _empty()  # variables that its code reads; None if not set. Secrets are masked.
    sources: dict[str, str] = _empty()  # digests of its files
    seeds: tuple[Any, ...] = ()  # by rank, seeds of the probe run, if the script names others in each run
    # under --worst-case, the largest sample by key of a data set; empty if the samples cannot be read
    largest: dict[str, Any] | None = None

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ScriptProfile:
        """Return the profile of facts or JSON data; missing and empty values take their default.

        Raises:
            ValueError: a newer version has stored the data.
        """
        if data.get("version", 1) > cls.version:
            raise ValueError("a newer version has stored the findings about the script")
        known = {name: value for name, value in known_fields(cls, data).items() if value is not None}
        for flag, value in data.get("product_flags", {}).items():  # version 2: own values of flags for a whole step
            known.setdefault("found_flags", {})["train_batch_size"] = flag
            known.setdefault("flag_times", {})["train_batch_size"] = (
                value // data["micro_batch"] // data.get("accumulation", 1)
            )
        lists = {name: tuple(value) for name, value in known.items() if isinstance(value, list)}
        return cls(**{**known, **lists, "version": cls.version})

    def to_json(self) -> dict[str, Any]:
        """Return version and known values as JSON data; empty if there are none."""
        default = vars(ScriptProfile())
        known = {name: value for name, value in vars(self).items() if value != default[name]}
        return known and {**known, "version": self.version}

    @property
    def is_known(self) -> bool:
        """True after the probe run. A short run may repeat single findings before."""
        return self.micro_batch > 0


@dataclass(frozen=True)
class Script:
    """User's own training script: the command typed after `--`, its folder, and the flags that carry knobs."""

    argv: tuple[str, ...]  # the script, `-m` and a module, or an installed command's name, then its arguments
    cwd: str
    flags: tuple[tuple[str, str], ...] = ()  # (knob, flag) pairs that the user declared
    worst_case: bool = False  # every row is the largest sample, padded to the longest sequence that the script allows
    ds_config: str | None = None  # config file for scripts that leave DeepSpeed to `accelerate launch`
    profile: ScriptProfile = ScriptProfile()
    launcher: tuple[str, ...] = ()  # launcher and its options, see `command_line.CommandLine`
    environment: tuple[tuple[str, str], ...] = ()  # (name, value) typed before the launcher
    program: str | None = None  # file of an installed command
    files: tuple[ArgumentFile, ...] = ()

    def __post_init__(self) -> None:
        """Register the command's secrets, so that this process masks them in every text."""
        learn_words([*self.launcher, *self.argv])
        learn_data(dict(self.environment))
        for one in self.files:
            learn_data(one.data)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Script:
        """Return the script of JSON data."""
        made: dict[str, Any] = {"argv": tuple(data["argv"]), "launcher": tuple(data.get("launcher", ()))}
        for name in ("flags", "environment"):
            made[name] = tuple(map(tuple, data.get(name, ())))
        made["files"] = tuple(ArgumentFile(**one) for one in data.get("files", ()))
        made["profile"] = ScriptProfile.from_json(data.get("profile", {}))
        return cls(**{**data, **made})

    def to_json(self) -> dict[str, Any]:
        """Return the script as JSON data, without unused fields that older studies do not know, and without `sources`."""
        data = used_fields(self, ("flags", "worst_case", "ds_config"))
        # a fingerprint holds the sources outside the job
        data["profile"] = dataclasses.replace(self.profile, sources={}).to_json()
        return data

    @property
    def is_module(self) -> bool:
        """Return True if the script is started with `-m`."""
        return self.argv[0] == "-m"

    @property
    def target(self) -> str:
        """The file or module, as typed."""
        return self.argv[1] if self.is_module else self.argv[0]

    @property
    def arguments(self) -> tuple[str, ...]:
        """Words typed after the target."""
        return self.argv[2:] if self.is_module else self.argv[1:]

    @property
    def name(self) -> str:
        """Short name for studies and tables."""
        return self.target.split(".")[-1] if self.is_module else Path(self.target).stem

    @property
    def path(self) -> Path | None:
        """The script's file, or an installed command's; None for a module."""
        if self.program:
            return Path(self.program)
        return None if self.is_module else Path(self.cwd) / self.target

    @property
    def holds_batch(self) -> bool:
        """True if the script always trains on its own batch. Then no batch knobs are passed to it."""
        return bool(self.profile.batch_note)

    @property
    def key(self) -> str:
        """Hash of the command and the texts of its files. Findings of one script are not used for another."""
        text = self.path.read_bytes() if self.path and self.path.is_file() else b""
        known: list[Any] = [self.argv, self.cwd, self.flags, self.worst_case, self.ds_config]
        if self.launcher or self.environment or self.files:
            known += [self.launcher, self.environment, [one.text for one in self.files]]
        return hashlib.sha256(json.dumps(known).encode() + text).hexdigest()[:12]


_OF_A_CALL = ("interpreter", "unprotected")  # fields of a job that a call decides again: they are not part of its JSON


@dataclass(frozen=True)
class Job:
    """Model, data shape and arithmetic of a training: everything that all trials keep unchanged."""

    model: ModelSpec
    ranks: int
    # tokens per sequence, an image's included; for an encoder-decoder, of the source and of the target each
    seq_len: int
    precision: str = "bf16"
    optimizer: str = "adamw"
    global_batch_size: int | None = None  # sequences per optimizer step, over all ranks
    base_config: dict[str, Any] = field(default_factory=dict)  # the user's own DeepSpeed config
    script: Script | None = None  # script to train, if it is not the model with synthetic batches
    workload: str | None = None  # `package.module:function` that returns model and batches
    lora: Lora | None = None
    attention: str | None = None  # transformers' attn_implementation; None: its default
    compiled: bool = False  # DeepSpeed's engine.compile()
    lengths: tuple[tuple[int, int], ...] = ()  # (tokens, count) pairs of a data set; `seq_len` is then the longest
    packed: bool = False  # sequences of those lengths are packed end to end into rows of `seq_len`
    task: str = CAUSAL  # one of `models.TASKS`: the head and its loss
    liger: bool = False  # Liger's fused kernels in place of the model's own
    loss: str = FULL  # one of `LOSSES`
    image_size: int | None = None  # pixels of an image's height and width, if the configuration does not give them
    # plain torch without DeepSpeed: stage 0 is DistributedDataParallel, stage 3 FullyShardedDataParallel
    torch_alone: bool = False
    # _OF_A_CALL: the Python of ranks and tracer, and consent to run user code on machines that offer no sandbox
    interpreter: Interpreter = field(default=OWN, repr=False)
    unprotected: bool = field(default=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        learn_data(self.base_config)
        if self.ranks < 1:
            raise UserError(f"--gpus {self.ranks}: expected at least 1")
        if not 1 <= self.seq_len <= MOST_TOKENS:
            raise UserError(f"--seq-len {display_value(self.seq_len)}: expected between 1 and {MOST_TOKENS} tokens")
        for option, value, known in (
            ("--precision", self.precision, PRECISIONS),
            ("--optimizer", self.optimizer, OPTIMIZERS),
            ("--attn", self.attention, ATTENTIONS),
            ("--loss", self.loss, LOSSES),
        ):
            if value is not None and value not in known:
                raise UserError(f"{option} {value}: expected one of {', '.join(known)}")
        if self.packed and self.task != CAUSAL:
            raise UserError(
                f"--lengths with --seq-len packs sequences, which is for --task {CAUSAL}: {self.task} has no packed rows"
            )
        if why := self._unsplittable():
            raise UserError(f"{SEQUENCE_RANKS} {display_value(repr(self.base_config[SEQUENCE_RANKS]))}: {why}")
        if self.global_batch_size is not None:
            whole_number(self.global_batch_size, "--global-batch-size", 1, MOST_BATCH)
            if self.global_batch_size % self.data_ranks:
                raise UserError(
                    f"--global-batch-size {self.global_batch_size} cannot be split evenly over "
                    f"{counted_ranks(self.ranks, self.sequence_ranks)}: try {near(self.global_batch_size, self.data_ranks)}"
                )

    def _unsplittable(self) -> str:
        """Return why Ulysses cannot split the sequences of a named model; empty if it can, or if they stay whole.

        Source: deepspeed 0.19.8, runtime/sequence_parallel: parallel_state_sp.py, `initialize_sequence_parallel`; ulysses_sp.py,
        `UlyssesSPAttentionHF` and `UlyssesSPDataLoaderAdapter`.
        """
        value, size = self.base_config.get(SEQUENCE_RANKS, 1), self.sequence_ranks
        if self.script is None and (type(value) is not int or value < 1):
            return "expected a whole number of ranks. Change it, or remove the key"
        if size == 1:
            return ""
        if self.ranks % size:
            return f"does not divide the {self.ranks} ranks. Change --gpus, or the size"
        heads = attention_heads(self.model.config)
        if heads is None or self.task != CAUSAL:
            return "Ulysses splits causal models with attention in each layer. Remove the key"
        if heads.queries % size or (heads.keys % size and size % heads.keys):
            return (
                f"{self.model.name} has {heads.queries} attention heads and {heads.keys} of keys, which {size} ranks cannot "
                "share. Choose a size that divides them"
            )
        if self.attention == "eager":
            return "Ulysses does not run with --attn eager. Choose another attention"
        if self.seq_len % size:
            return f"does not divide the {self.seq_len} tokens of --seq-len. Change one of them"
        return ""

    def to_json(self) -> dict[str, Any]:
        """Return the job as JSON data, without unused fields, which must not change an older study's key."""
        data = used_fields(self, ("precision", "optimizer", "global_batch_size"))
        if self.script is not None:
            data["script"] = self.script.to_json()
        if self.lora is not None:
            data["lora"] = self.lora.to_json()
        return {name: value for name, value in data.items() if name not in _OF_A_CALL}

    def called_like(self, other: Job) -> Job:
        """Return the job with those fields of another job that belong to the call and not to the JSON."""
        return dataclasses.replace(self, **{name: getattr(other, name) for name in _OF_A_CALL})

    def order(self) -> dict[str, Any]:
        """Return the job in the form that every process which builds its model receives."""
        return self.to_json()

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Job:
        """Return the job of JSON data, in the reader's own interpreter; ignore unknown keys."""
        values = {name: value for name, value in known_fields(cls, data).items() if name not in _OF_A_CALL}
        script = Script.from_json(values["script"]) if values.get("script") else None
        lora = Lora.from_json(values["lora"]) if values.get("lora") else None
        lengths = tuple(map(tuple, values.get("lengths", ())))
        model = ModelSpec(**values["model"])
        return cls(**{**values, "model": model, "script": script, "lora": lora, "lengths": lengths})

    @property
    def has_own_code(self) -> bool:
        """Return whether building the model calls a workload, or code of the model's repository."""
        return self.workload is not None or self.model.trust_remote_code

    @property
    def profile(self) -> ScriptProfile:
        """Findings about the script; empty without a script."""
        return ScriptProfile() if self.script is None else self.script.profile

    @property
    def sequence_ranks(self) -> int:
        """Ranks that share each sequence of a named model (Ulysses), by the user's own config; 1 if each has its own."""
        return 1 if self.script is not None else sequence_ranks(self.base_config)

    @property
    def data_ranks(self) -> int:
        """Micro-batches that all ranks train on at a time: the ranks, or their groups if they share sequences."""
        return self.ranks // self.ranks_per_sequence

    @property
    def ranks_per_sequence(self) -> int:
        """Ranks that share each sequence (Ulysses), of a script by its first run. A script's `seq_len` is a rank's part of it."""
        return self.sequence_ranks * self.profile.sequence_ranks

    @property
    def element_bytes(self) -> float:
        """Bytes of one element of a parameter, an activation or a gradient, in the precision of the model's arithmetic."""
        return 4.0 if self.precision == "fp32" else 2.0

    @property
    def plain(self) -> bool:
        """True if weights, gradients and states are all in 16 bits, without 32-bit masters.

        Plain torch does this, and DeepSpeed if the precision's section is switched off.
        """
        section = self.base_config.get(self.precision)
        return isinstance(section, dict) and section.get("enabled") is False

    @property
    def trained_bytes(self) -> float:
        """Bytes of one element of a trainable parameter and of its gradient."""
        return 4.0 if self.lora is not None and self.lora.fp32 and self.plain else self.element_bytes

    @property
    def autocast(self) -> str | None:
        """`bfloat16` or `float16` if forward runs under torch's autocast (DeepSpeed's section `torch_autocast`), else None."""
        section = self.base_config.get("torch_autocast")
        if not isinstance(section, dict) or section.get("enabled") is not True:
            return None
        dtype = str(section.get("dtype")).removeprefix("torch.")
        return "float16" if dtype in ("float16", "fp16") else "bfloat16"

    @property
    def optimizer_kind(self) -> str:
        """Type of the optimizer in lower case: from the user's own config, or else the job's."""
        return str(self.own_optimizer.get("type", self.optimizer)).lower()

    @property
    def own_optimizer(self) -> dict[str, Any]:
        """The `optimizer` section of the user's own config; empty if it is missing or not an object."""
        section = self.base_config.get("optimizer")
        return section if isinstance(section, dict) else {}

    @property
    def tokens_per_sample(self) -> float:
        """Mean tokens per sequence without padding; source and target of an encoder-decoder together.

        For a script it is the mean of its first steps, over all forwards of a sample.
        """
        if self.profile.tokens_per_sample:
            return self.profile.tokens_per_sample
        sides = 2 if self.task == SEQ2SEQ else 1  # source and target
        if not self.lengths:
            return float(sides * self.seq_len)
        return sides * sum(tokens * count for tokens, count in self.lengths) / sum(count for _, count in self.lengths)

    @property
    def samples_per_row(self) -> float:
        """Mean number of sequences in one row of a batch: 1, or more if they are packed or if a script sums batches by hand."""
        if self.packed:
            return self.seq_len / self.tokens_per_sample
        return self.profile.accumulated_by_hand

    @property
    def summary(self) -> str:
        """One line for display."""
        held = self.global_batch_size and round(self.global_batch_size * (1 if self.packed else self.samples_per_row))
        batch = f"global batch {held}" if held else "batch free"
        optimizer = "its own optimizer" if self.script else self.optimizer_kind
        shared = self.ranks_per_sequence
        extras = {
            self.task: self.task != CAUSAL,
            f"images of {self.image_size} pixels": self.image_size,
            f"LoRA of rank {self.lora and self.lora.rank}": self.lora,
            str(self.attention): self.attention,
            "compiled": self.compiled,
            f"sequences split over {shared} ranks": shared > 1,
        }
        tokens = f"{self.seq_len * shared // self.sequence_ranks} tokens"
        if self.lengths:
            packed = f"packed to {self.seq_len}" if self.packed else f"{self.seq_len} at most"
            tokens = f"{self.tokens_per_sample:.0f} tokens on average, {packed}"
        parts = {
            self.model.name: True,
            tokens: self.script is None or self.seq_len > 1,  # a script without tokens has one
            self.precision: True,
            **extras,
            optimizer: True,
            batch: True,
        }
        return ", ".join(text for text, is_so in parts.items() if is_so)

    @property
    def key(self) -> str:
        """Short stable hash of everything in the Job."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()[:16]


MOST_TOKENS = 10_000_000  # tokens per sequence

# -- source text of a script -------------------------------------------------------------------------------------------
#
# Facts from a script's own text, available before its first run.

_LIGHTNING = re.compile(r"^\s*(?:from|import)\s+(?:pytorch_)?lightning\b", re.MULTILINE)


def script_text(script: Script) -> str | None:
    """Return the script's text, or None if it cannot be read."""
    if script.path is None or not script.path.is_file():
        return None
    return script.path.read_text(errors="replace", encoding="utf-8")


def under_lightning(script: Script) -> bool:
    """Check that Lightning trains: the probe run showed it; before that, the script's text imports it."""
    known = script.profile
    return known.lightning or (not known.is_known and bool(_LIGHTNING.search(script_text(script) or "")))


# -- checkpoint --------------------------------------------------------------------------------------------------------
#
# Size of a training's checkpoint, the time to write and read it, and the time to save the weights.

# bytes per parameter, at most: two copies of the weight (the module's, and the optimizer's in fp32) and two moments.
_TRAINED_BYTES, _FROZEN_BYTES = 16, 4
BYTES_PER_SECOND = 1e9  # a fair share of a parallel file system; local NVMe disks take 2 to 5 GB/s


def checkpoint_bytes(trained: float, frozen: float) -> float:
    """Return an upper bound of a checkpoint's bytes over all ranks; parameters in elements."""
    return trained * _TRAINED_BYTES + frozen * _FROZEN_BYTES


def checkpoint_seconds(trained: float, frozen: float) -> float:
    """Return the seconds to write a checkpoint and to read it again."""
    return 2 * checkpoint_bytes(trained, frozen) / BYTES_PER_SECOND


def weights_bytes(elements: float, element_bytes: float) -> float:
    """Return the bytes of all weights, frozen ones included, which a save gathers into the first rank's main memory.

    Source: deepspeed 0.19.8, runtime/engine.py, `_zero3_consolidated_16bit_state_dict`; in fp32 it gathers 4 bytes an element.
    """
    return elements * element_bytes


def weights_seconds(elements: float, element_bytes: float) -> float:
    """Return the seconds to gather the weights by module, copy them to main memory, and write them.

    One process does all of this and checksums the bytes, so that discarding the output makes it no faster.
    """
    return weights_bytes(elements, element_bytes) / BYTES_PER_SECOND
