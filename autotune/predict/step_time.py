"""Roofline step time (operators against the device's peak and bandwidth, bytes against links), FLOPs, and start-up time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from autotune.predict.features import Columns, Floats
from autotune.predict.trace_data import Trace
from autotune.predict.zero_memory import (
    LARGEST_OF_LOSS,
    NF4_BYTES,
    kept_at_turn,
    optimizer_of_trials,
    persistent,
    quantized_sizes,
)
from autotune.problem.candidate import Candidate
from autotune.problem.hardware import Hardware, threads_per_rank, usable_cpus
from autotune.problem.job import Job
from autotune.problem.models import CAUSAL, DECODED, IMAGE_TEXT, MASKED, SEQ2SEQ, text_config
from autotune.util.units import GIB, MIB

# DeviceRates of a CPU rank before the first trial: FLOPs, bytes and link bytes per second of one rank on one core. Measured
# on the machine of benchmarks/data/landscapes_real (an AMD EPYC), where 16 bits were as fast as 32. Cores without
# 16-bit instructions are several times slower in them, and the priors of CPU ranks allow for that.
CPU_TFLOPS, CPU_MEMORY_GB_PER_S, CPU_LINK_GB_PER_S = 0.2, 12.0, 1.0
# glibc maps each block of more than 32 MiB again (mallopt, M_MMAP_THRESHOLD), and the kernel zeroes each page when it is first
# touched. A loss of 192 MiB in such blocks took 0.09 s of the kernel's time in a virtual machine (AMD EPYC, pages of 4 KiB).
MAPPED_BYTES, TOUCHED_GB_PER_S = 32 * MIB, 2.1
# The host's memory limits DeepSpeed's CPU Adam: it reads and writes masters and states, reads a gradient and writes a
# weight (30 bytes per element in 16 bits). 1e9 parameters took 0.23 s on the two sockets of a DGX-2 (Ren et al. 2021,
# ZeRO-Offload, table 4). Few cores cannot use all of it: 16 virtual cores of an H100 machine reached 64 GB/s for 3.6e8
# parameters and 84 GB/s for 1.5e9 (benchmarks/results/gpu-h100.json). If the number is unknown, the prior is wide.
HOST_MEMORY_GB_PER_S, CORE_GB_PER_S = 120.0, 5.0
# A causal mask lets fused attention skip half of its work, at about 0.7 of a plain product's efficiency (Dao 2023,
# FlashAttention-2, figures 4 and 6).
ATTENTION_SHARE = 0.5 / 0.7
NVME_GB_PER_S = 2.0
BUCKET_SECONDS = (
    3e-5  # to start one collective within a node; without it a search takes twice the trials (search/search.py)
)
# Bytes per second that pointwise kernels would reach on a card of unlimited bandwidth: instructions and launches take time, too.
# With `calibration.TIME`'s 95 % of both it explains the 2.2 TB/s of an H100 and the 2.7 of an H200 (error.py --trials), and about
# the four fifths that slower cards are known for.
POINTWISE_GB_PER_S = 7000.0
# Seconds of the processor per operator of an eager model, with the launch of its CUDA kernel. Two kinds of hosts: 18 us (a lower
# bound by Qwen 1.8B at 256 to 1024 tokens, QwenLM/Qwen; 9 us and 5 to launch on an EPYC core at 1 thread), and 24 to 25 us on the
# virtual machines of an H100 and an H200 (benchmarks/predict/published.py --trials). In between, as `calibration.TIME`'s
# `starts` covers both.
OPERATOR_SECONDS = 2.0e-5
# Seconds of ZeRO-3's hooks around a module's forward, recomputation or backward (fetch_sub_module, release_sub_module
# and their callees: partitioned_param_coordinator.py and parameter_offload.py of deepspeed 0.19.8). Measured: 110 to
# 150 us on that core over 4 ranks whose collectives do nothing, for Llama and for its adapters alike; about 250 in
# QwenLM/Qwen's rows of 2023; about 400 on the machines of the H100 and the H200. `calibration.TIME`'s `hooks` covers them.
MODULE_SECONDS, CPU_MODULE_SECONDS = 3.0e-4, 2e-4
# Modules called per kernel of forward: 162 for 483 in 12 layers of Llama. An adapter of peft adds four modules
# (dropout, A, B and itself) and four kernels.
MODULES_AN_OPERATOR = 0.335
REDUCED_SECONDS = 2.5e-5  # per gradient at ZeRO-1 and 2: the hook that puts it into its bucket (same measurement)
# Share of an eager model's kernels, and of the bytes they move, that remains when compiled: each chain of pointwise
# operators (norms, rotation, activation and gate) becomes one kernel.
COMPILED_STARTS, COMPILED_MOVED = 0.3, 0.45
# Seconds of data and loop per micro-batch: collating, copying, reading the loss, as transformers' Trainer checks that it
# is finite every time.
MICRO_SECONDS = 4e-3
# Operators that the host starts in a step besides its micro-batches: clipping, the schedule, zero_grad and the loop; per
# tensor at stage 0; per tensor of ZeRO's flat parts. On a GPU, DeepSpeed starts kernels to copy, cast, measure and scale each
# tensor. Measured: 71 ms at stage 0 and 50 to 59 ms at stages 1 and 2 for 290 tensors on an H100 whose host took 26 us per
# operator (benchmarks/results/gpu-h100.json: boundary less micro-step). Without a GPU, or with torch's own optimizers and
# clipping (`foreach`), it is 60 and 20 us per tensor on a core of an EPYC.
_STEP_OPERATORS, _OF_DEEPSPEED, _OF_TORCH = 500.0, (8.0, 5.0), (3.0, 1.0)
# Bytes per element that DeepSpeed's step moves around the optimizer's own: to 32 bits, norm in 64 bits, scaling; ZeRO flattens,
# too (deepspeed 0.19.8, fp16/unfused_optimizer.py; runtime/zero/stage_1_and_2.py, `get_grad_norm_direct`).
_GRADIENT_BYTES = 27.0


@dataclass(frozen=True)
class DeviceRates:
    """Rates of one rank on a machine, per second; bytes in one direction."""

    flops: float
    memory: float  # bytes of the device's memory
    kernels: float  # bytes of the device's memory by pointwise kernels
    link: float
    pcie: float
    host: float  # bytes of main memory by CPU Adam
    queues: bool  # the device runs kernels while the host starts others; a CPU rank does both itself

    @classmethod
    def of(cls, hardware: Hardware, job: Job) -> DeviceRates:
        """Return the rates of a machine's GPUs for the job's precision, or those of CPU ranks."""
        facts = hardware.gpu_facts
        cores = cores_of(hardware) or np.inf
        host = min(HOST_MEMORY_GB_PER_S, CORE_GB_PER_S * cores) * 1e9 / hardware.per_node
        if facts is None:  # CPU ranks
            memory, link = CPU_MEMORY_GB_PER_S * 1e9, CPU_LINK_GB_PER_S * 1e9
            return cls(CPU_TFLOPS * 1e12, memory, memory, link, memory, host, False)
        precision = {"float16": "fp16", "bfloat16": "bf16"}.get(job.autocast or "", job.precision)
        in_32_bits = precision == "fp32" or (precision == "bf16" and not facts.bf16)
        flops = facts.fp32_tflops if in_32_bits else facts.tflops
        # A ring enters every node once, over all its adapters together, and passes every GPU's own link once.
        ring = min(facts.link_gb_per_s, hardware.network_gb_per_s) if hardware.nodes > 1 else facts.link_gb_per_s
        link = facts.ring_gb_per_s or ring  # that ring, as measured
        memory = facts.memory_gb_per_s
        kernels = 1 / (1 / memory + 1 / POINTWISE_GB_PER_S)
        peak = flops * facts.achievable * 1e12
        return cls(peak, memory * 1e9, kernels * 1e9, link * 1e9, facts.pcie_gb_per_s * 1e9, host, True)


@dataclass(frozen=True)
class StepWork:
    """Work of a rank in a candidate's step, on any machine; one entry per candidate."""

    forward_share: Floats  # share of products, without recomputation
    recompute_share: Floats
    # Per micro-batch
    products: Floats  # FLOPs
    moved: Floats  # bytes of operators other than products
    starts: Floats  # seconds of the host to start kernels
    hooks: Floats  # its seconds in ZeRO-3's hooks on GPUs
    gathered: Floats  # bytes over the link
    reduced: Floats
    transferred: Floats  # bytes over PCIe
    # Per step
    step_starts: Floats
    step_gathered: Floats
    step_reduced: Floats
    step_transferred: Floats
    collectives: Floats  # number
    optimizer: Floats  # bytes of device memory
    cpu_adam: Floats  # bytes of main memory
    nvme: Floats  # bytes


def step_work(job: Job, trace: Trace, c: Columns, device: str, loss: Floats | float = 0.0) -> StepWork:
    """Return the work of every candidate; `loss` are the bytes of a micro-batch's logits and loss."""
    plain, again = trace.plain, trace.of(True)

    def either(of_plain: float, of_again: float) -> Floats:
        return np.asarray(of_plain + c.checkpointing * (of_again - of_plain))

    whole_pass = [sum(run.flops) + ATTENTION_SHARE * sum(run.attention) for run in (plain, again)]
    forward = plain.flops[0] + ATTENTION_SHARE * plain.attention[0]
    rows = c.rows * c.tokens / job.seq_len  # traced rows are as long as the longest; most are shorter
    (fixed, each), (again_fixed, again_each) = (np.sum(run.moved, axis=0) for run in (plain, again))
    moved = either(fixed, again_fixed) + either(each, again_each) * rows
    # Every pass reads the codes of a 4-bit weight and writes the weight (bitsandbytes 0.50, autograd/_functions.py, MatMul4Bit).
    quantized = quantized_sizes(job, trace)
    moved = moved + c.passes * sum(quantized) * (NF4_BYTES + job.element_bytes)
    moved = moved * np.where(c.fused_by_compiling, COMPILED_MOVED, 1.0)
    # Each pass reads the weights: of published jobs a GPU hides it, and on CPU ranks searches take fewer trials with it
    # (search/search.py, real tables).
    moved = moved + (device == "cpu") * either(*whole_pass) / job.seq_len * job.element_bytes / 2
    operators = either(sum(plain.operators), sum(again.operators)) * np.where(c.fused_by_compiling, COMPILED_STARTS, 1)
    hooks = _hooks(trace, c, device)
    apart = (c.stage == 3) & (device == "cuda")  # on CPU ranks the stage's own factor covers them
    mapped = (LARGEST_OF_LOSS * loss >= MAPPED_BYTES) & (device == "cpu")
    deepspeeds = device == "cuda" and not job.plain and not job.torch_alone
    per_tensor, per_part = _OF_DEEPSPEED if deepspeeds else _OF_TORCH
    step_operators = _STEP_OPERATORS + len(trace.parameters) * np.where(c.stage == 0, per_tensor, per_part)
    return StepWork(
        forward_share=either(_share(forward, whole_pass[0]), _share(forward, whole_pass[1])),
        recompute_share=either(0.0, 1 - _share(whole_pass[0], whole_pass[1])),
        products=either(*whole_pass) * rows,
        moved=moved + np.where(mapped, loss * CPU_MEMORY_GB_PER_S / TOUCHED_GB_PER_S, 0.0),
        starts=operators * OPERATOR_SECONDS + np.where(apart, 0.0, hooks),
        hooks=np.where(apart, hooks, 0.0),
        step_starts=step_operators * OPERATOR_SECONDS,
        **_sent(job, trace, c),
        **_stepped(job, trace, c, deepspeeds),
    )


def _share(part: float, whole: float) -> float:
    """Return a share of the whole; a model whose rows could not be counted shows no products at all."""
    return part / whole if whole else 1.0


def _sent(job: Job, trace: Trace, c: Columns) -> dict[str, Floats]:
    """Return the communication between ranks, as fields of StepWork.

    Stages 0 to 2 all-reduce buckets (use_multi_rank_bucket_allreduce), and stages 1 and 2 gather the updated weights. In
    every micro-batch, stage 3 gathers parameters for forward, frozen ones too. It gathers those that it has not kept again
    for backward, and scatters the gradients.
    """
    ranks, width, total = float(job.ranks), job.element_bytes, float(sum(trace.parameters))
    held, others = total + trace.frozen, (ranks - 1) / ranks
    one, two, three = c.stage == 1, c.stage == 2, c.stage == 3
    # Gradients use the dtype in which they are sent. Muon's are all-reduced at stage 3, too: `reduce_scatter` is off.
    scatters = three & (job.optimizer_kind != "muon")
    reduced = others * total * c.communicated * np.where(scatters, 1.0, 2.0)
    whole = persistent(trace, c)  # gathered after a step, and kept
    again = np.maximum(0.0, held - np.maximum(whole, kept_at_turn(c)))
    buckets = np.maximum(1.0, total / c.reduce_bucket) * np.where(two | three, c.accumulation, 1.0)
    gathers = np.where(three, c.accumulation * (held - whole + again) / np.maximum(c.prefetch, 1.0), 0.0)
    return {
        "gathered": np.where(three, others * width * (held - whole + again), 0.0),
        "step_gathered": others * width * np.select([one | two, three], [total, whole], 0.0),
        "reduced": np.where(two | three, reduced, 0.0),
        "step_reduced": np.where(two | three, 0.0, reduced),
        "collectives": (buckets + gathers) * (ranks > 1),
    }


def _stepped(job: Job, trace: Trace, c: Columns, deepspeeds: bool) -> dict[str, Floats]:
    """Return the optimizer's step and the traffic of offloading, as fields of StepWork."""
    width, states, total = job.element_bytes, optimizer_of_trials(job).state_bytes, float(sum(trace.parameters))
    part, held = total / job.ranks, (total + trace.frozen) / job.ranks
    one, two, three = c.stage == 1, c.stage == 2, c.stage == 3
    parameters_out = three & (c.offload_param > 0)
    leaves = (c.offload_optimizer > 0) * 1.0
    elements = np.where(c.stage == 0, total, part)
    # bytes per element: master and states read and written, gradient read, weight written
    step_bytes = 2 * np.where(c.master == 2, 2 + states * c.state_share, 4 + states) + 4 + 2 * width
    step_bytes = step_bytes + _GRADIENT_BYTES * deepspeeds  # CPU ranks: `calibration._CPU_QUIRKS`
    host_bytes = 2 * (c.master + states * c.state_share) + 4 + width
    back = np.where(two | three, width * part, 0.0)  # gradients leave the device every micro-batch
    accumulating = np.where(two & (c.accumulation > 1), 2.0, 1.0)  # stage 2 fetches the sum back to add to it
    return {
        "transferred": leaves * back * accumulating + np.where(parameters_out, 2 * width * held, 0.0),
        "step_transferred": leaves * (width * part + np.where(one, width * part, 0.0)),
        "optimizer": (1 - leaves) * elements * step_bytes,
        "cpu_adam": leaves * part * host_bytes,
        "nvme": (c.offload_optimizer == 2) * 2 * (4 + states) * part + (c.offload_param == 2) * 2 * width * held,
    }


def cores_of(hardware: Hardware) -> int | None:
    """Return the CPU cores of a node that its ranks compute with.

    Returns:
        None if they are unknown, as for a named GPU; and for CPU ranks, whose tables set `HOST_MEMORY_GB_PER_S`.
    """
    if hardware.device != "cuda" or (hardware.threads is None and not hardware.gpus):
        return None
    if hardware.threads is not None:
        return hardware.per_node * hardware.threads
    return min(usable_cpus(), hardware.per_node * threads_per_rank(hardware.per_node))


def _hooks(trace: Trace, c: Columns, device: str) -> Floats:
    """Return the processor's seconds in ZeRO's hooks in a micro-batch."""
    tensors = float(len(trace.parameters))
    adapters = np.where(c.lora > 0, 2 * tensors, 0.0)  # two trained tensors and four modules per adapter
    modules = MODULES_AN_OPERATOR * np.maximum(trace.plain.operators[0] - adapters, 0.0) + adapters
    seconds = MODULE_SECONDS if device == "cuda" else CPU_MODULE_SECONDS
    return np.select([c.stage == 3, c.stage > 0], [modules * c.passes * seconds, tensors * REDUCED_SECONDS], 0.0)


def seconds_by_part(w: StepWork, c: Columns, rates: DeviceRates, k: Mapping[str, Floats]) -> dict[str, Floats]:
    """Return the seconds of a step by part, which add up to the step.

    Args:
        k: factors on the time at full rates, (..., 1) each, from `predictor.rate_factors`; `hidden` is the share of
            communication that can overlap computation.
    """
    device = k["products"] * w.products / rates.flops + k["moved"] * w.moved / rates.kernels
    host = k["starts"] * (w.starts + k["hooks"] * w.hooks)

    def together(device: Floats) -> Floats:
        return _larger(device, host) if rates.queues else device + host

    compute = together(device)
    micro = k["comm"] * (w.gathered + k["reduce"] * w.reduced) / rates.link
    step = k["comm"] * (w.step_gathered + k["reduce"] * w.step_reduced) / rates.link
    hidden = k["hidden"] * (c.overlap > 0)  # at every stage; otherwise both use one stream
    # The GPU waits for this communication instead of computing. A processor slower than both hides it.
    waits = together(device + _exposed(micro, hidden, device)) - compute
    # ZeRO-3 prefetches and sends gradients on its own stream. ZeRO-2 waits for each gradient to add to it.
    transfers = _exposed(k["pcie"] * w.transferred / rates.pcie, hidden * (c.stage == 3), compute)
    total = device * c.accumulation
    return {
        "forward": total * w.forward_share,
        "backward": total * (1 - w.forward_share - w.recompute_share),
        "recompute": total * w.recompute_share,
        # Work that the device does not hide. The host reads the gradients' norm in the step, so nothing hides its work there.
        "host": (compute - device) * c.accumulation + k["starts"] * w.step_starts,
        # Communication that happens once a step overlaps the last backward. Gathering the updated weights does not.
        "communication": waits * c.accumulation
        + _exposed(step, 0.66 * hidden, compute)
        + k["collectives"] * w.collectives * BUCKET_SECONDS,
        "optimizer": k["optimizer"] * w.optimizer / rates.memory,
        "offload": transfers * c.accumulation
        + k["pcie"] * w.step_transferred / rates.pcie
        + k["cpu_adam"] * w.cpu_adam / rates.host
        + w.nvme / (NVME_GB_PER_S * 1e9),
        "loop": k["loop"] * c.accumulation * MICRO_SECONDS,
    }


def step_seconds(parts: Mapping[str, Floats]) -> Floats:
    """Return the seconds of a step from those of its parts."""
    return np.asarray(sum(parts.values()))


def _exposed(part: Floats, share: Floats, beside: Floats) -> Floats:
    """Return the seconds of `part` of which at most this share is hidden, behind at most this share of `beside`."""
    return np.maximum(part - share * beside, (1 - share) * part)


def _larger(a: Floats, b: Floats) -> Floats:
    """Return a smooth maximum: if the two are similar, neither hides all of the other."""
    return np.asarray(np.sqrt(np.sqrt(np.square(a**2) + np.square(b**2))))


def host_limit_bytes(hardware: Hardware) -> float:
    """Return the bytes that the ranks of one node together may offload to its host.

    The rest is for processes and their libraries: 2 GiB per rank, and at least 4 GiB.
    """
    own = max(4, 2 * hardware.per_node) * GIB
    return max(0.0, hardware.host_memory_bytes - own) if hardware.device == "cuda" else np.inf


# -- flops -------------------------------------------------------------------------------------------------------------
#
# FLOPs of a training step from the configuration alone.

Config = dict[str, Any]

# Architectures whose MLP has two matrices. All other architectures add a third as a gate.
_UNGATED = frozenset(
    (
        "gpt2 phi gpt_neox opt mpt bert roberta xlm-roberta camembert electra deberta deberta-v2 distilbert albert bart "
        "mbart blenderbot pegasus marian m2m_100 t5"
    ).split()
)
# Names of the same size in different families.
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "depth")
_HIDDEN = ("hidden_size", "n_embd", "d_model", "dim", "embed_dim")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads")
_INNER = ("intermediate_size", "n_inner", "hidden_dim", "d_ff", "encoder_ffn_dim")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_OVER_VOCABULARY = (*DECODED, MASKED, SEQ2SEQ)  # tasks with a head as wide as the vocabulary


def _first(config: Config, names: tuple[str, ...]) -> int | None:
    return next((config[name] for name in names if isinstance(config.get(name), int)), None)


def dense_shape(config: Config) -> tuple[int, int, int, int] | None:
    """Return (layers, attention width = heads x head size, vocabulary, hidden size) of a decoder or encoder.

    None if the keys are unknown.
    """
    text = text_config(config)
    layers, hidden, heads = _first(text, _LAYERS), _first(text, _HIDDEN), _first(text, _HEADS)
    vocabulary = text.get("vocab_size")
    if layers is None or hidden is None or heads is None or not isinstance(vocabulary, int):
        return None
    head = text.get("head_dim") or text.get("d_kv") or hidden // heads
    return layers, heads * head, vocabulary, hidden


def fsdp_settings(config: Config, elements: float) -> dict[str, float]:
    """Return the knobs of stage 3 with which the memory estimate describes FSDP2, wrapped block by block.

    Embedding and head are the root's own parameters. They stay whole from forward to backward, and the next block is
    gathered during each block (torch/distributed/fsdp: the root is not resharded; BackwardPrefetch.BACKWARD_PRE). A
    block's gradients are reduced together, out of a copy that is made when they are complete. Those of the root wait for
    the embedding's, so the head's gradient exists through all of backward. FSDP2 has no bucket of a fixed size.

    Args:
        config: the model's configuration. Without a number of blocks the whole model is one.
        elements: parameters of the model.
    """
    text = text_config(config)
    layers = [_first(text, _LAYERS) or 0, _first(text, ("decoder_layers", "num_decoder_layers")) or 0]
    ends = sum(table_sizes(config)) * (layers[0] > 0)
    block = max(1, int((elements - ends) / max(1, sum(layers))))
    zero = "zero_optimization.stage3_"
    return {
        "reduce_bucket_size": max(block, ends),
        "contiguous_gradients": False,
        zero + "prefetch_bucket_size": block,
        zero + "max_reuse_distance": ends + 2 * block,
        zero + "param_persistence_threshold": 0,
    }


def table_sizes(config: Config, task: str = CAUSAL) -> list[int]:
    """Return the elements of each table over the vocabulary: the embedding, and a head that is not tied to it.

    A configuration without `tie_word_embeddings` has the default of transformers' base class, a tied head.
    """
    text = text_config(config)
    own_head = task in _OVER_VOCABULARY and not text.get("tie_word_embeddings", True)
    return [int(text.get("vocab_size") or 0) * (_first(text, _HIDDEN) or 0)] * (1 + own_head)


def layer_parameters(config: Config, task: str = CAUSAL) -> int | None:
    """Return the parameters of all layers, every expert included; None for an unknown shape."""
    text = text_config(config)
    found = matmul_parameters({**text, "num_experts_per_tok": _first(text, _EXPERTS)}, task)
    return None if found is None else found - table_sizes(config)[0] * (task in _OVER_VOCABULARY)


def matmul_parameters(config: Config, task: str = CAUSAL) -> int | None:
    """Return the parameters in a matrix product for every token: all but the embedding look-up.

    Only the experts that a token uses count, and the head only if it is as wide as the vocabulary.
    """
    text = text_config(config)
    shape = dense_shape(config)
    if shape is None:
        return None
    layers, attention, vocabulary, hidden = shape
    heads = _first(text, _HEADS) or 1
    key_value = text.get("num_key_value_heads") or heads
    projections = hidden * attention * 2 + hidden * (attention // heads * key_value) * 2
    head = hidden * vocabulary * (task in _OVER_VOCABULARY) + hidden * hidden * (
        task == MASKED
    )  # a layer before a masked head
    return int(layers * projections + _mlp_parameters(text, hidden, layers) + head)


def _mlp_parameters(text: Config, hidden: int, layers: int) -> int:
    """Return the MLP parameters of all layers that one token uses."""
    inner = _first(text, _INNER) or 4 * hidden
    ungated = text.get("model_type") in _UNGATED
    matrices = 2 if ungated else 3
    dense = matrices * hidden * inner
    experts = _first(text, _EXPERTS)
    if not experts or not text.get("num_experts_per_tok"):
        return layers * dense
    of_expert = text.get("moe_intermediate_size") or inner
    shared = text.get("shared_expert_intermediate_size") or (text.get("n_shared_experts") or 0) * of_expert
    routed = matrices * hidden * (text["num_experts_per_tok"] * of_expert + shared) + hidden * experts
    step = text.get("decoder_sparse_step") or 1
    without = set(text.get("mlp_only_layers") or ()) | set(range(text.get("first_k_dense_replace") or 0))
    sparse = sum(1 for layer in range(layers) if layer not in without and (layer + 1) % step == 0)
    return int(sparse * routed + (layers - sparse) * dense)


def model_flops_per_token(job: Job) -> float | None:
    """Return the FLOPs of forward and backward per token.

    6 x matmul parameters + 12 x layers x attention width x sequence (Chowdhery et al. 2022, PaLM, appendix B).

    Recomputation is not counted. Frozen weights take 4 instead of 6, as they have no gradients. None for an unknown shape, and
    for models of two stacks: encoder-decoders, and those with an image tower.
    """
    shape, parameters = dense_shape(job.model.config), matmul_parameters(job.model.config, job.task)
    if shape is None or parameters is None or job.task in (SEQ2SEQ, IMAGE_TEXT):
        return None
    layers, attention, _, _ = shape
    return (6.0 - 2.0 * bool(job.lora)) * parameters + 12.0 * layers * attention * job.seq_len


# -- startup -----------------------------------------------------------------------------------------------------------
#
# Estimate an engine's start time from its size alone. Limits use it, so it errs on the generous side; candidates are
# not ranked by it.

# Slow ends of the observed rates, not typical values: one core that fills random weights, or a disk that they are
# read from; pages that the kernel zeroes and cudaHostAlloc pins (1 to 3 GB/s per node); a swap file on a slow NVMe
# disk; NCCL's first rendezvous.
INITIALISED_PER_SECOND = 100e6  # parameters
PINNED_BYTES_PER_SECOND = 1e9  # all ranks together
SWAPPED_BYTES_PER_SECOND = 0.5e9
SECONDS_PER_RANK = 0.5
_OPTIMIZER_BYTES = 16  # fp32 weights, gradients and two moments of a parameter
_WEIGHT_BYTES = 2


def parameter_count(job: Job) -> int:
    """Return the parameters of the job's model, frozen ones included; 0 if unknown."""
    if job.profile.trained:
        return sum(job.profile.trained) + job.profile.frozen
    if job.model.parameters:
        return job.model.parameters
    layers = layer_parameters(job.model.config, job.task)
    return 0 if layers is None else layers + sum(table_sizes(job.model.config, job.task))


def size_seconds(job: Job, candidate: Candidate) -> float:
    """Return the seconds that the candidate's engine needs to start because of its size.

    Importing and connecting are not included.
    """
    parameters = parameter_count(job)
    seconds = parameters / INITIALISED_PER_SECOND + SECONDS_PER_RANK * job.ranks
    for place, element_bytes in (
        (candidate.offload_optimizer, _OPTIMIZER_BYTES),
        (candidate.offload_param, _WEIGHT_BYTES),
    ):
        rate = {"cpu": PINNED_BYTES_PER_SECOND, "nvme": SWAPPED_BYTES_PER_SECOND}.get(place, np.inf)
        seconds += parameters * element_bytes / rate
    return seconds
