"""What stands between a user's script and deepspeed, transformers and accelerate, in one rank.

The script is not changed and does not know. A candidate's keys go into its DeepSpeed config wherever that comes from
(file, dict, TrainingArguments, accelerate's plugin), its batch sizes into the arguments and data loaders that carry
them; the engine that it trains is watched from outside.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import inspect
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from autotune.errors import Unusable
from autotune.problem.candidate import CHECKPOINTING, Candidate
from autotune.problem.job import Job
from autotune.problem.script import FLAGS, LOCAL_RANK_FLAGS, settings, with_configs, with_flag
from autotune.rank.config import QUIET

# Trackers and uploads, each by the variable that its documentation names.
QUIET_ENVIRONMENT = {
    "WANDB_MODE": "disabled",
    "COMET_MODE": "disabled",
    "NEPTUNE_MODE": "debug",
    "CLEARML_OFFLINE_MODE": "1",
    "SWANLAB_MODE": "disabled",
    "DISABLE_MLFLOW_INTEGRATION": "TRUE",
    "TRACKIO_DISABLED": "1",
    "DVCLIVE_TEST": "true",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "ACCELERATE_DISABLE_RICH": "1",
}


UNLIMITED = 10**6  # a tokenizer without a limit says a far larger one


class Watcher(Protocol):
    """Sees the script's training. Every method is called on every rank."""

    def configured(self, config: dict[str, Any]) -> None:
        """The script's own DeepSpeed config, before anything of a candidate is in it."""

    def planned(self, micro_batch: int, accumulation: int) -> None:
        """The batch that the script asks for: known before memory can run out."""

    def built(self, engine: Any, facts: dict[str, Any]) -> None:
        """The engine that trains exists."""

    def forward(self, rows: int, tokens: int) -> None:
        """A forward of the training begins: sequences and tokens of its batch."""

    def entered(self, name: str) -> None:
        """`init`, `forward`, `backward` or `step` begins."""

    def stepped(self) -> None:
        """An optimizer step is done."""

    def failed(self, error: BaseException) -> None:
        """An exception left the engine; the script may catch it, so memory failures are reported here."""

    def strayed(self) -> None:
        """An optimizer stepped, and no engine of DeepSpeed exists."""


class Hooks:
    """Installed once in a rank, before its script runs.

    Args:
        candidate: what is tried; None leaves the script's own settings.
        folder: where merged configs go, and with `quiet` all that the script writes on its own account.
        quiet: no checkpoints, evaluations, trackers and uploads: a measurement, not a training.
    """

    def __init__(
        self, job: Job, candidate: Candidate | None, watcher: Watcher, device: str, folder: Path, *, quiet: bool
    ) -> None:
        assert job.script is not None
        self.job, self.script, self.candidate, self.watcher = job, job.script, candidate, watcher
        self.device, self.folder, self.quiet = device, folder, quiet
        self.engine: Any = None
        self._configured = False
        self._through_arguments = False  # TrainingArguments carry the batch sizes
        self._steps_elsewhere = 0
        self._flags: set[str] = set()  # of FLAGS, those that the script's own parsers have
        self._loader_prepared = False  # accelerate has prepared the script's own loader
        self._allowed: list[int] = []  # longest sequences that arguments and tokenizers allow

    def install(self) -> None:
        if self.script.ds_config is not None:  # as `accelerate launch` says it
            os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
            os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = self.script.ds_config
        self._hook_argparse()
        self._hook_process_group()
        self._hook_deepspeed()
        self._hook_optimizers()
        self._hook_accelerate()
        self._hook_transformers()
        if self.script.worst_case:
            self._hook_tokenizers()

    # -- the config --------------------------------------------------------------------------------------------------

    def merged(self, config: dict[str, Any]) -> dict[str, Any]:
        """The script's config with the candidate's keys in it."""
        if not self._configured:
            self._configured = True
            self.watcher.configured(copy.deepcopy(config))
        found = copy.deepcopy(config)
        if self.quiet:
            for key in QUIET:
                found.pop(key, None)
        if self.candidate is None:
            return found
        base = {**found, **{key: value for key, value in self.job.base_config.items() if key not in found}}
        return self.candidate.ds_config(dataclasses.replace(self.job, base_config=base))

    def arguments(self) -> list[str]:
        """The script's arguments, with declared flags set and DeepSpeed config files replaced by merged ones."""
        argv = list(self.script.arguments)
        if self.candidate is None:
            return argv
        for flag, value in ((flag, self.candidate.get(knob)) for knob, flag in self.script.flags):
            if value is not None:
                argv = with_flag(argv, flag, value)
        return with_configs(argv, Path(), self._merged_file)

    def _merged_file(self, path: Path, at: int) -> str:
        """A copy of the script's config file with the candidate's keys in it."""
        merged = self.folder / f"{path.stem}.{at}.rank{os.environ['RANK']}.json"
        merged.write_text(json.dumps(self.merged(json.loads(path.read_text()))))
        return str(merged)

    # -- what is hooked ----------------------------------------------------------------------------------------------

    def _hook_argparse(self) -> None:
        """Flags that carry knobs, in any argparse parser that has them; and the rank, which `deepspeed` gives by a flag
        and `torchrun` does not."""
        wanted = settings(self.script, self.candidate) if self.candidate is not None else {}
        original = argparse.ArgumentParser.parse_known_args

        @functools.wraps(original)
        def parse_known_args(parser: Any, *args: Any, **kwargs: Any) -> Any:
            found, rest = original(parser, *args, **kwargs)
            self._flags |= parser._option_string_actions.keys() & FLAGS
            for flag, value in wanted.items():
                action = parser._option_string_actions.get(flag)
                if action is not None and hasattr(found, action.dest):
                    setattr(found, action.dest, value)
            for flag in LOCAL_RANK_FLAGS:
                action = parser._option_string_actions.get(flag)
                if action is not None and getattr(found, action.dest, None) == action.default:
                    setattr(found, action.dest, int(os.environ["LOCAL_RANK"]))
            return found, rest

        setattr(argparse.ArgumentParser, original.__name__, parse_known_args)

    def _hook_process_group(self) -> None:
        """The script's process group is the one that the rank has made: by a file, not at a port that two trials may
        meet on."""
        import torch

        original = torch.distributed.init_process_group

        @functools.wraps(original)
        def init_process_group(*args: Any, **kwargs: Any) -> None:
            if not torch.distributed.is_initialized():
                original(*args, **kwargs)

        torch.distributed.init_process_group = init_process_group
        torch.distributed.distributed_c10d.init_process_group = init_process_group

    def _hook_deepspeed(self) -> None:
        import deepspeed
        from deepspeed.runtime.engine import DeepSpeedEngine

        original = deepspeed.initialize
        signature = inspect.signature(original)

        @functools.wraps(original)
        def initialize(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind_partial(*args, **kwargs).arguments
            config, own = self._config_of(bound)
            optimizer = bound.get("optimizer")
            if self.engine is not None or not _trains(bound, config):
                return original(*args, **kwargs)
            if isinstance(bound.get("model"), deepspeed.PipelineModule):
                raise Unusable(
                    "the script trains a pipeline (PipelineModule), which takes no ZeRO stage above 1 and no other "
                    "loop than its own: it is not tuned"
                )
            self.watcher.entered("init")
            bound["config"] = self.merged(config)
            if plan := batch_of(bound["config"], int(os.environ["WORLD_SIZE"])):
                self.watcher.planned(*plan)
            bound.pop("config_params", None)
            if own:
                bound["args"] = copy.copy(bound["args"])
                bound["args"].deepspeed_config = None
            if self.candidate is not None and self.candidate.checkpointing and not self._through_arguments:
                _checkpoint(bound["model"])
            try:
                made = original(**bound)
            except BaseException as error:
                self.watcher.failed(error)
                raise
            self.engine = made[0]
            self.watcher.built(self.engine, self._facts(optimizer))
            return made

        deepspeed.initialize = initialize
        for name in ("forward", "backward", "step"):
            setattr(DeepSpeedEngine, name, self._watched(name, getattr(DeepSpeedEngine, name)))
        if self.quiet:
            for name in ("save_checkpoint", "save_16bit_model"):
                setattr(DeepSpeedEngine, f"_autotune_{name}", getattr(DeepSpeedEngine, name))
                setattr(DeepSpeedEngine, name, lambda engine, *args, **kwargs: True)

    def _config_of(self, bound: dict[str, Any]) -> tuple[dict[str, Any], bool]:
        """(the config, whether it came through `args`)."""
        config = bound.get("config")
        if config is None:
            config = bound.get("config_params")
        own = config is None and getattr(bound.get("args"), "deepspeed_config", None) is not None
        if own:
            config = bound["args"].deepspeed_config
        if isinstance(config, str | Path):
            with open(config) as file:
                config = json.load(file)
        return (config if isinstance(config, dict) else {}), own

    def _facts(self, optimizer: Any) -> dict[str, Any]:
        """What the tuner wants to know of the engine; sizes in elements."""
        engine = self.engine
        module = engine.module
        plain = getattr(module, "get_base_model", lambda: module)()
        config: Any = getattr(plain, "config", None)
        sizes = [(getattr(p, "ds_numel", p.numel()), p.requires_grad) for p in module.parameters()]
        supported = True
        if optimizer is not None and not callable(optimizer):
            from deepspeed.runtime.zero.utils import is_zero_supported_optimizer

            supported = bool(is_zero_supported_optimizer(optimizer))
        precision = "bf16" if engine.bfloat16_enabled() else "fp16" if engine.fp16_enabled() else "fp32"
        return {
            "micro_batch": engine.train_micro_batch_size_per_gpu(),
            "accumulation": engine.gradient_accumulation_steps(),
            "precision": precision,
            "model_config": json.loads(json.dumps(config.to_dict(), default=str)) if hasattr(config, "to_dict") else {},
            "causal": "CausalLM" in type(plain).__name__ or "LMHead" in type(plain).__name__,
            "model": type(plain).__name__,
            "trained": [n for n, trained in sizes if trained],
            "frozen": sum(n for n, trained in sizes if not trained),
            "checkpointing": hasattr(plain, "gradient_checkpointing_enable"),
            "checkpointed": bool(getattr(plain, "is_gradient_checkpointing", False)),
            "through_arguments": self._through_arguments,
            "loader_prepared": self._loader_prepared,
            "client_optimizer": optimizer is not None,
            "untested_optimizer": not supported,
            "flags": sorted(self._flags),
        }

    def _watched(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        watcher = self.watcher

        @functools.wraps(original)
        def method(engine: Any, *args: Any, **kwargs: Any) -> Any:
            if engine is not self.engine or not engine.module.training:
                return original(engine, *args, **kwargs)
            boundary = name == "step" and engine.is_gradient_accumulation_boundary()
            if name == "forward":
                if self.script.worst_case:
                    kwargs = self._padded(args, kwargs)
                watcher.forward(*rows_and_tokens(args, kwargs))
            watcher.entered(name)
            try:
                result = original(engine, *args, **kwargs)
            except BaseException as error:
                watcher.failed(error)
                raise
            if boundary:
                watcher.stepped()
            return result

        return method

    def _hook_optimizers(self) -> None:
        """A script that trains without DeepSpeed is found out."""
        from torch.optim.optimizer import register_optimizer_step_post_hook

        def stepped(*_: Any) -> None:
            if self.engine is None:
                self._steps_elsewhere += 1
                if self._steps_elsewhere >= 2:
                    self.watcher.strayed()

        register_optimizer_step_post_hook(stepped)

    def _hook_accelerate(self) -> None:
        try:
            import accelerate
            from accelerate.utils import deepspeed as theirs
        except ImportError:
            return
        if self.device == "cpu":
            # Asked by a loop on CPU ranks, accelerate 1.15 finds no backend and takes itself for the only process;
            # Trainer asks like this.
            accelerate.PartialState(cpu=True)
        original = theirs.HfDeepSpeedConfig.__init__

        @functools.wraps(original)
        def init(config: Any, config_file_or_dict: Any) -> None:
            original(config, config_file_or_dict)
            config.config = self.merged(config.config)
            config.set_stage_and_offload()

        theirs.HfDeepSpeedConfig.__init__ = init
        made = accelerate.DeepSpeedPlugin.__post_init__

        @functools.wraps(made)
        def post_init(plugin: Any) -> None:
            made(plugin)
            # one that is written in code keeps the stage of its arguments, and loops skip reductions by it
            plugin.zero_stage = int((plugin.deepspeed_config.get("zero_optimization") or {}).get("stage", 0))

        accelerate.DeepSpeedPlugin.__post_init__ = post_init
        prepare = accelerate.Accelerator.prepare

        @functools.wraps(prepare)
        def prepare_resized(accelerator: Any, *objects: Any, **kwargs: Any) -> Any:
            return prepare(accelerator, *self._resize(objects), **kwargs)

        accelerate.Accelerator.prepare = prepare_resized

    def _resize(self, objects: tuple[Any, ...]) -> tuple[Any, ...]:
        """The first data loader that a loop of accelerate's prepares is its training's: at the candidate's size."""
        from torch.utils.data import DataLoader, IterableDataset

        if self._through_arguments or self._loader_prepared:
            return objects
        found = list(objects)
        for at, loader in enumerate(found):
            if not isinstance(loader, DataLoader) or not loader.batch_size:
                continue
            self._loader_prepared = True
            if self.candidate is not None and loader.batch_size != self.candidate.micro_batch:
                same = {
                    key: getattr(loader, key)
                    for key in (
                        "collate_fn",
                        "num_workers",
                        "pin_memory",
                        "drop_last",
                        "timeout",
                        "worker_init_fn",
                        "generator",
                        "prefetch_factor",
                        "persistent_workers",
                        "multiprocessing_context",
                    )
                }
                if not isinstance(loader.dataset, IterableDataset):
                    same["sampler"] = loader.sampler
                found[at] = DataLoader(loader.dataset, batch_size=self.candidate.micro_batch, **same)
            break
        return tuple(found)

    def _hook_tokenizers(self) -> None:
        from transformers import PreTrainedTokenizerBase

        original = PreTrainedTokenizerBase.__init__

        @functools.wraps(original)
        def init(tokenizer: Any, *args: Any, **kwargs: Any) -> None:
            original(tokenizer, *args, **kwargs)
            if (longest := getattr(tokenizer, "model_max_length", None) or 0) < UNLIMITED:
                self._allowed.append(int(longest))

        setattr(PreTrainedTokenizerBase, original.__name__, init)

    def _padded(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """A batch as long as the script allows any to be; its padding is computed like all else.

        Raises:
            Unusable: nothing says how long that is, or the batch is not one that can be padded.
        """
        import torch

        config = getattr(self.engine.module, "config", None)
        positions = getattr(config, "max_position_embeddings", None)
        longest = min([*self._allowed, *([positions] if isinstance(positions, int) else [])], default=0)
        ids = kwargs.get("input_ids")
        if args or not isinstance(ids, torch.Tensor) or ids.dim() != 2 or "position_ids" in kwargs:
            raise Unusable(
                "--worst-case: the script's batches cannot be padded (expected input_ids of two dimensions, "
                "given by name, not packed): leave it out"
            )
        if not longest:
            raise Unusable(
                "--worst-case: neither max_length, a tokenizer nor the model's configuration says how long a "
                "batch may be: leave it out"
            )
        found = dict(kwargs)
        for name, value in kwargs.items():
            if isinstance(value, torch.Tensor) and value.shape[:2] == ids.shape and longest > ids.shape[1]:
                filler = {"labels": -100, "attention_mask": 1}.get(name, 0)
                found[name] = torch.nn.functional.pad(value, (0, longest - ids.shape[1]), value=filler)
        return found

    def _hook_transformers(self) -> None:
        from transformers import TrainingArguments

        original = TrainingArguments.__post_init__

        @functools.wraps(original)
        def post_init(arguments: Any) -> None:
            self._fill(arguments)
            original(arguments)

        setattr(TrainingArguments, original.__name__, post_init)

    def _fill(self, arguments: Any) -> None:
        """TrainingArguments that carry the candidate, and leave nothing behind."""
        self._through_arguments = True
        for name in ("max_length", "max_seq_length"):  # TRL's
            if isinstance(longest := getattr(arguments, name, None), int):
                self._allowed.append(longest)
        if self.device == "cpu":
            arguments.use_cpu = True
        arguments.auto_find_batch_size = False  # it catches our out-of-memory and halves the batch
        if self.candidate is not None:
            arguments.per_device_train_batch_size = self.candidate.micro_batch
            arguments.gradient_accumulation_steps = self.candidate.accumulation
            if CHECKPOINTING in self.candidate.as_dict:
                for name in ("gradient_checkpointing", "activation_checkpointing"):
                    if hasattr(arguments, name):
                        setattr(arguments, name, self.candidate.checkpointing)
        self.watcher.planned(arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps)
        if not self.quiet:
            return
        arguments.output_dir = str(self.folder / "output")
        arguments.report_to = "none"
        arguments.push_to_hub = arguments.load_best_model_at_end = False
        arguments.save_strategy = arguments.eval_strategy = "no"
        for name, value in (("eval_on_start", False), ("logging_dir", None)):
            if hasattr(arguments, name):
                setattr(arguments, name, value)


def _trains(bound: dict[str, Any], config: dict[str, Any]) -> bool:
    """Whether a call of `deepspeed.initialize` makes the engine that trains, and not a reference model's."""
    if bound.get("optimizer") is not None or bound.get("model_parameters") is not None:
        return True
    return bool(config.get("optimizer")) and bool(getattr(bound.get("model"), "training", True))


def batch_of(config: dict[str, Any], ranks: int) -> tuple[int, int] | None:
    """(micro-batch, accumulation) of a DeepSpeed config, any two of its three sizes deciding the third, and none decided
    where it says too little (deepspeed 0.19.8, runtime/config.py, `_set_batch_related_parameters`)."""
    micro, steps, total = (
        value if isinstance(value := config.get(key), int) and value > 0 else None
        for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
    )
    if micro is None and total is None:
        return None
    if micro is None:
        micro = max(1, (total or 1) // (steps or 1) // ranks)
    if steps is None:
        steps = max(1, total // micro // ranks) if total else 1
    return micro, steps


def rows_and_tokens(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int]:
    """Sequences and tokens of a batch, from the tensors that a forward is given: (0, 0) where it is given none.

    Batches without padding are one long row; their sequences start where positions are 0.
    """
    import torch

    inputs = [*args, *kwargs.values()]
    for value in inputs:
        if isinstance(value, dict):
            return rows_and_tokens((), value)
    tensors = [value for value in inputs if isinstance(value, torch.Tensor) and value.dim() > 0]
    if not tensors:
        return 0, 0
    first = kwargs.get("input_ids")
    first = first if isinstance(first, torch.Tensor) else tensors[0]
    rows = int(first.shape[0])
    tokens = int(first.numel()) if first.dim() == 2 and not first.is_floating_point() else rows
    positions = kwargs.get("position_ids")
    if rows == 1 and isinstance(positions, torch.Tensor):
        rows = max(1, int((positions == 0).sum()))
    return rows, tokens


def _checkpoint(model: Any) -> None:
    enable = getattr(model, "gradient_checkpointing_enable", None)
    if enable is not None:
        enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def run_script(job: Job, arguments: list[str]) -> None:
    """Runs the script as `python` would, in this process."""
    import runpy

    script = job.script
    assert script is not None
    sys.argv = [script.target, *arguments]
    if script.is_module:
        sys.path.insert(0, "")
        runpy.run_module(script.target, run_name="__main__", alter_sys=True)
    else:
        path = str(script.path)
        sys.path.insert(0, str(Path(path).parent))
        runpy.run_path(path, run_name="__main__")
