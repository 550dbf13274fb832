"""Requirements of knobs' settings on the job and the machine. Each function returns a short text about what is missing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autotune.interpreter import current, which
from autotune.problem.early_variables import ALLOCATOR_VARIABLES, settings_in
from autotune.problem.hardware import Hardware
from autotune.problem.job import Job
from autotune.problem.liger import FAILS_WITH_IMAGES, LIGER_READ, NEEDS_TRANSFORMERS, since
from autotune.problem.script_text import script_text
from autotune.problem.tasks import DECODED, IMAGE_TEXT
from autotune.versions import dotted, release

Value = bool | int | float | str
Release = tuple[int, ...]
READ: Release = (0, 19, 8)  # the DeepSpeed from which knobs, defaults and formulas were read
KERNELS = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}  # attention -> its package
WIDTHS = {"fp32": 4, "fp16": 2, "bf16": 2}  # bytes of DeepSpeed's dtypes
ADAMS = ("adamw", "adam", "fused_adam")


@dataclass(frozen=True)
class Circumstances:
    """Inputs of the requirements, besides the other knobs of a candidate."""

    job: Job
    hardware: Hardware
    lossy: bool = False  # the space may change arithmetic
    compiles: bool = False  # the space has candidates that are compiled
    deepspeed: Release = READ
    packages: bool = True  # check the packages of the ranks' environment

    @classmethod
    def of(cls, job: Job, hardware: Hardware, lossy: bool = False, compiles: bool = False) -> Circumstances:
        """Return the circumstances with the DeepSpeed that ranks will have."""
        return cls(job, hardware, lossy, compiles, release(current().version("deepspeed")) or READ)


Need = Callable[[Value, Circumstances], str]  # returns what is missing, or an empty text


def cuda(value: Value, c: Circumstances) -> str:
    return "" if c.hardware.device == "cuda" else "is for CUDA alone"


def own_allocator(value: Value, c: Circumstances) -> str:
    """A variable that the script's code sets stays set, whatever the command line sets."""
    set_by_it = settings_in(script_text(c.job.script) or "") if c.job.script is not None else []
    seen = c.job.script.variables if c.job.script is not None else {}
    names = [*(one.name for one in set_by_it if not one.default), *seen]
    name = next((one for one in names if one in ALLOCATOR_VARIABLES), "")
    return f"is the script's own to set: its code sets {name}" if name else ""


def several_ranks(value: Value, c: Circumstances) -> str:
    return "" if c.job.ranks > 1 else "needs more than one rank"


def several_nodes(value: Value, c: Circumstances) -> str:
    """hpZ's second partition lies within a node. On a single node it would hold the memory that ZeRO-3 saves, without a gain."""
    if c.hardware.nodes < 2:
        return "needs more than one node"
    if not 1 <= int(value) <= c.hardware.per_node or c.hardware.per_node % int(value):
        return f"has to divide the {c.hardware.per_node} ranks of a node"
    return ""


def bf16(value: Value, c: Circumstances) -> str:
    return "" if c.job.precision == "bf16" else f"needs --precision bf16, not {c.job.precision}"


def fp16(value: Value, c: Circumstances) -> str:
    return "" if c.job.precision == "fp16" else f"needs --precision fp16, not {c.job.precision}"


def adam(value: Value, c: Circumstances) -> str:
    """DeepSpeed's CPU Adam, checked by type (stage3.py, `Hybrid Optimizer Only Supports DeepSpeedCPUAdam`)."""
    kind = c.job.optimizer_kind
    return "" if kind in ADAMS else f"needs DeepSpeed's Adam, not {kind}"


def place_of_its_optimizer(value: Value, c: Circumstances) -> str:
    """Return why a script's own optimizer cannot step on this device.

    Only DeepSpeed's and apex's optimizers are limited. Fused ones accept only GPU tensors (`expected input to be on cuda`), CPU
    ones only tensors in main memory (ops/adam/cpu_adam.py, `CPUAdam param is on`).
    """
    profile = c.job.script.profile if c.job.script is not None else {}
    kind = "" if profile.get("through_arguments") else str(profile.get("optimizer", ""))  # Trainer follows the config
    if c.hardware.device == "cuda" and steps_on_gpu(kind) and value != "none":
        return f"is not for the script's own {kind}, which steps on the GPU alone"
    if c.hardware.device == "cuda" and "CPU" in kind and value == "none":
        return f"is not for the script's own {kind}, which steps on the CPU alone"
    return ""


def sharded_for_its_optimizer(value: Value, c: Circumstances) -> str:
    """Stage 0 offloads nothing."""
    return place_of_its_optimizer("none", c) if value == 0 else ""


def steps_on_gpu(optimizer: str) -> bool:
    """Check by the name of an optimizer's class, DeepSpeed's or apex's, that its kernels run on GPUs only."""
    return optimizer.startswith("Fused")


def no_clipping(value: Value, c: Circumstances) -> str:
    """DeepSpeed clips at 1.0 by default (runtime/constants.py, GRADIENT_CLIPPING_DEFAULT)."""
    own = c.job.base_config.get("gradient_clipping")
    return "" if own == 0 and not isinstance(own, bool) else "needs gradient_clipping: 0 in your own config"


def no_narrower_than_the_model(value: Value, c: Circumstances) -> str:
    """Sums in a narrower dtype give different results."""
    own = WIDTHS.get(c.job.precision, 4)
    narrower = WIDTHS.get(str(value), own) < own and not c.lossy
    return f"is narrower than {c.job.precision}, so that losses may differ: it needs a `lossy: true` space" * narrower


def memory_of_its_own(value: Value, c: Circumstances) -> str:
    """On a GPU that shares main memory, offloading to the CPU frees nothing."""
    return "frees nothing here, where the GPU's memory is main memory" * (c.hardware.unified and value == "cpu")


def a_compiler(value: Value, c: Circumstances) -> str:
    """Return what torch.compile lacks to build its kernels."""
    if c.hardware.device == "cuda":
        return "" if current().has("triton") else "needs the package triton, which is not installed"
    return "" if any(map(which, ("g++", "clang++", "c++"))) else "needs a C++ compiler (g++), which is not installed"


def a_script(value: Value, c: Circumstances) -> str:
    """ZenFlow decides itself when a step ends (runtime/zenflow/engine.py); a trial of a model sets that explicitly."""
    if c.job.script is not None:
        return ""
    return "needs a script's own loop: a trial of a model says itself where a step ends"


def mics_init(value: Value, c: Circumstances) -> str:
    return "needs a model made under deepspeed.zero.MiCS_Init, which neither transformers nor the tuner does"


def its_package(value: Value, c: Circumstances) -> str:
    """Return the missing package of an attention kernel or of adapters."""
    package = missing_package(value)
    return f"needs the package {package}, which is not installed" if package else ""


def missing_package(choice: object) -> str | None:
    """Return the package that an attention kernel or adapters (`r=16,…`) need and the ranks' environment lacks, or None."""
    if choice in (None, "none"):
        return None
    package = "peft" if str(choice).startswith("r=") else KERNELS.get(str(choice))
    return package if package and not current().has(package) else None


def liger_kernel(value: Value, c: Circumstances) -> str:
    """Check for the package in a version that supports the model's type, and a transformers with which it can be imported."""
    own, theirs = (current().version(package) for package in ("liger_kernel", "transformers"))
    if not current().has("liger_kernel"):
        return "needs the package liger_kernel, which is not installed"
    for newer, least in NEEDS_TRANSFORMERS.items():
        if release(own) >= newer and release(theirs) < least:
            return f"needs transformers {dotted(least)} or newer beside liger_kernel {own}: {theirs} is installed"
    kind = c.job.model.config.get("model_type")
    first = since(kind, theirs) or ()
    if own is not None and release(own) < first:
        beside = f"in a model of type {kind} beside transformers {theirs}"
        return f"needs liger_kernel {dotted(first)} or newer {beside}: {own} is installed"
    return ""


def liger_model(value: Value, c: Circumstances) -> str:
    """Check that Liger knows the model and that the task has a language-model head: Liger replaces any head's forward by that
    head's.
    """
    kind = c.job.model.config.get("model_type")
    if since(kind) is None:
        return f"changes nothing in a model of type {kind}, as far as autotune knows Liger's kernels ({LIGER_READ})"
    if kind in FAILS_WITH_IMAGES and c.job.task == IMAGE_TEXT:
        return f"fails in a model of type {kind} with images: Liger's forward ({LIGER_READ}) and transformers' no longer agree"
    return "" if c.job.task in DECODED else f"is for {' and '.join(f'--task {task}' for task in DECODED)}"


def engine_compile(value: Value, c: Circumstances) -> str:
    """Only `engine.compile()` reads it, and a script's call of that is not visible from outside."""
    if c.job.script is not None:
        return "needs a script that calls engine.compile(), which cannot be told from outside"
    return "" if c.compiles or c.job.compiled else "needs --compile, or the knob compile"


FATAL: tuple[Need, ...] = (cuda, adam, mics_init)  # without these DeepSpeed fails; without the others nothing is gained
OF_PACKAGES: tuple[Need, ...] = (its_package, liger_kernel, a_compiler)
