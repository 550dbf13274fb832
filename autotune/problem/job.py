"""What is trained. A Job is frozen; every study belongs to exactly one."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.bounds import parse_json, read_text, shown, whole_number
from autotune.errors import UserError
from autotune.masking import learn_data, learn_words
from autotune.problem.models import ModelSpec
from autotune.problem.tasks import CAUSAL, SEQ2SEQ, TASKS

MOST_BATCH = 2**31  # sequences an optimizer step
PRECISIONS = ("bf16", "fp16", "fp32")
# `adamw` is torch's, fused: what Hugging Face's Trainer uses by default; offloaded, DeepSpeed replaces it by its own.
OPTIMIZERS = ("adamw", "adam", "fused_adam", "lion", "sgd", "adagrad")


ATTENTIONS = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")


@dataclass(frozen=True)
class Lora:
    """Low-rank adapters instead of full training."""

    rank: int
    targets: tuple[str, ...] = ("all-linear",)  # names of modules, or that word
    alpha: int | None = None  # None: twice the rank
    saved: tuple[str, ...] = ()  # names of modules that are trained whole beside the adapters (peft's modules_to_save)
    dropout: float = 0.0  # of what each adapter reads: a copy of it and a mask are kept for backward
    fp32: bool = (
        False  # adapters in 32 bits on 16-bit weights, as peft makes them; DeepSpeed's engine makes all 16 bits again
    )

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Lora:
        return cls(
            data["rank"],
            tuple(data["targets"]),
            data["alpha"],
            tuple(data.get("saved", ())),
            data.get("dropout", 0.0),
            data.get("fp32", False),
        )

    def to_json(self) -> dict[str, Any]:
        """What older studies do not know is left out where it is not used."""
        data = dataclasses.asdict(self)
        return {name: value for name, value in data.items() if value or name not in ("saved", "dropout", "fp32")}

    def __str__(self) -> str:
        """As `parse_lora` reads it."""
        targets = "" if self.targets == ("all-linear",) else f",targets={'+'.join(self.targets)}"
        alpha = f",alpha={self.alpha}" if self.alpha is not None else ""
        saved = f",saved={'+'.join(self.saved)}" if self.saved else ""
        dropout = f",dropout={self.dropout:g}" if self.dropout else ""
        return f"r={self.rank}{targets}{alpha}{saved}{dropout}" + (",dtype=fp32" if self.fp32 else "")


def parse_lora(text: str) -> Lora:
    """`r=16,targets=all-linear,alpha=32,saved=lm_head,dropout=0.05,dtype=fp32`; several targets are joined by `+`.

    Raises:
        UserError: the text is not written like that, or the rank or the dropout is out of range.
    """
    values: dict[str, str] = {}
    for part in text.split(","):
        key, equals, value = part.strip().partition("=")
        if not equals or key not in ("r", "targets", "alpha", "saved", "dropout", "dtype") or not value:
            raise UserError(f"LoRA {text}: expected r=16,targets=all-linear (or q_proj+v_proj),alpha=32")
        values[key] = value
    rank = whole_number(values.get("r", "16"), f"LoRA {shown(text)}: r", 1, 4096)
    alpha = whole_number(values["alpha"], f"LoRA {shown(text)}: alpha", 0, 2**31) if "alpha" in values else None
    try:
        dropout = float(values.get("dropout", "0"))
    except ValueError:
        dropout = -1.0
    if not 0 <= dropout < 1:
        raise UserError(f"LoRA {text}: dropout is a share between 0 and 1")
    if values.get("dtype", "fp32") != "fp32":
        raise UserError(f"LoRA {text}: dtype is fp32, or left out for that of the weights")
    saved = tuple(values["saved"].split("+")) if "saved" in values else ()
    return Lora(rank, tuple(values.get("targets", "all-linear").split("+")), alpha, saved, dropout, "dtype" in values)


@dataclass(frozen=True)
class ArgumentFile:
    """A YAML or JSON file that a command names, and that holds arguments of its training."""

    at: int  # index of the word that names it, in `Script.argv`, or in `Script.launcher`
    path: str
    text: str
    data: dict[str, Any]  # as parsed, so that a rank needs no parser
    launcher: bool = False  # whether its launcher reads it


@dataclass(frozen=True)
class Script:
    """A user's own training script: the command typed after `--`, its folder, and the flags that carry knobs."""

    argv: tuple[str, ...]  # the script, `-m` and a module, or an installed command's name, then its arguments
    cwd: str
    flags: tuple[tuple[str, str], ...] = ()  # (knob, flag) as the user declared them
    worst_case: bool = False  # every batch is padded to the longest that the script allows
    ds_config: str | None = None  # file for scripts that leave DeepSpeed to `accelerate launch`
    profile: dict[str, Any] = field(default_factory=dict)  # what running it as it is showed
    launcher: tuple[str, ...] = ()  # typed before it, with its options, see `command_line.CommandLine`
    environment: tuple[tuple[str, str], ...] = ()  # (name, value) typed before that
    program: str | None = None  # the file of an installed command
    files: tuple[ArgumentFile, ...] = ()

    def __post_init__(self) -> None:
        """Learn the secrets of the command, so that no text of this process shows them."""
        learn_words([*self.launcher, *self.argv])
        learn_data(dict(self.environment))
        for one in self.files:
            learn_data(one.data)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Script:
        made: dict[str, Any] = {"argv": tuple(data["argv"]), "launcher": tuple(data.get("launcher", ()))}
        for name in ("flags", "environment"):
            made[name] = tuple((first, second) for first, second in data.get(name, ()))
        made["files"] = tuple(ArgumentFile(**one) for one in data.get("files", ()))
        return cls(**{**data, **made})

    @property
    def is_module(self) -> bool:
        return self.argv[0] == "-m"

    @property
    def target(self) -> str:
        """The file or module, as typed."""
        return self.argv[1] if self.is_module else self.argv[0]

    @property
    def arguments(self) -> tuple[str, ...]:
        """What is typed after it."""
        return self.argv[2:] if self.is_module else self.argv[1:]

    @property
    def name(self) -> str:
        """Short, for studies and tables."""
        return self.target.split(".")[-1] if self.is_module else Path(self.target).stem

    @property
    def path(self) -> Path | None:
        """The script's file; None for a module."""
        if self.program is not None:
            return Path(self.program)
        return None if self.is_module else Path(self.cwd) / self.target

    @property
    def holds_batch(self) -> bool:
        """Whether its batch is its own, whatever it is told: then it is told none."""
        return bool(self.profile.get("batch_note"))

    @property
    def variables(self) -> dict[str, str]:
        """What its code was seen to set of the device's variables, in time for a plain run and too late for a rank."""
        return dict(self.profile.get("variables", {}))

    @property
    def key(self) -> str:
        """A hash of the command and the texts of its files: what was learnt of one script is not used for another."""
        text = self.path.read_bytes() if self.path and self.path.is_file() else b""
        known: list[Any] = [self.argv, self.cwd, self.flags, self.worst_case, self.ds_config]
        if self.launcher or self.environment or self.files:
            known += [self.launcher, self.environment, [one.text for one in self.files]]
        return hashlib.sha256(json.dumps(known).encode() + text).hexdigest()[:12]


@dataclass(frozen=True)
class Job:
    """Model, data shape and arithmetic of a training; everything a trial must keep as it is."""

    model: ModelSpec
    ranks: int
    seq_len: int  # tokens a sequence, an image's included; of an encoder-decoder those of the source, and of the target
    precision: str = "bf16"
    optimizer: str = "adamw"
    global_batch_size: int | None = None  # sequences an optimizer step, over all ranks
    base_config: dict[str, Any] = field(default_factory=dict)  # the user's own DeepSpeed config
    script: Script | None = None  # what is trained, where it is not the model with synthetic batches
    workload: str | None = None  # `package.module:function` that gives model and batches
    lora: Lora | None = None
    attention: str | None = None  # transformers' attn_implementation; None: its own choice
    compiled: bool = False  # DeepSpeed's engine.compile()
    lengths: tuple[tuple[int, int], ...] = ()  # (tokens, how often) of a data set; `seq_len` is then the longest
    packed: bool = False  # sequences of those lengths are laid end to end until a row of `seq_len` is full
    task: str = CAUSAL  # one of `tasks.TASKS`: the head and its loss
    liger: bool = False  # Liger's fused kernels in place of the model's own
    image_size: int | None = None  # pixels of an image's height and width, where the configuration does not tell
    torch_alone: bool = False  # no DeepSpeed: stage 0 is DistributedDataParallel, stage 3 FullyShardedDataParallel

    def __post_init__(self) -> None:
        learn_data(self.base_config)
        if self.ranks < 1:
            raise UserError(f"--gpus {self.ranks}: expected at least 1")
        if not 1 <= self.seq_len <= MOST_TOKENS:
            raise UserError(f"--seq-len {shown(self.seq_len)}: expected between 1 and {MOST_TOKENS} tokens")
        if self.precision not in PRECISIONS:
            raise UserError(f"--precision {self.precision}: expected one of {', '.join(PRECISIONS)}")
        if self.optimizer not in OPTIMIZERS:
            raise UserError(f"--optimizer {self.optimizer}: expected one of {', '.join(OPTIMIZERS)}")
        if self.attention is not None and self.attention not in ATTENTIONS:
            raise UserError(f"--attn {self.attention}: expected one of {', '.join(ATTENTIONS)}")
        if self.task not in TASKS:
            raise UserError(f"--task {self.task}: expected one of {', '.join(TASKS)}")
        if self.packed and self.task != CAUSAL:
            raise UserError(f"--packing is for --task {CAUSAL}: sequences of {self.task} are not laid end to end")
        if self.packed and not self.lengths:
            raise UserError("--packing needs to know how long sequences are: give --lengths FILE")
        if self.global_batch_size is not None:
            whole_number(self.global_batch_size, "--global-batch-size", 1, MOST_BATCH)
            if self.global_batch_size % self.ranks:
                low = self.global_batch_size // self.ranks * self.ranks
                near = " or ".join(str(size) for size in (low, low + self.ranks) if size)
                raise UserError(
                    f"--global-batch-size {self.global_batch_size} cannot be split evenly over {self.ranks} ranks: "
                    f"try {near}"
                )

    def to_json(self) -> dict[str, Any]:
        data = dataclasses.asdict(self)
        unused = "script workload lora attention compiled lengths packed liger image_size torch_alone"
        for name in unused.split():
            if not data[name]:
                del data[name]  # what is not used does not make an older study another's
        if script := data.get("script"):  # nor does what this one is started without
            script["profile"].pop("sources", None)  # a fingerprint has them beside the job
            for name in [one for one in ("launcher", "environment", "program", "files") if not script[one]]:
                del script[name]
        if self.lora:
            data["lora"] = self.lora.to_json()
        if self.task == CAUSAL:
            del data["task"]
        return data

    def order(self) -> dict[str, Any]:
        """Return the job as a process receives it that builds its model. All such processes are started with this."""
        return self.to_json()

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Job:
        known = {f.name for f in dataclasses.fields(cls)}
        values = {key: value for key, value in data.items() if key in known}
        script = Script.from_json(values["script"]) if values.get("script") else None
        lora = Lora.from_json(values["lora"]) if values.get("lora") else None
        lengths = tuple((tokens, count) for tokens, count in values.get("lengths", ()))
        model = ModelSpec(**values["model"])
        return cls(**{**values, "model": model, "script": script, "lora": lora, "lengths": lengths})

    @property
    def element_bytes(self) -> float:
        """Bytes of one element of a parameter, an activation or a gradient, in the precision of the model's arithmetic."""
        return 4.0 if self.precision == "fp32" else 2.0

    @property
    def plain(self) -> bool:
        """Whether weights, gradients and states are all in 16 bits, without 32-bit masters: plain torch, or DeepSpeed with the
        precision's section switched off."""
        section = self.base_config.get(self.precision)
        return isinstance(section, dict) and section.get("enabled") is False

    @property
    def trained_bytes(self) -> float:
        """Bytes of one element of a trainable parameter and of its gradient."""
        return 4.0 if self.lora is not None and self.lora.fp32 and self.plain else self.element_bytes

    @property
    def autocast(self) -> str | None:
        """`bfloat16` or `float16` where forward runs under torch's autocast (DeepSpeed's section `torch_autocast`)."""
        section = self.base_config.get("torch_autocast")
        if not isinstance(section, dict) or section.get("enabled") is not True:
            return None
        return (
            "float16"
            if str(section.get("dtype", "bfloat16")).removeprefix("torch.") in ("float16", "fp16")
            else "bfloat16"
        )

    @property
    def optimizer_kind(self) -> str:
        """The type of the optimizer in lower case: the one in the user's own config, or else the job's."""
        return str(self.own_optimizer.get("type", self.optimizer)).lower()

    @property
    def own_optimizer(self) -> dict[str, Any]:
        """The `optimizer` section of the user's own config; empty where it has none, or a word."""
        section = self.base_config.get("optimizer")
        return section if isinstance(section, dict) else {}

    @property
    def tokens_per_sample(self) -> float:
        """Mean tokens a sequence, without padding, of an encoder-decoder source and target together; for a script the mean of
        its first steps, over all forwards of a sample."""
        if self.script is not None and self.script.profile.get("tokens_per_sample"):
            return float(self.script.profile["tokens_per_sample"])
        sides = 2 if self.task == SEQ2SEQ else 1  # source and target
        if not self.lengths:
            return float(sides * self.seq_len)
        return sides * sum(tokens * count for tokens, count in self.lengths) / sum(count for _, count in self.lengths)

    @property
    def samples_per_row(self) -> float:
        """Mean number of sequences in one row of a batch: 1, or more where they are packed."""
        return self.seq_len / self.tokens_per_sample if self.packed else 1.0

    @property
    def summary(self) -> str:
        """One line for people."""
        batch = f"global batch {self.global_batch_size}" if self.global_batch_size else "batch free"
        optimizer = "its own optimizer" if self.script else self.optimizer
        extras = [self.task] if self.task != CAUSAL else []
        extras += [f"images of {self.image_size} pixels"] if self.image_size else []
        extras += [f"LoRA of rank {self.lora.rank}"] if self.lora else []
        extras += [self.attention] if self.attention else []
        extras += ["compiled"] if self.compiled else []
        tokens = f"{self.seq_len} tokens"
        if self.lengths:
            packed = f"packed to {self.seq_len}" if self.packed else f"{self.seq_len} at most"
            tokens = f"{self.tokens_per_sample:.0f} tokens on average, {packed}"
        return ", ".join([self.model.name, tokens, self.precision, *extras, optimizer, batch])

    @property
    def key(self) -> str:
        """A short stable name of everything in the Job."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()[:16]


MOST_TOKENS = 10_000_000  # of a sequence
MOST_LENGTHS = 256  # different ones that are kept of a data set


def load_lengths(path: Path) -> tuple[tuple[int, int], ...]:
    """A data set's lengths in tokens: a JSON object or CSV lines of `length: how often`, or one length a line.

    Many different lengths are merged upwards, so that no batch is taken for shorter than it is.

    Raises:
        UserError: the file is none of these.
    """
    expected = 'expected {"512": 1000, …}, lines of `512,1000`, or one length a line'
    what = f"--lengths {path}"
    text = read_text(path, what, expected)
    rows: list[list[object]]
    if text.lstrip().startswith("{"):
        data = parse_json(text, what, expected)
        rows = [[tokens, count] for tokens, count in data.items()]
    else:
        rows = [[*line.replace(",", " ").split()] for line in text.splitlines() if line.strip()]
    pairs = []
    for row in rows:
        if len(row) > 2:
            raise UserError(f"{what}: {shown(' '.join(map(str, row)))}: more than two numbers in a line; {expected}")
        tokens, count = row[0], row[1] if len(row) > 1 else 1
        try:
            pairs.append((whole_number(tokens, what, 1, MOST_TOKENS), whole_number(count, what)))
        except UserError as error:
            raise UserError(f"{error}; {expected}") from None
    counts: Counter[int] = Counter()
    for tokens, count in pairs:
        counts[tokens] += count
    if not +counts:
        raise UserError(f"--lengths {path} is empty; {expected}")
    step = -(-max(counts) // MOST_LENGTHS) if len(counts) > MOST_LENGTHS else 1
    merged: Counter[int] = Counter()
    for tokens, count in counts.items():
        merged[min(max(counts), -(-tokens // step) * step)] += count
    return tuple(sorted((+merged).items()))


# Positions that count from behind the padding token's id on (RoBERTa's), and those that are relative: T5's `n_positions` is
# what it was pretrained with.
_FROM_PADDING = (
    "roberta",
    "xlm-roberta",
    "xlm-roberta-xl",
    "roberta-prelayernorm",
    "camembert",
    "data2vec-text",
    "xmod",
)
_RELATIVE = ("t5", "mt5", "umt5", "longt5", "switch_transformers")


def longest_sequence(config: dict[str, Any]) -> int | None:
    """The model's longest sequence in tokens, as its configuration says."""
    text = config.get("text_config") or config
    if config.get("model_type") in _RELATIVE:
        return None
    taken = (text.get("pad_token_id") or 0) + 1 if config.get("model_type") in _FROM_PADDING else 0
    for key in ("max_position_embeddings", "n_positions", "max_sequence_length", "n_ctx"):
        if isinstance(text.get(key), int):
            return int(text[key]) - taken
    return None
