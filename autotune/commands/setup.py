"""Validation of a Request into a frozen Setup, which is complete: nothing below parses a text of an option again."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.commands.environment import Nodes, check_executor, refuse
from autotune.commands.request import Request, parse_nodes
from autotune.errors import UserError
from autotune.executors.cluster.cluster import Cluster
from autotune.executors.machine import Slot, slots
from autotune.predict.calibration import overhead_prior
from autotune.predict.features import installed_deepspeed
from autotune.problem.candidate import Candidate
from autotune.problem.ds_config import check_whole_model, global_batch_of, ignored_keys, load_ds_config
from autotune.problem.faults import facts_of, own_facts, removed_keys, warnings
from autotune.problem.gpu_specs import Price, price_table
from autotune.problem.hardware import Hardware, detect, named_hardware
from autotune.problem.job import (
    FULL,
    MOST_TOKENS,
    SEQUENCE_RANKS,
    Job,
    Lora,
    Script,
    counted_ranks,
    near,
    parse_lora,
    sequence_ranks,
)
from autotune.problem.knobs import RequirementInputs, loss_possible, missing_package, not_quantized
from autotune.problem.models import ModelSpec, image_size_of, resolve_model, task_of, text_config, workload_spec
from autotune.problem.nvml import visible_gpus
from autotune.problem.space import SearchSpace, fitted, load_space
from autotune.results.output_files import check_out
from autotune.results.plan import TOKENS
from autotune.script.environment import changed_variables, values_now
from autotune.script.parse_command import TypedCommand, read_command
from autotune.script.profile import first_candidate, unknown_job
from autotune.script.script import named_configs
from autotune.script.source_digests import MEMORY, digests, edited_since, stored_findings
from autotune.search.fingerprint import identity
from autotune.util.bounds import MOST, display_value, parse_json, read_text, whole_number
from autotune.util.interpreter import OWN, Interpreter
from autotune.util.units import GIB, format_bytes, parse_count, parse_duration, parse_memory, parse_share

DEFAULT_HEADROOM = "5%"

# -- setups --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PlanSetup:
    """Setup of a plan: the job, the hardware and the space."""

    job: Job
    hardware: Hardware
    space: SearchSpace
    faults: tuple[str, ...] = ()  # known faults of the installed DeepSpeed that concern the job, for display
    tokens: float = TOKENS  # tokens of the whole training, for its hours and cost
    price: Price | None = None  # one of these GPUs
    host_assumed: bool = False  # main memory was neither measured nor typed
    precision_typed: bool = False  # otherwise each card has its own default
    batch_assumed: bool = (
        False  # the global batch was neither typed nor in a config; other machines keep its size roughly
    )


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Setup of `run`, validated and complete.

    A script's job and candidates are stand-ins until the probe run; `commands.script_probe.after_probe` replaces them.
    """

    request: Request  # its texts are parsed in the other fields
    job: Job
    hardware: Hardware
    space: SearchSpace
    candidates: tuple[Candidate, ...]
    notes: tuple[str, ...]  # for display, before the search
    warnings: tuple[str, ...] = ()  # known faults of the user's own config, for display before anything runs
    nodes: Cluster | None = None  # the machines, reached; None: this one
    slots: tuple[Slot, ...]  # one for each candidate that is measured at a time, the first on `hardware`
    name: str  # of the study
    folder: Path  # `runs/NAME`, not created yet
    storage: str | None  # the database's URL; None: a file in the folder
    global_batch_size: int | None  # samples per optimizer step, as requested
    budget_seconds: float


@dataclass(frozen=True, kw_only=True)
class LaunchSetup:
    """A script to train, and the source of its configs: the request's study, or the plan for a model."""

    request: Request
    typed: TypedCommand  # its script has the request's DeepSpeed config
    plan: PlanSetup | None  # None if a study is named
    global_batch_size: int | str | None  # samples per optimizer step, as requested, or `free`
    folder: Path | None  # of a launch without a study, not created yet
    memory_cap_bytes: int | None
    silent_seconds: float
    interpreter: Interpreter = OWN  # of the ranks


# -- from a request to its setup -----------------------------------------------------------------------------------------


def run_setup(request: Request, nodes: Nodes | None = None, interpreter: Interpreter = OWN) -> Setup:
    """Return the Setup of `autotune run`, on this machine or on `nodes`, which are reached first.

    Raises:
        UserError: the request is wrong, or not possible here.
    """
    from autotune.search.budget import too_short  # imports optuna, which is slow and not needed for a plan

    budget_seconds = parse_duration(request.budget)
    if why := too_short(budget_seconds):
        raise UserError(why)
    if request.out is not None:
        check_out(request.out, ".json", makes_folders=True)
    batch = parse_global_batch(request.global_batch_size)
    check_executor(request.executor)
    typed = typed_command(request, nodes, interpreter) if request.script else None
    gpus = ranks_asked_for(request.gpus, typed) if typed is not None else request.gpus
    here = request.model_copy(update={"gpus": gpus})
    places = _slots(here, nodes)
    hardware = places[0].hardware
    space = _space(request, hardware)
    if typed is not None:
        job = dataclasses.replace(_script_job(request, typed.script, hardware), interpreter=interpreter)
        configs = [_own_config(path, interpreter, "the DeepSpeed config") for path in named_configs(typed.script)]
        said = [line for config in configs for line in ignored_keys(config)]
        if len(configs) == 1:
            said += warnings(facts_of(configs[0]), installed_deepspeed(interpreter))
        candidates, notes = [first_candidate(typed.script)], [*notes_of_command(typed)]
    else:
        job, space, notes = _tuned_model(request, space, hardware, interpreter)
        said = [*ignored_keys(job.base_config), *warnings(own_facts(job), installed_deepspeed(interpreter))]
        candidates = space.candidates(job)
    asked_batch = FREE if request.global_batch_size == FREE else batch
    name = request.study or study_name(job, hardware, asked_batch)
    if not (request.study or request.force):
        name, edits = name_since_edits(name, request.runs, job)
        notes = [*notes, *edits]
    return Setup(
        request=request,
        job=dataclasses.replace(job, unprotected=request.unprotected),
        hardware=hardware,
        space=space,
        candidates=tuple(candidates),
        notes=tuple(notes),
        warnings=tuple(said),
        nodes=nodes.cluster if nodes is not None else None,
        slots=places,
        name=name,
        folder=study_folder(request.runs, name),
        storage=request.storage or None,
        global_batch_size=batch,
        budget_seconds=budget_seconds,
    )


def plan_setups(request: Request, gpus: Sequence[str | None], interpreter: Interpreter = OWN) -> list[PlanSetup]:
    """Return the setup of `autotune plan` for each named GPU; None is the machine's own.

    Raises:
        UserError: bad input.
    """
    tokens = parse_count(request.tokens, "--tokens") if request.tokens is not None else PlanSetup.tokens
    setups = []
    for name in gpus:
        hardware = _planned_hardware(name, request)
        own, space = _named_job(request, hardware, interpreter), load_space(request.space or "default")
        job = with_plausible_batch(own, space, request)
        if job.precision == "bf16" and not hardware.bf16:
            raise UserError(f"{hardware.name} has no bf16. Use --precision fp16.")
        space = fitted(space, job, hardware).space
        faults = [f"{one}: left out" for one in space.faults]
        known = price_table().get(hardware.facts or "")
        setups.append(
            PlanSetup(
                job=job,
                hardware=hardware,
                space=space,
                faults=(
                    *ignored_keys(job.base_config),
                    *warnings(own_facts(job), installed_deepspeed(interpreter)),
                    *faults,
                ),
                tokens=tokens,
                price=known,
                host_assumed=name is not None and request.host_memory is None,
                precision_typed=request.precision is not None,
                batch_assumed=job is not own,
            )
        )
    return setups


def launch_setup(request: Request, nodes: Nodes | None = None, interpreter: Interpreter = OWN) -> LaunchSetup:
    """Return the setup of `autotune launch`: from `request.study`, or from a plan for `request.model` on `nodes`.

    Raises:
        UserError: bad input.
    """
    typed = typed_command(request, nodes, interpreter)
    silent_seconds = parse_duration(request.hang_timeout)
    plan = folder = None
    if request.study is not None:
        refuse(request, "gpus seq_len precision", "cannot differ from the study's")
    else:
        if parse_global_batch(request.global_batch_size) is None:
            raise UserError(
                "launch without a study needs --global-batch-size: the sequences per optimizer step of your training"
            )
        ranks = ranks_asked_for(request.gpus, typed)
        # the training that is launched has no sandbox either
        request = request.model_copy(update={"gpus": ranks, "unprotected": True})
        hardware = _machine(request, nodes)
        job = _named_job(request, hardware, interpreter)
        _whole_sequences(job, request.ds_config)
        plan = PlanSetup(job=job, hardware=hardware, space=fitted(_space(request, hardware), job, hardware).space)
        folder = study_folder(request.runs, f"launch-{typed.script.name}")
    batch = FREE if request.global_batch_size == FREE else parse_global_batch(request.global_batch_size)
    return LaunchSetup(
        request=request,
        typed=typed,
        plan=plan,
        global_batch_size=batch,
        folder=folder,
        memory_cap_bytes=_limits(request)[0],
        silent_seconds=silent_seconds,
        interpreter=interpreter,
    )


# -- job, machine and space ----------------------------------------------------------------------------------------------


def _tuned_model(
    request: Request, space: SearchSpace, hardware: Hardware, interpreter: Interpreter
) -> tuple[Job, SearchSpace, list[str]]:
    """Return the job of a named model or a workload, the space fitted to it, and lines for display."""
    refuse(request, "maps worst_case", "needs a training script after `--`, like `-- train.py`")
    job = _named_job(request, hardware, interpreter)
    if hardware.device == "cuda":
        job = with_plausible_batch(job, space, request)
    _whole_sequences(job, request.ds_config)
    for option, value in (("--lora", job.lora), ("--attn", job.attention), ("--loss", job.loss)):
        if package := missing_package(value, interpreter):
            raise UserError(f"{option} {value} needs the package {package}. Install it, or remove {option}.")
    space, notes = fitted(space, job, hardware)
    return job, space, [*batch_note(request.global_batch_size, job, request.ds_config), *notes]


def _own_config(path: Path, interpreter: Interpreter, named_by: str = "--ds-config") -> dict[str, Any]:
    """Return the user's own config, in current names.

    Raises:
        UserError: see `load_ds_config`; or it has a key that the installed DeepSpeed refuses by its presence.
    """
    config = load_ds_config(path, named_by)
    for key, why in removed_keys(config, installed_deepspeed(interpreter)):
        raise UserError(f"{path}: {key}: {why}")
    return config


def _slots(request: Request, nodes: Nodes | None) -> tuple[Slot, ...]:
    """Return a slot for each candidate of `--parallel`."""
    if request.parallel == 1:
        return (Slot(_machine(request, nodes), {}),)
    if nodes is not None:
        raise UserError(
            "--parallel works on one machine only. Remove it, or start autotune on each machine with the same --storage."
        )
    cap, headroom = _limits(request)
    found = slots(request.parallel, request.device, request.gpus, memory_cap_bytes=cap, headroom=headroom)
    return tuple(dataclasses.replace(one, hardware=_reserving(one.hardware, request)) for one in found)


def _limits(request: Request) -> tuple[int | None, float]:
    """Return a job's limit of device memory in bytes (None: none), and the headroom as a share."""
    cap = parse_memory(request.memory_cap) if request.memory_cap else None
    return cap, parse_share(request.headroom or DEFAULT_HEADROOM)


def _machine(request: Request, nodes: Nodes | None) -> Hardware:
    """Return this machine's devices, or those of nodes, which must have the folder of a script or of a workload's module."""
    cap, headroom = _limits(request)
    if nodes is not None:
        path = str(Path.cwd()) if request.script or request.workload else ""
        return _reserving(nodes.reach(request.device, request.gpus, cap, headroom, path), request)
    return _reserving(detect(request.device, request.gpus, memory_cap_bytes=cap, headroom=headroom), request)


def _space(request: Request, hardware: Hardware) -> SearchSpace:
    return load_space(request.space or ("default" if hardware.device == "cuda" else "cpu_demo"))


# options without a meaning if the user's code makes the model
_OF_A_MODEL = "model lora attention loss lengths task image_size"


def _script_job(request: Request, script: Script, hardware: Hardware) -> Job:
    """Return the stand-in for a script's Job; options about a model are refused."""
    names = f"{_OF_A_MODEL} seq_len precision workload"
    refuse(request, names, "cannot be combined with a script, which sets it itself")
    batch = parse_global_batch(request.global_batch_size)
    if batch is not None and (batch < 1 or batch % hardware.count):
        raise UserError(f"--global-batch-size {batch} cannot be split over {hardware.count} ranks")
    return unknown_job(script, hardware)


# -- the job of a named model --------------------------------------------------------------------------------------------


def _named_job(request: Request, hardware: Hardware, interpreter: Interpreter) -> Job:
    """Return the Job of a model or a workload on this hardware."""
    model = _model(request, interpreter)
    own = _own_config(request.ds_config, interpreter) if request.ds_config else {}
    check_whole_model(own, request.ds_config)
    precision, base = precision_of(request.precision, own, hardware)
    lengths = load_lengths(request.lengths) if request.lengths else ()
    task = task_of(model.config, request.task, model.name)
    job = Job(
        model=model,
        ranks=hardware.count,
        seq_len=_seq_len(request, model, lengths, hardware),
        precision=precision,
        optimizer=request.optimizer,
        global_batch_size=kept_batch(request.global_batch_size, base, hardware.count, request.ds_config),
        base_config=base,
        lora=_lora(request, model),
        attention=request.attention,
        loss=request.loss or FULL,
        lengths=lengths,
        packed=bool(lengths) and request.seq_len is not None,
        workload=request.workload,
        task=task,
        image_size=image_size_of(model.config, task, request.image_size, model.name),
        unprotected=request.unprotected,
        interpreter=interpreter,
    )
    installed = interpreter.origin("deepspeed") if job.optimizer_kind == "muon" else None
    if installed is not None and not (Path(installed).parent / "runtime/zero/muon").exists():
        raise UserError("Muon is not an optimizer of the installed DeepSpeed. Install a newer one.")
    if job.lora and not interpreter.has("peft"):
        raise UserError(f"--lora {job.lora} needs the package peft. Install it, or remove --lora.")
    if job.loss != FULL and (why := loss_possible(job.loss, RequirementInputs.of(job, hardware))):
        raise UserError(f"--loss {job.loss} {why}. Remove --loss.")
    return job


def _whole_sequences(job: Job, file: Path | None) -> None:
    """Check that each rank has its own sequences, as in trials and trainings.

    Raises:
        UserError: ranks share sequences.
    """
    if job.sequence_ranks > 1:
        raise UserError(
            f"{file}: {SEQUENCE_RANKS} {job.sequence_ranks}: trials of --model give each rank whole sequences. Use autotune plan"
        )


def _lora(request: Request, model: ModelSpec) -> Lora | None:
    """Return the adapters of a named model's training.

    Raises:
        UserError: they are wrong, or the base model cannot be quantized.
    """
    if not request.lora:
        return None
    lora = parse_lora(request.lora)
    why = not_quantized(model.config) if lora.quantize else ""
    if why:
        raise UserError(f"--lora quantize={lora.quantize}: {why}")
    return lora


def _model(request: Request, interpreter: Interpreter) -> ModelSpec:
    if request.workload:
        refuse(request, _OF_A_MODEL, "cannot be combined with --workload, whose function makes model and batches")
        return workload_spec(request.workload, interpreter)
    if request.model:
        return resolve_model(
            request.model,
            trust_remote_code=request.trust_remote_code,
            unprotected=request.unprotected,
            interpreter=interpreter,
        )
    others = "a folder, or a Hub id; `autotune run -- train.py` takes your script"
    raise UserError(f"--model is missing: give a shipped name (`autotune models`), {others}")


# -- command after -- --------------------------------------------------------------------------------------------------


def typed_command(request: Request, nodes: Nodes | None, interpreter: Interpreter = OWN) -> TypedCommand:
    """Parse the words typed after `--`, and set their variables here and on the nodes, as a shell sets them for the command.

    Args:
        nodes: not reached yet; they receive the script's folder, too.

    Raises:
        UserError: see `read_command`.
    """
    typed = read_command(request.script, request.maps, request.worst_case, request.ds_config, interpreter)
    os.environ.update(typed.variables)
    if nodes is not None:
        nodes.also_send(typed.variables)
    return typed


def ranks_asked_for(gpus: int | None, typed: TypedCommand) -> int | None:
    """Return the requested number of GPUs; None if neither the call nor the command gives it.

    Args:
        gpus: value of `--gpus`.

    Raises:
        UserError: the two numbers differ.
    """
    if typed.ranks is not None and gpus not in (None, typed.ranks):
        raise UserError(
            f"--gpus {gpus} contradicts `{typed.ranks_source}`. Remove one of them, or give the same number."
        )
    return gpus if typed.ranks is None else typed.ranks


def notes_of_command(typed: TypedCommand) -> Iterator[str]:
    """Yield a line about what a shell script starts, and one about variables that the script's code sets for its ranks."""
    if typed.started:
        yield f"the shell script starts `{typed.started}`"
    if typed.own:
        yield f"{typed.script.target} sets {', '.join(sorted(typed.own))} itself: ranks start with it"


# -- global batch ------------------------------------------------------------------------------------------------------

FREE = "free"  # no batch is kept: the fastest is chosen


def parse_global_batch(asked: str | None) -> int | None:
    """Return the requested sequences per optimizer step; None if none is requested, or `free`.

    Raises:
        UserError: the value is neither a number nor `free`.
    """
    if asked is None or asked == FREE:
        return None
    return _number(asked, "--global-batch-size", f"a number of sequences, or {FREE}")


def _number(asked: str, option: str, expected: str) -> int:
    """Return the whole number of an option that may also be a word; `Job` checks the bounds."""
    try:
        return whole_number(asked, option, -MOST, MOST)
    except UserError:
        raise UserError(f"{option} {display_value(asked)}: expected {expected}") from None


def kept_batch(asked: str | None, config: dict[str, Any], ranks: int, file: Path | None) -> int | None:
    """Return the sequences per optimizer step of a named model: as requested, or else from the user's own config; None: free.

    Raises:
        UserError: the value is no number, or the config's batch cannot be split over the ranks.
    """
    if asked is not None:
        return parse_global_batch(asked)
    batch, words = global_batch_of(config, ranks)
    size = sequence_ranks(config)
    at_once = max(1, ranks // size)
    if batch is not None and batch % at_once:
        raise UserError(
            f"{file}: {words} cannot be split evenly over {counted_ranks(ranks, size)}. Change it, or give "
            f"--global-batch-size (try {near(batch, at_once)}, or {FREE})"
        )
    return batch


_PLAUSIBLE_TOKENS = 2**18  # tokens per optimizer step: fine-tuning commonly has 0.1 to 0.5 million


def with_plausible_batch(job: Job, space: SearchSpace, request: Request) -> Job:
    """Return the job with a global batch of about 262,144 tokens, a power of two of sequences per rank.

    Return it unchanged if the request or the user's config says something of the batch, or the space cannot make such a batch.
    """
    if request.global_batch_size is not None or job.global_batch_size is not None:
        return job
    share = _PLAUSIBLE_TOKENS / (job.tokens_per_sample * job.samples_per_row * job.data_ranks)
    plausible = dataclasses.replace(job, global_batch_size=job.data_ranks * 2 ** max(0, round(math.log2(share))))
    try:
        space.rungs(plausible)
    except UserError:
        return job
    return plausible


def batch_note(asked: str | None, job: Job, file: Path | None) -> list[str]:
    """Return a note if a batch is kept that was not typed, with its origin."""
    if asked is not None or job.global_batch_size is None:
        return []
    batch, words = global_batch_of(job.base_config, job.ranks)
    origin = "assumed"
    if batch is not None:
        origin = f"kept from {file} ({words})"
    return [f"global batch {job.global_batch_size} is {origin}; --global-batch-size {FREE} tunes it"]


# -- seq len -----------------------------------------------------------------------------------------------------------

DEFAULT_SEQ_LEN = {"cuda": 2048, "cpu": 64}


def _seq_len(request: Request, model: ModelSpec, lengths: tuple[tuple[int, int], ...], hardware: Hardware) -> int:
    """Return tokens per sequence: as requested, else the longest of `--lengths`, else the device's default."""
    longest, seq_len = longest_sequence(model.config), None
    if request.seq_len == "max":
        if longest is None:
            raise UserError(
                f"--seq-len max: the configuration of {model.name} names no longest sequence; give a number"
            )
        seq_len = longest
    elif request.seq_len is not None:
        seq_len = _number(request.seq_len, "--seq-len", "a number of tokens, or max")
    if lengths:
        most = max(tokens for tokens, _ in lengths)
        seq_len = seq_len or most
        if seq_len < most:
            raise UserError(
                f"--seq-len {seq_len} is shorter than the longest sequence of --lengths. Give at least {most}."
            )
    if seq_len is None:
        seq_len = min(DEFAULT_SEQ_LEN[hardware.device], longest or 10**9)
    if longest and seq_len > longest:
        raise UserError(f"--seq-len {seq_len}: {model.name} takes at most {longest} tokens")
    return seq_len


# -- precision ---------------------------------------------------------------------------------------------------------


def precision_of(typed: str | None, config: dict[str, Any], hardware: Hardware) -> tuple[str, dict[str, Any]]:
    """Return the precision, and the config without settings that contradict it.

    The typed precision comes first, then the one that the config enables, then the best of the device that the config does not
    disable.
    """
    precision = typed or _precision(config, hardware)
    section = config.get(precision)
    if isinstance(section, dict):
        config = {**config, precision: {**section, "enabled": True}}
    return precision, config


def _precision(config: dict[str, Any], hardware: Hardware) -> str:
    said = {name: section.get("enabled") for name in ("bf16", "fp16") if isinstance(section := config.get(name), dict)}
    for name, enabled in said.items():
        if enabled is True:
            return name
    if hardware.device == "cpu":
        return "fp32"
    best = "bf16" if hardware.bf16 else "fp16"
    return "fp32" if said.get(best) is False else best


# -- study names -------------------------------------------------------------------------------------------------------

_LONGEST = 120  # characters of a name
# files of these names exist in a study's folder, besides the winner's NAME.json and NAME.html
_TAKEN = ("probe", "launch")


def study_name(job: Job, hardware: Hardware, global_batch_size: int | str | None = None) -> str:
    """Return a name that is stable for a job on a machine, so that the same command resumes.

    Args:
        global_batch_size: as requested, `free` included; a script's job is not known yet.
    """
    key = hashlib.sha256(json.dumps(identity(job, hardware), sort_keys=True).encode()).hexdigest()[:6]
    if job.script:
        limits = ("b", global_batch_size), ("c", hardware.memory_cap_bytes), ("r", hardware.reserve_bytes)
        asked = [f"{what}{value}" for what, value in limits if value]
        key = hashlib.sha256(" ".join([job.script.key, *asked]).encode()).hexdigest() if asked else job.script.key
        key = key[:6]
    rest = f"-{hardware.count}x{hardware.facts or hardware.device}-{key}"
    model = job.model.name.lstrip(".-") or "model"  # a folder may have a name that a study may not
    return f"{model[: _LONGEST - len(rest)]}{rest}"


def name_since_edits(name: str, runs: Path, job: Job) -> tuple[str, list[str]]:
    """Return the name of a study without a typed name, and lines for display.

    If files that the script uses, or variables that it reads, have changed since the study was made, another name
    is returned, which the same texts find again.
    Otherwise the name is unchanged and there are no lines.
    """
    first, files, variables = name, list[str](), list[str]()
    while job.script is not None:
        known = stored_findings(runs / name / MEMORY)
        edits, changed = edited_since(known.sources, job.script.cwd), changed_variables(known.variables)
        if not edits and not changed:
            break
        files, variables = [*files, *edits], [*variables, *changed]
        now = [digests(known.sources, job.script.cwd), *values_now(known.variables)]
        texts = json.dumps([name, *now], sort_keys=True)
        name = f"{first}-{hashlib.sha256(texts.encode()).hexdigest()[:4]}"
    if name == first:
        return name, []
    if files:
        verb = "were" if len(set(files)) > 1 else "was"
        files = [f"{', '.join(dict.fromkeys(files))} {verb} edited"]
    told = "; ".join(dict.fromkeys([*files, *variables]))
    return name, [f"{told} since study {first}: this call uses study {name} (--force resumes {first})"]


def study_folder(runs: Path, name: str) -> Path:
    """Return `runs/NAME`, which need not exist.

    Raises:
        UserError: the name is not plain.
    """
    if not name or "/" in name or name[0] in ".-" or len(name) > _LONGEST or not name.isprintable():
        raise UserError(
            f"--study {name!r}: expected a plain name of at most {_LONGEST} letters, without slashes and not starting with a "
            "dot or a hyphen"
        )
    if name in _TAKEN:
        raise UserError(f"--study {name}: its folder has a file of this name. Choose another name.")
    return runs / name


# -- plan hardware -----------------------------------------------------------------------------------------------------

MOST_GPUS = 4096  # over all nodes; two link rates describe larger clusters too poorly


def _planned_hardware(name: str | None, request: Request) -> Hardware:
    """Return the request's number of the named GPU, or of the machine's own for None, in each of its nodes.

    The main memory is as typed, or else as measured or that of a common cloud machine.

    Raises:
        UserError: impossible counts, or no such GPU.
    """
    gpus_per_node = request.gpus or 1
    nodes, _ = parse_nodes(request.nodes or "1")
    _, headroom = _limits(request)
    host = parse_memory(request.host_memory) if request.host_memory else None
    count = gpus_per_node * nodes
    if count > MOST_GPUS:
        raise UserError(
            f"--nodes {nodes}: with --gpus {gpus_per_node} in each that is {count} GPUs, expected at most {MOST_GPUS}"
        )
    if name is None:
        if not visible_gpus():
            raise UserError("found no GPU on this machine: name one to predict for, like --gpu h100 --gpus 8")
        found = detect("auto", gpus_per_node, headroom=headroom)
        hardware = dataclasses.replace(found, count=count, nodes=nodes)
    else:
        hardware = named_hardware(name.strip(), count, headroom=headroom, nodes=nodes)
    hardware = dataclasses.replace(hardware, host_memory_bytes=host or hardware.host_memory_bytes)
    return _reserving(hardware, request)


def _reserving(hardware: Hardware, request: Request) -> Hardware:
    """Return the hardware without the memory that `--reserve` leaves to another process, with the network of `--nodes`.

    Raises:
        UserError: the rest of a GPU is smaller than the fixed share of every process.
    """
    _, network_gb_per_s = parse_nodes(request.nodes or "1")
    if network_gb_per_s:
        hardware = hardware.with_rates(network_gb_per_s=network_gb_per_s)
    hardware = hardware.reserving(parse_memory(request.reserve) if request.reserve else 0)
    if hardware.device != "cuda":
        return hardware
    taken = overhead_prior(hardware, hardware.count).mean * GIB
    if hardware.ceiling_bytes <= taken:
        raise UserError(
            f"{hardware.name}: a rank may use {format_bytes(hardware.ceiling_bytes)}, and CUDA's context and NCCL take "
            f"{format_bytes(taken)}. Free memory of the GPU, or use another one."
        )
    return hardware


# -- lengths -----------------------------------------------------------------------------------------------------------

MOST_LENGTHS = 256  # different lengths kept per data set


def load_lengths(path: Path) -> tuple[tuple[int, int], ...]:
    """Read a data set's lengths in tokens: a JSON object or CSV lines of `length: count`, or one length per line.

    If there are many different lengths, they are rounded up into groups, so that no batch is underestimated.

    Raises:
        UserError: the file has none of these forms.
    """
    expected = 'expected {"512": 1000, …}, lines of `512,1000`, or one length a line'
    what = f"--lengths {path}"
    text = read_text(path, what, expected)
    rows: list[list[object]]
    if text.lstrip().startswith("{"):
        data = parse_json(text, what, expected)
        rows = [[tokens, count] for tokens, count in data.items()]
    else:
        rows = [[*words] for line in text.splitlines() if (words := line.replace(",", " ").split())]
    counts: Counter[int] = Counter()
    for row in rows:
        if len(row) > 2:
            raise UserError(
                f"{what}: {display_value(' '.join(map(str, row)))}: more than two numbers in a line; {expected}"
            )
        tokens, count = row[0], row[1] if len(row) > 1 else 1
        try:
            counts[whole_number(tokens, what, 1, MOST_TOKENS)] += whole_number(count, what)
        except UserError as error:
            raise UserError(f"{error}; {expected}") from None
    if not +counts:
        raise UserError(f"--lengths {path} is empty; {expected}")
    step = -(-max(counts) // MOST_LENGTHS) if len(counts) > MOST_LENGTHS else 1
    merged: Counter[int] = Counter()
    for tokens, count in counts.items():
        merged[min(max(counts), -(-tokens // step) * step)] += count
    return tuple(sorted((+merged).items()))


# Models whose positions start after the padding token's id (RoBERTa's), and models with relative positions. T5's `n_positions` is
# only the length used in pretraining.
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


_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "n_ctx")


def longest_sequence(config: dict[str, Any]) -> int | None:
    """Return the model's longest sequence in tokens by its configuration, or None if it sets no limit."""
    text = text_config(config)
    if config.get("model_type") in _RELATIVE:
        return None
    taken = (text.get("pad_token_id") or 0) + 1 if config.get("model_type") in _FROM_PADDING else 0
    for key in _LENGTH_KEYS:
        if isinstance(text.get(key), int):
            return int(text[key]) - taken
    return None
