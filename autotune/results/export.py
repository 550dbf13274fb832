"""Export of a winner for DeepSpeed, transformers, accelerate, FSDP and sbatch."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import yaml

from autotune._version import __version__
from autotune.errors import UserError, did_you_mean
from autotune.masking import masked, masked_data, names_secret, shell_text
from autotune.problem.candidate import (
    ACCUMULATION,
    CHECKPOINTING,
    EXPANDABLE,
    KNOBS,
    MICRO_BATCH,
    MODEL_KNOBS,
    Candidate,
    describe,
    job_with_candidate,
    settings_of,
)
from autotune.problem.ds_config import value_at
from autotune.problem.job import CHUNKED, LIGER_LOSS, Job, under_lightning
from autotune.problem.knobs import LEVERS, is_off, lossy_of
from autotune.problem.models import CAUSAL, LIGER_LOSS_ALONE, has_expert_modules
from autotune.problem.nvml import ARCHITECTURES
from autotune.problem.outcome import Measurement
from autotune.rank.ds_config import all_ops, may_skip_parameters
from autotune.results.output_files import check_out, secrets_note, sibling_path
from autotune.script.argument_files import argument_names
from autotune.script.argument_writer import winners_files
from autotune.script.carriers import carrier_of
from autotune.script.profile import other_batch
from autotune.script.script import command, command_sets_all, read_variables
from autotune.search.certificate import certificate_lines
from autotune.search.fingerprint import measured_under
from autotune.search.trials import VERIFY, Record, resumed_peak_bytes
from autotune.util.files import cannot_write, remove_file, write_atomically
from autotune.util.streams import printable
from autotune.workers.jit_ops import FOLDER
from autotune.workers.launchers import assignments, variables_of

if TYPE_CHECKING:
    from autotune.search.study import StudyStore  # it imports databases, which `plan` needs none of

# -- export ------------------------------------------------------------------------------------------------------------
#
# Write the winner as files that a training can use directly. They hold only tuned settings and the user's own.

# file suffix of each format
FORMATS = {
    "deepspeed": ".json",
    "accelerate": ".accelerate.yaml",
    "hf": ".training_arguments.json",
    "sbatch": ".sbatch",
    "fsdp": ".fsdp.yaml",
}


# Keys for which Trainer has a value itself and refuses a config with another (transformers 5.23,
# integrations/deepspeed.py, each `fill_match`). Trainer fills nothing else: `"auto"` in any other key reaches
# DeepSpeed as a string.
_TRAINERS_OWN = {
    "": ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
    "bf16": ("enabled",),
    "fp16": ("enabled",),
    "optimizer.params": ("lr", "betas", "eps", "weight_decay"),
    "scheduler.params": ("warmup_max_lr", "warmup_num_steps", "total_num_steps"),
}


def hf_deepspeed_config(candidate: Candidate, job: Job) -> dict[str, Any]:
    """Return the DeepSpeed config for Trainer, with `"auto"` for keys that must match Trainer's arguments."""
    config = candidate.ds_config(job)
    for path, keys in _TRAINERS_OWN.items():
        section = value_at(config, [*filter(None, path.split("."))])
        if isinstance(section, dict):
            section.update(dict.fromkeys(section.keys() & set(keys), "auto"))
    if not job.base_config:  # the user's own config sets clipping; without one, Trainer's max_grad_norm does
        config["gradient_clipping"] = "auto"
    return config


def training_arguments(candidate: Candidate, job: Job, device: str = "cuda") -> dict[str, Any]:
    """Return keyword arguments of transformers.TrainingArguments: the tuned settings, without learning rate or schedule."""
    batch = {
        "per_device_train_batch_size": candidate.micro_batch,
        "gradient_accumulation_steps": candidate.accumulation,
    }
    arguments: dict[str, Any] = {
        **({} if job.script is not None and job.script.holds_batch else batch),
        "gradient_checkpointing": candidate.checkpointing,
        "bf16": job.precision == "bf16",
        "fp16": job.precision == "fp16",
        "deepspeed": hf_deepspeed_config(candidate, job),
    }
    if candidate.checkpointing:
        arguments["gradient_checkpointing_kwargs"] = {"use_reentrant": False}
    arguments |= {one.trainer: value for one, value in _levers(candidate)}
    if job_with_candidate(job, candidate).loss == LIGER_LOSS:
        arguments |= {"use_liger_kernel": True, "liger_kernel_config": dict(LIGER_LOSS_ALONE)}
    if device == "cpu":
        arguments["use_cpu"] = True
    return arguments


def trainer_flags(candidate: Candidate, job: Job, device: str) -> list[str]:
    """Return the flags of a Trainer script that the config of a named model's study needs, as Trainer compares both."""
    words: list[str] = []
    for name, value in training_arguments(candidate, job, device).items():
        if value is True:
            words.append(f"--{name}")
        elif isinstance(value, int) and value is not False:
            words += [f"--{name}", str(value)]
    return words


def accelerate_config(
    candidate: Candidate, job: Job, ds_config_file: str, device: str = "cuda", nodes: int = 1
) -> dict[str, Any]:
    """Return the content of the file for `accelerate launch --config_file`. The DeepSpeed keys stay in the file it points to.

    Args:
        ds_config_file: accelerate resolves it from the folder in which the training is started, not from the YAML's
            (accelerate 1.15, utils/deepspeed.py, `HfDeepSpeedConfig`).
    """
    # "standard": the user starts each machine, with --machine_rank and --main_process_ip.
    several = {"deepspeed_multinode_launcher": "standard"} if nodes > 1 else {}
    about = {"deepspeed_config_file": ds_config_file, "zero3_init_flag": candidate.stage == 3, **several}
    return _accelerate({"distributed_type": "DEEPSPEED", "deepspeed_config": about}, job, device, nodes)


def _accelerate(training: dict[str, Any], job: Job, device: str, nodes: int) -> dict[str, Any]:
    """Return accelerate's keys about the machines around those about the training."""
    return {
        "compute_environment": "LOCAL_MACHINE",
        **training,
        "machine_rank": 0,
        "main_training_function": "main",
        "num_machines": nodes,
        "num_processes": job.ranks,
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": device == "cpu",
    }


# -- FSDP --------------------------------------------------------------------------------------------------------------
#
# The config of accelerate's FSDP2 that corresponds to a candidate (accelerate 1.15, utils/fsdp_utils.py,
# `fsdp2_prepare_model`; 1.6 is the first that reads `fsdp_version`). Stage 0 corresponds to plain DDP. It is MULTI_GPU on CPU
# ranks too, because `accelerate launch` starts one process for MULTI_CPU without MPI (commands/launch.py, `simple_launcher`).

_FSDP_HAS = (
    MICRO_BATCH,
    ACCUMULATION,
    *MODEL_KNOBS,
    *("zero_stage", CHECKPOINTING, EXPANDABLE, "offload_optimizer", "offload_param"),
)


def fsdp_config(candidate: Candidate, job: Job, device: str = "cuda", nodes: int = 1) -> dict[str, Any]:
    """Return the content of a file for `accelerate launch --config_file` that trains with FSDP2, or DDP for stage 0."""
    training: dict[str, Any] = {"distributed_type": "FSDP" if candidate.stage else "MULTI_GPU"}
    if candidate.stage:
        training["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": candidate.stage == 3,
            "fsdp_offload_params": bool(candidate.offloaded),
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",  # classes of the model's `_no_split_modules`
            "fsdp_activation_checkpointing": candidate.checkpointing,
            "fsdp_cpu_ram_efficient_loading": True,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        }
    training["mixed_precision"] = "no" if job.precision == "fp32" or job.plain else job.precision
    return _accelerate(training, job, device, nodes)


def fsdp_notes(candidate: Candidate, job: Job) -> list[str]:
    """List the differences between FSDP2 under `fsdp_config` and the measured DeepSpeed training, one per line."""
    optimizer = job.own_optimizer.get("type", job.optimizer)
    lines = [
        "it was measured under DeepSpeed: expect another speed and peak, and compare losses",
        f"micro-batch {candidate.micro_batch}, accumulation {candidate.accumulation}, clipping, the optimizer ({optimizer}) and "
        "its schedule are your training's to set",
    ]
    if job.plain:
        lines.append(
            f"weights, gradients and states are all {job.precision}: load the model so; there are no fp32 masters"
        )
    elif job.precision != "fp32":
        lines.append(
            f"train fp32 weights under torch.autocast (FSDP2 casts them itself); DeepSpeed has {job.precision} throughout"
        )
    if not candidate.stage:
        if candidate.checkpointing:
            lines.append(f"activation checkpointing: {_MEASURED_WITH}")
        return lines
    lines.append("accelerate 1.6 or newer reads it; an older one ignores fsdp_version and trains with FSDP1")
    if candidate.stage < 3:
        lines.append(f"weights are sharded between steps too, unlike ZeRO-{candidate.stage}, and whole within a step")
    if candidate.checkpointing:
        lines.append("remove gradient_checkpointing from Trainer's arguments, which refuses both")
    if job.ranks > 1 and may_skip_parameters(job):
        call = "model.set_reduce_scatter_unused_params(True) after accelerate's prepare"
        lines.append(
            f"ranks that use different parameters, like experts in modules of their own, hang FSDP2 without {call}"
        )
    left = {
        name: value
        for name, value in candidate.knobs
        if name not in _FSDP_HAS and not is_off(name, value, job.precision)
    }
    if left:
        lines.append(f"without a counterpart: {describe(left)}")
    return lines


# -- needs -------------------------------------------------------------------------------------------------------------
#
# Changes that a training needs besides the DeepSpeed config.


_MEASURED_WITH = "it was measured with activation checkpointing"
WITH_CHECKPOINTING = (
    "call model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={'use_reentrant': False}) "
    f"(Trainer: gradient_checkpointing=True): {_MEASURED_WITH}"
)


def code_changes(candidate: Candidate, job: Job, *, carried: bool = False) -> Iterator[str]:
    """Yield the changes that the code of a training needs, one per line.

    Args:
        carried: the script's command or code switches activation checkpointing on.
    """
    own, call, share = job.script, job.profile.checkpointing_call, candidate.checkpointed_share
    if own is not None and under_lightning(own) and not command_sets_all(own) and not own.holds_batch:
        yield f"with accumulate_grad_batches={candidate.accumulation} in its Trainer, which takes it from no config"
    if candidate.checkpointing and not carried:
        yield f"have model.{call} in your script's code: {_MEASURED_WITH}" if call else WITH_CHECKPOINTING
    if 0 < share < 1:  # no argument has a share
        yield (
            f"then keep it in the first {share:.0%} of the layers alone (`autotune launch` does this itself): "
            "from transformers.modeling_layers import GradientCheckpointingLayer; "
            "layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]; "
            f"[setattr(m, 'gradient_checkpointing', False) for m in layers[round({share:g} * len(layers)):]] "
            "(Trainer: in a callback's on_train_begin)"
        )
    switched_off = job.profile.checkpointed and candidate.get(CHECKPOINTING) is False
    # The winner's command turns off what an argument of the script's turned on.
    if own is not None and switched_off and carrier_of(own, CHECKPOINTING).place not in argument_names(own.argv):
        what = f"where your script's code itself has model.{call}"
        if not call:
            what = (
                "where your script's code itself calls model.gradient_checkpointing_enable(), or peft's "
                "prepare_model_for_kbit_training without use_gradient_checkpointing=False, or sets Trainer's "
                "gradient_checkpointing"
            )
        yield f"{what}, take it out: it was measured without activation checkpointing"
    if job.profile.zero_init and candidate.stage < 3:
        yield (
            "take deepspeed.zero.Init out of your script's code, or give it enabled=False: below stage 3 no engine trains a "
            "model that is made under it, and it was measured without"
        )


def training_changes(candidate: Candidate, job: Job, variables: Mapping[str, str]) -> list[str]:
    """List the changes a training needs that a DeepSpeed config cannot carry, one per line.

    Args:
        variables: environment of the measurement.
    """
    lines = [_started_with(variables)]
    if other := other_batch(candidate, job):
        lines.append(other)
    lines += [*code_changes(candidate, job), *needs_of_model(candidate, job)]
    transformers, named = job.interpreter.version("transformers"), job.script is None and job.workload is None
    if named and candidate.stage == 3 and job.ranks > 1 and has_expert_modules(job.model.config, transformers):
        lines.append(
            f"call deepspeed.utils.set_z3_leaf_modules(model, [the class of the MoE block]) before deepspeed.initialize: it was "
            f"measured so, and transformers {transformers} keeps each expert in a module that some ranks skip"
        )
    lines += [f"compare losses: it {line}" for line in lossy_settings(candidate, job)]
    if candidate.offload_optimizer != "none" and "type" not in job.own_optimizer:
        lines.append(
            'give deepspeed.ops.adam.DeepSpeedCPUAdam as the optimizer, or an "optimizer" section: offload takes no '
            "other unless zero_force_ds_cpu_optimizer is false, and that is slow"
        )
    if "type" not in job.own_optimizer:
        lines.append(f"the optimizer and its learning rate are yours; it was measured with {job.optimizer}")
    return lines


def _started_with(variables: Mapping[str, str]) -> str:
    return f"start it with {assignments(variables)}: it was measured so"


def needs_of_model(candidate: Candidate, job: Job) -> list[str]:
    """List the settings of the model and its batches with which the candidate was measured, one per line."""
    made, lines = job_with_candidate(job, candidate), list[str]()
    if made.task != CAUSAL:
        lines.append(f"train the model with its head for {made.task}: it was measured with it")
    if made.attention:
        lines.append(f"make the model with attn_implementation={made.attention!r}: it was measured with it")
    if made.lora:
        lines.append(f"train adapters alone (peft's LoraConfig, {made.lora}): it was measured with them")
    if made.lora and made.lora.quantize:
        loaded = "load_in_4bit=True, bnb_4bit_quant_type='nf4', bnb_4bit_use_double_quant=True"
        lines.append(f"load the base model with BitsAndBytesConfig({loaded}): it was measured with 4-bit weights")
    if made.packed:
        lines.append(f"pack sequences into rows of {job.seq_len} tokens: the batch sizes count rows")
    lines += [
        f"{one.in_code} (Trainer: {one.trainer}={value}): it was measured so" for one, value in _levers(candidate)
    ]
    return lines + needs_of_loss(made)


def _levers(candidate: Candidate) -> list[tuple[Any, Any]]:
    """Return the levers that are on, with their values."""
    return [(KNOBS[name], value) for name, value in candidate.knobs if name in LEVERS and value]


def needs_of_loss(made: Job) -> list[str]:
    """Return the line about a loss without all logits, which no DeepSpeed config can carry; empty for a full loss."""
    how = {
        CHUNKED: "compute the loss in chunks (TRL's SFTTrainer does; otherwise call "
        "autotune.rank.model_builder.use_chunked_loss(model) before deepspeed.initialize)",
        LIGER_LOSS: f"use Liger's loss (Trainer: use_liger_kernel=True, liger_kernel_config={LIGER_LOSS_ALONE})",
    }
    return [f"{how[made.loss]}: it was measured so, and a full loss needs more memory"] if made.loss in how else []


def meta(
    candidate: Candidate,
    job: Job,
    measurement: Measurement,
    *,
    study: str,
    trial: int,
    verified: bool,
    fingerprint: dict[str, Any],
    headroom: float,
    threads: int,
    environment: Mapping[str, str] = MappingProxyType({}),
    resume_peak_bytes: int | None = None,
) -> dict[str, Any]:
    """Return the metadata of an exported config: measurement, machine, study and trial.

    Args:
        threads: CPU threads per rank during the measurement.
        environment: further variables the training needs, see `environment_of`.
        resume_peak_bytes: peak of the worst rank while a fresh group resumed from a checkpoint; None if not tried.
    """
    variables = variables_of(candidate, threads, environment)
    samples, tokens = measurement.per_gpu(job.ranks)
    measured = {key: value for key, value in vars(measurement).items() if value is not None}
    return {
        "autotune": __version__,
        "study": study,
        "trial": trial,
        "verified": verified,
        "candidate": candidate.as_dict,
        "measurement": measured,
        "samples_per_second_per_gpu": samples,
        "tokens_per_second_per_gpu": tokens,
        "throughput_interval_95": [
            measurement.samples_per_second / (1 + measurement.step_seconds_spread / measurement.step_seconds),
            measurement.samples_per_second / max(1e-9, 1 - measurement.step_seconds_spread / measurement.step_seconds),
        ],
        "headroom": headroom,
        "threads_per_rank": threads,
        "environment": variables,
        "resume_peak_bytes": resume_peak_bytes,
        "your_training_must": training_changes(candidate, job, variables),
        "measured_with_optimizer": job.own_optimizer.get("type", job.optimizer),
        "fingerprint": fingerprint,
    }


def write_export(
    candidate: Candidate,
    job: Job,
    out: Path,
    meta_data: dict[str, Any],
    *,
    style: str = "deepspeed",
    device: str = "cuda",
    nodes: int = 1,
) -> list[Path]:
    """Write the files of a format and their `.meta.json`, and return their paths."""
    meta_path = sibling_path(out, style, "meta.json")
    remove_file(meta_path)  # the metadata of an earlier export must not remain next to this config
    written = [out]
    if style == "deepspeed":
        written += _write_config(candidate, job, out)
    elif style == "sbatch":
        config = sibling_path(out, style, "deepspeed.json")
        written += [config, *_write_config(candidate, job, config)]
        write_atomically(out, _batch_script(candidate, job, config, meta_data, device, nodes))
    elif style == "hf":
        write_atomically(out, _config_json(training_arguments(candidate, job, device)))
    elif style == "fsdp":
        notes = [*needs_of_model(candidate, job), *fsdp_notes(candidate, job)]
        started = _started_with(meta_data.get("environment", {}))
        meta_data = {**meta_data, "your_training_must": [started, *notes]}
        text = yaml.safe_dump(fsdp_config(candidate, job, device, nodes), sort_keys=False)
        write_atomically(out, "".join(f"# {line}\n" for line in notes) + text)
    else:
        config = sibling_path(out, style, "deepspeed.json")
        # A script's own accelerate loop reads batch sizes from the config, Trainer from its arguments.
        through = job.profile.through_arguments
        made = hf_deepspeed_config(candidate, job) if through else candidate.ds_config(job)
        write_atomically(config, _config_json(made))
        launched = yaml.safe_dump(accelerate_config(candidate, job, str(config), device, nodes), sort_keys=False)
        write_atomically(out, _WHERE_FROM + launched)
        written.append(config)
    if hidden := secrets_note(written):
        meta_data = {**meta_data, "your_training_must": [*meta_data["your_training_must"], *hidden]}
    write_atomically(meta_path, _json(masked_data(meta_data)))
    return [*written, meta_path]


def _write_config(candidate: Candidate, job: Job, out: Path) -> list[Path]:
    """Write the DeepSpeed config and copies of the script's argument files with the winner, and return their paths."""
    write_atomically(out, _config_json(candidate.ds_config(job)))
    copies = winners_files(job.script, candidate, out) if job.script else {}
    for path, text in copies.items():
        write_atomically(path, masked(text))
    return list(copies)


def _batch_script(
    candidate: Candidate, job: Job, config: Path, meta_data: dict[str, Any], device: str, nodes: int
) -> str:
    """Return a batch script that trains the study's script, or the script that is given to it if the study has none."""
    words, cwd = ["--deepspeed", str(config.resolve()), *trainer_flags(candidate, job, device)], None
    if job.script is not None:
        words, cwd = command(job.script, candidate, str(config.resolve())), job.script.cwd
        words = ["--no-python", *words] if job.script.program is not None else words
    per_node = job.ranks // nodes
    about = {"name": str(meta_data["study"]), "device": device, "cwd": cwd, "variables": meta_data["environment"]}
    return sbatch_script(words, nodes=nodes, per_node=per_node, **about)


_WHERE_FROM = "# deepspeed_config_file is looked for from the folder in which `accelerate launch` is started\n"


def _json(data: dict[str, Any]) -> str:
    return json.dumps(data, indent=2) + "\n"


def _config_json(data: dict[str, Any]) -> str:
    """Return a config for a file, without the secrets that a user's own config or files may hold."""
    return _json(masked_data(data))


# -- of a study ----------------------------------------------------------------------------------------------------------


def exported_record(store: StudyStore, trial: int | None) -> Record:
    """Return the winner, or the trial of that number.

    Raises:
        UserError: there is none, or it was not measured.
    """
    record = store.winner
    if trial is not None:
        record = next((one for one in store.records() if one.number == trial), None)
        if record is None or record.outcome is None or not record.outcome.ok:
            raise UserError(
                f"--trial {trial}: no measured trial of that number in {store.name} (`autotune show {shlex.quote(store.name)}`)"
            )
    if record is None:
        raise UserError(
            f"study {store.name} has no winner yet: `autotune run --study {shlex.quote(store.name)} …` goes on"
        )
    return record


def export_store(store: StudyStore, style: str, out: Path | None, trial: int | None) -> list[Path]:
    """Write a study's winner, or one trial, to `out` or the study's folder, and return the paths.

    In the study's folder a requested trial is named NAME.trialN, so the winner's files stay unchanged.

    Raises:
        UserError: no such format, no winner yet, no measured trial with that number, or nothing can be written.
    """
    if style not in FORMATS:
        raise UserError(f"--format {style}: expected one of {', '.join(FORMATS)}{did_you_mean(style, FORMATS)}")
    if out is not None:
        check_out(out, FORMATS[style], makes_folders=True)
    record = exported_record(store, trial)
    name = store.name if trial is None else f"{store.name}.trial{trial}"
    from autotune.search.storage import output_file  # it imports databases, which `plan` needs none of

    target = out or output_file(store.folder, f"{name}{FORMATS[style]}")
    return export_record(store, record, target, style, record.role == VERIFY)


def environment_of(store: StudyStore, candidate: Candidate) -> dict[str, str]:
    """Return the environment variables that a training needs.

    These are the variables of the measurement, those that a script reads, and those that select the study's GPUs. If the config
    needs some of DeepSpeed's ops, their folder and architectures are added.
    """
    needed = all_ops([candidate], store.job, store.hardware.device)
    read = read_variables(store.job.script, candidate) if store.job.script is not None else {}
    theirs = {**read, **measured_under(store.fingerprint), **store.hardware.environment}
    if not needed:
        theirs.pop(ARCHITECTURES, None)
    return {**theirs, **({FOLDER: store.extensions} if needed and store.extensions else {})}


def export_record(store: StudyStore, record: Record, out: Path, style: str, verified: bool) -> list[Path]:
    """Write a measured trial's config and its meta file, and return the paths.

    Raises:
        UserError: they cannot be written.
    """
    assert record.outcome is not None
    assert record.outcome.measurement is not None
    data = meta(
        record.candidate,
        store.job,
        record.outcome.measurement,
        study=store.name,
        trial=record.number,
        verified=verified,
        fingerprint=store.fingerprint,
        headroom=store.hardware.headroom,
        threads=store.threads,
        environment=environment_of(store, record.candidate),
        resume_peak_bytes=resumed_peak_bytes(store.records(), record.candidate),
    )
    if lines := certificate_lines(store.job, store.records(), record):
        data["training"] = lines
    facts = store.facts()
    if facts.references and facts.winner is not None and facts.winner.candidate == record.candidate:
        data["references"] = [one.to_json(record.candidate) for one in facts.references]
    device, nodes = store.hardware.device, store.hardware.nodes
    try:
        return write_export(record.candidate, store.job, out, data, style=style, device=device, nodes=nodes)
    except OSError as error:
        raise cannot_write(out, error, "name another file; the study keeps the winner: `autotune export`") from None


# -- Slurm ---------------------------------------------------------------------------------------------------------------


def sbatch_script(
    words: Sequence[str],
    *,
    name: str,
    nodes: int,
    per_node: int,
    device: str,
    cwd: str | None,
    variables: Mapping[str, str],
) -> str:
    """Return a Slurm batch script: one torchrun per node, with the rendezvous on the allocation's first node.

    The port depends on the job. Nodes are shared, so with one port for all, a second job would join the first job's ranks and
    die when these end.

    Args:
        words: command of each rank, without the launcher; without a folder the words after those given to the batch script.
        cwd: folder of the training; None: that of sbatch, which is given the training's script and its arguments.
        variables: environment of all ranks.
    """
    gpus = f"#SBATCH --gpus-per-node={per_node}\n" if device == "cuda" else ""
    asked: dict[str, tuple[str, str]] = {}
    trained = shell_text(words, asked)
    public = {name: value for name, value in variables.items() if not names_secret(name) and masked(value) == value}
    exports = f"export {assignments(public)}\n" if public else ""
    asked |= {name: (name, value) for name, value in variables.items() if name not in public}
    if asked:  # sbatch passes on the environment in which it is called
        exports += "# secrets are not written here: export these variables before you call sbatch\n"
        exports += "".join(f': "${{{name}:?export it with the value of {of}}}"\n' for name, (of, _) in asked.items())
    # The port is below 32768, as Linux assigns ports from there on to outgoing connections.
    meet = f"""first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun torchrun --nnodes {nodes} --nproc-per-node {per_node} --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d \\
  --rdzv-endpoint "$first:$((20000 + SLURM_JOB_ID % 12000))"
"""
    if cwd is None:
        exports = ': "${1:?usage: sbatch THIS_FILE YOUR_SCRIPT.py ITS_ARGUMENTS}"\n' + exports
        trained = f'"$@" {trained}'
    else:
        exports = f"cd {shlex.quote(cwd)}\n{exports}"
    start = meet.rstrip() if nodes > 1 else f"srun torchrun --standalone --nproc-per-node {per_node}"
    return printable(f"""#!/bin/bash
#SBATCH --job-name={shlex.quote(" ".join(name.split()))}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
{gpus}# add what your cluster asks for: --partition, --account, --time, --cpus-per-task
set -euo pipefail
{exports}{start} {trained}
""")


# -- lossy settings ----------------------------------------------------------------------------------------------------
#
# Settings of a candidate that change the computation, so that losses may differ. Every output of a winner lists them.


def lossy_settings(candidate: Candidate, job: Job) -> list[str]:
    """Return one clause for each such knob, to follow "it". Settings in the user's own config are left out."""
    own = settings_of(job.base_config)
    return [
        f"changes what is computed by {name}={candidate.get(name)}: {how}; losses may differ from a training without it"
        for name, how in lossy_of(candidate.as_dict, job.precision).items()
        if own.get(name) != candidate.get(name)
    ]
