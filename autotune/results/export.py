"""The winner as files that a training takes as they are. They hold only what was tuned or what the user asked for."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from autotune.errors import UserError
from autotune.files import cannot_write, remove_file, write_atomically
from autotune.group.environment import assignments, variables_of
from autotune.group.extensions import FOLDER
from autotune.masking import masked, masked_data
from autotune.problem.argument_texts import winners_files
from autotune.problem.candidate import CHECKPOINTING, Candidate, under
from autotune.problem.job import Job
from autotune.problem.outcome import Measurement
from autotune.problem.script import carried, command
from autotune.problem.script_job import CALL, ZERO_INIT, other_batch
from autotune.problem.script_text import under_lightning
from autotune.problem.tasks import CAUSAL
from autotune.rank.config import all_ops
from autotune.results.lossy import lossy_settings
from autotune.results.over_nodes import sbatch_script
from autotune.results.sliced import slice_line
from autotune.results.targets import beside, check_out, secrets_note
from autotune.search.fingerprint import measured_under
from autotune.search.records import VERIFY, Record, resumed_peak_bytes
from autotune.search.storage import output_file
from autotune.search.study import StudyStore
from autotune.version import __version__

# their suffixes
FORMATS = {
    "deepspeed": ".json",
    "accelerate": ".accelerate.yaml",
    "hf": ".training_arguments.json",
    "sbatch": ".sbatch",
}


def deepspeed_config(candidate: Candidate, job: Job) -> dict[str, Any]:
    """The plain DeepSpeed config. Optimizer and schedule come from the user's own config or stay the caller's."""
    return candidate.ds_config(job)


# Where Trainer has a value of its own and refuses a config that says another (transformers 5.23,
# integrations/deepspeed.py, each `fill_match`). It fills nothing else: `"auto"` anywhere else reaches DeepSpeed as a word.
_TRAINERS_OWN = {
    "": ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
    "bf16": ("enabled",),
    "fp16": ("enabled",),
    "optimizer.params": ("lr", "betas", "eps", "weight_decay"),
    "scheduler.params": ("warmup_max_lr", "warmup_num_steps", "total_num_steps"),
}


def hf_deepspeed_config(candidate: Candidate, job: Job) -> dict[str, Any]:
    """The DeepSpeed config for Trainer: `"auto"` where Trainer insists on its own arguments' values."""
    config = candidate.ds_config(job)
    for path, keys in _TRAINERS_OWN.items():
        section: Any = config
        for part in filter(None, path.split(".")):
            section = section.get(part) if isinstance(section, dict) else None
        if isinstance(section, dict):
            section.update(dict.fromkeys(section.keys() & set(keys), "auto"))
    if not job.base_config:  # one of the user's own says whether it clips; else Trainer's max_grad_norm does
        config["gradient_clipping"] = "auto"
    return config


def training_arguments(candidate: Candidate, job: Job, device: str = "cuda") -> dict[str, Any]:
    """Keyword arguments of transformers.TrainingArguments: what was tuned, and nothing of learning rate or schedule."""
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
    if under(job, candidate).compiled:
        arguments["torch_compile"] = True
    if under(job, candidate).liger:
        arguments["use_liger_kernel"] = True
    if device == "cpu":
        arguments["use_cpu"] = True
    return arguments


def accelerate_config(
    candidate: Candidate, job: Job, ds_config_file: str, device: str = "cuda", nodes: int = 1
) -> dict[str, Any]:
    """What `accelerate launch --config_file` reads; the DeepSpeed keys stay in the file it points at.

    Args:
        ds_config_file: accelerate opens it from the folder in which the training is started, not from the YAML's own
            (accelerate 1.15, utils/deepspeed.py, `HfDeepSpeedConfig`).
    """
    # "standard": started on each machine, with --machine_rank and --main_process_ip
    several = {"deepspeed_multinode_launcher": "standard"} if nodes > 1 else {}
    about = {"deepspeed_config_file": ds_config_file, "zero3_init_flag": candidate.stage == 3, **several}
    return {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": about,
        "machine_rank": 0,
        "main_training_function": "main",
        "num_machines": nodes,
        "num_processes": job.ranks,
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": device == "cpu",
    }


def lightnings_own(candidate: Candidate) -> str:
    """What a training under Lightning takes from no config."""
    return f"with accumulate_grad_batches={candidate.accumulation} in its Trainer, which takes it from no config"


_MEASURED_WITH = "it was measured with activation checkpointing"
WITH_CHECKPOINTING = (
    "call model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={'use_reentrant': False}) "
    f"(Trainer: gradient_checkpointing=True): {_MEASURED_WITH}"
)


def with_checkpointing(job: Job) -> str:
    """What a training must do that has it, where nothing carries it there."""
    call = job.script.profile.get(CALL) if job.script is not None else None
    return f"have model.{call} in your script's code: {_MEASURED_WITH}" if call else WITH_CHECKPOINTING


def without_checkpointing(candidate: Candidate, job: Job) -> str:
    """What a script must leave that switches activation checkpointing on, where the candidate is without; else empty."""
    if job.script is None or not job.script.profile.get("checkpointed") or candidate.get(CHECKPOINTING) is not False:
        return ""
    if call := job.script.profile.get(CALL):
        return f"where your script's code itself has model.{call}, take it out: it was measured without activation checkpointing"
    return (
        "where your script's code itself calls model.gradient_checkpointing_enable(), or peft's prepare_model_for_kbit_training "
        "without use_gradient_checkpointing=False, take it out (Trainer: gradient_checkpointing=False): it was measured without "
        "activation checkpointing"
    )


def without_zero_init(candidate: Candidate, job: Job) -> str:
    """What a script must leave that makes its model in parts, where the candidate's stage trains whole ones; else empty."""
    if job.script is None or not job.script.profile.get(ZERO_INIT) or candidate.stage == 3:
        return ""
    return (
        "take deepspeed.zero.Init out of your script's code, or give it enabled=False: below stage 3 no engine trains a model "
        "that is made under it, and it was measured without"
    )


def needs(candidate: Candidate, job: Job, variables: Mapping[str, str]) -> list[str]:
    """What the training must do beside taking the config, since a DeepSpeed config cannot say it; one line each.

    Args:
        variables: of the environment that it was measured under.
    """
    lines = [f"start it with {assignments(variables)}: it was measured so"]
    if other := other_batch(candidate, job):
        lines.append(other)
    own = job.script
    if own is not None and under_lightning(own) and not carried(own) and not own.holds_batch:
        lines.append(lightnings_own(candidate))
    if candidate.checkpointing:
        lines.append(with_checkpointing(job))
    elif left := without_checkpointing(candidate, job):
        lines.append(left)
    if whole := without_zero_init(candidate, job):
        lines.append(whole)
    made = under(job, candidate)
    if made.task != CAUSAL:
        lines.append(f"train the model with its head for {made.task}: it was measured with it")
    if made.attention:
        lines.append(f"make the model with attn_implementation={made.attention!r}: it was measured with it")
    if made.lora:
        lines.append(f"train adapters alone (peft's LoraConfig, {made.lora}): it was measured with them")
    if made.packed:
        lines.append(f"pack sequences into rows of {job.seq_len} tokens: the batch sizes count rows")
    if made.compiled:
        lines.append(
            "call engine.compile() after deepspeed.initialize (Trainer: torch_compile=True): it was measured so"
        )
    if made.liger:
        lines.append("use Liger's kernels (Trainer: use_liger_kernel=True): it was measured with them")
    lines += [f"compare losses: it {line}" for line in lossy_settings(candidate, job)]
    if candidate.offload_optimizer != "none" and "type" not in job.own_optimizer:
        lines.append(
            'give deepspeed.ops.adam.DeepSpeedCPUAdam as the optimizer, or an "optimizer" section: offload takes no '
            "other unless zero_force_ds_cpu_optimizer is false, and that is slow"
        )
    if "type" not in job.own_optimizer:
        lines.append(f"the optimizer and its learning rate are yours; it was measured with {job.optimizer}")
    return lines


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
    """What stands beside the config: what it was measured at, on what, by which study and trial.

    Args:
        threads: CPU threads a rank that it was measured with.
        environment: what the training needs set besides, see `environment_of`.
        resume_peak_bytes: of the worst rank while a fresh group went on from a checkpoint; None where that was not tried.
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
        "your_training_must": needs(candidate, job, variables),
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
    """Writes the files of a format and its `.meta.json` beside them; returns their paths."""
    meta_path = beside(out, style, "meta.json")
    remove_file(meta_path)  # figures of another export never stand beside this one's config
    written = [out]
    if style == "deepspeed":
        written += _write_config(candidate, job, out)
    elif style == "sbatch":
        config = beside(out, style, "deepspeed.json")
        written += [config, *_write_config(candidate, job, config)]
        write_atomically(out, _batch_script(candidate, job, config, meta_data, device, nodes))
    elif style == "hf":
        write_atomically(out, _config_json(training_arguments(candidate, job, device)))
    else:
        config = beside(out, style, "deepspeed.json")
        # a loop of accelerate's own has its batch sizes from the config, Trainer from its arguments
        made = hf_deepspeed_config if job.script and job.script.profile.get("through_arguments") else deepspeed_config
        write_atomically(config, _config_json(made(candidate, job)))
        launched = yaml.safe_dump(accelerate_config(candidate, job, str(config), device, nodes), sort_keys=False)
        write_atomically(out, _WHERE_FROM + launched)
        written.append(config)
    if hidden := secrets_note(written):
        meta_data = {**meta_data, "your_training_must": [*meta_data["your_training_must"], *hidden]}
    write_atomically(meta_path, _json(masked_data(meta_data)))
    return [*written, meta_path]


def _write_config(candidate: Candidate, job: Job, out: Path) -> list[Path]:
    """Writes the DeepSpeed config, and copies of the script's argument files with the winner in them; returns their paths."""
    write_atomically(out, _config_json(deepspeed_config(candidate, job)))
    copies = winners_files(job.script, candidate, out) if job.script else {}
    for path, text in copies.items():
        write_atomically(path, masked(text))
    return list(copies)


def _batch_script(
    candidate: Candidate, job: Job, config: Path, meta_data: dict[str, Any], device: str, nodes: int
) -> str:
    """A batch script that trains the study's script, or one to be put in where the study knows none."""
    words, cwd = ["train.py", "--deepspeed", str(config.resolve())], "."
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


def export_study(study: str, storage: str | None, style: str, out: Path | None, trial: int | None) -> list[Path]:
    """Writes a study's winner, or the trial of a number, to `out` or into the study's folder; returns the paths. There a trial
    that was asked for is NAME.trialN, and the winner's files are let alone.

    Raises:
        UserError: no such study or format, no winner yet, no measured trial of that number, or nothing can be written.
    """
    if style not in FORMATS:
        raise UserError(f"--format {style}: expected one of {', '.join(FORMATS)}")
    if out is not None:
        check_out(out, makes_folders=True)
    store = StudyStore.load(study, storage)
    record = store.winner
    if trial is not None:
        record = next((one for one in store.records() if one.number == trial), None)
        if record is None or record.outcome is None or not record.outcome.ok:
            raise UserError(
                f"--trial {trial}: no measured trial of that number in {store.name} (`autotune show {shlex.quote(study)}`)"
            )
    if record is None:
        raise UserError(
            f"study {store.name} has no winner yet: `autotune run --study {shlex.quote(store.name)} …` goes on"
        )
    name = store.name if trial is None else f"{store.name}.trial{trial}"
    target = out or output_file(store.folder, f"{name}{FORMATS[style]}")
    return export_record(store, record, target, style, record.role == VERIFY)


def environment_of(store: StudyStore, candidate: Candidate) -> dict[str, str]:
    """What a training needs set: the variables that the study was measured under, what gives it the GPUs that the study had,
    and where DeepSpeed's ops are built where its config needs some."""
    ops = store.extensions and all_ops([candidate], store.job, store.hardware.device)
    theirs = {**measured_under(store.fingerprint), **store.hardware.environment}
    return {**theirs, **({FOLDER: store.extensions} if ops else {})}


def export_record(store: StudyStore, record: Record, out: Path, style: str, verified: bool) -> list[Path]:
    """Writes a measured trial's config and its meta file; returns the paths.

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
    if store.hardware.sliced:
        data["slice"] = slice_line(record.outcome.measurement, store.hardware)
    device, nodes = store.hardware.device, store.hardware.nodes
    try:
        return write_export(record.candidate, store.job, out, data, style=style, device=device, nodes=nodes)
    except OSError as error:
        raise cannot_write(out, error, "name another file: the study keeps the winner (`autotune export`)") from None
