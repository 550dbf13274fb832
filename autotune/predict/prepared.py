"""The parts of many predictions that do not depend on the calibration, computed once."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autotune.predict.constants import MEMORY, QUIRKS, SHARDED, UNREAD_STATES, UNTRACED
from autotune.predict.knobs import Columns, Flags, Floats, Places, columns_of
from autotune.predict.optimizers import stepper
from autotune.predict.passes import Trace
from autotune.predict.roofline import Work, work
from autotune.predict.uneven import uneven_shares
from autotune.predict.unread import unread_knobs
from autotune.predict.versions import installed_deepspeed
from autotune.predict.zero import SUMS, TABLES, Bill, bill
from autotune.problem.candidate import Candidate
from autotune.problem.hardware import Hardware
from autotune.problem.job import Job


@dataclass
class Prepared:
    """The parts of many predictions that do not depend on the calibration; one entry or row per candidate, in their order."""

    columns: Columns
    bill: Bill
    work: Work
    quirks: Floats  # (n, quirks)
    features: Floats  # (n, features)
    doubt: Floats  # (n,) bytes: standard deviation of peaks that no constant covers
    uneven: Floats  # (n,) share of the activations that batches of many lengths leave behind

    @classmethod
    def of(
        cls, job: Job, hardware: Hardware, trace: Trace, candidates: Sequence[Candidate], *, guessed: bool = False
    ) -> Prepared:
        """Prepare candidates that share this trace. `guessed`: the trace is an estimate, while the job's own is exact."""
        c = columns_of(candidates, job, installed_deepspeed())
        b = bill(job, trace, c, hardware.device)
        uneven, spread = uneven_shares(job, c, b.activations.max(axis=0))
        doubt = doubt_of(b, c, candidates, job.ranks, guessed, spread)
        features = np.hstack([features_of(c), np.tile(job_features(job, hardware, trace), (len(candidates), 1))])
        return cls(c, b, work(job, hardware, trace, c), quirks_of(c, hardware.nodes), features, doubt, uneven)

    @classmethod
    def joined(cls, parts: list[Prepared], at: list[list[int]]) -> Prepared:
        """Join parts with different traces; `at` holds the indices of each part's candidates."""
        order = np.argsort(np.concatenate([np.array(places) for places in at]))

        def beside(whole: list[Any], names: Sequence[str]) -> dict[str, Any]:
            return {name: np.concatenate([getattr(one, name) for one in whole])[order] for name in names}

        def joined(whole: list[Any]) -> Any:
            kind = type(whole[0])
            return kind(**beside(whole, [field.name for field in dataclasses.fields(kind)]))

        bills = [part.bill for part in parts]
        moments = tuple(name for one in bills for name in one.moments)  # each part has its own moments
        tables = {name: _diagonal([getattr(one, name) for one in bills])[:, order] for name in TABLES}
        return cls(
            joined([part.columns for part in parts]),
            Bill(moments=moments, **beside(bills, SUMS), **tables),
            joined([part.work for part in parts]),
            **beside(parts, ("quirks", "features", "doubt", "uneven")),
        )

    def rows(self, chosen: Flags | Places) -> Prepared:
        """Select the candidates where `chosen` is true, or at these indices."""
        columns = Columns(**{name: value[chosen] for name, value in vars(self.columns).items()})
        w = Work(**{name: value[chosen] for name, value in vars(self.work).items()})
        sums = {name: getattr(self.bill, name)[chosen] for name in SUMS}
        tables = {name: getattr(self.bill, name)[:, chosen] for name in TABLES}
        b = dataclasses.replace(self.bill, **sums, **tables)
        beside = (self.quirks[chosen], self.features[chosen], self.doubt[chosen], self.uneven[chosen])
        return Prepared(columns, b, w, *beside)


def _diagonal(tables: list[Floats]) -> Floats:
    """Build one table with these along its diagonal and zeros elsewhere."""
    found = np.zeros((sum(len(one) for one in tables), sum(one.shape[1] for one in tables)))
    row = column = 0
    for one in tables:
        found[row : row + len(one), column : column + one.shape[1]] = one
        row, column = row + len(one), column + one.shape[1]
    return found


def doubt_of(b: Bill, c: Columns, candidates: Sequence[Candidate], ranks: int, guessed: bool, uneven: Floats) -> Floats:
    """Return (n,) bytes of uncertainty in the peaks.

    Sources are keys that no formula reads, states shared among ranks, guessed traces, and batches of many lengths. The order
    of such batches decides what they leave behind; `uneven` is its deviation as a share of activations.
    """
    unread = np.array([bool(unread_knobs(candidate)) for candidate in candidates])
    of_states = np.where(unread, UNREAD_STATES * (b.parameters + b.gradients + b.optimizer), 0.0)
    shared = b.gradients + b.optimizer + (b.buckets + b.gathered + b.temporaries).max(axis=0)
    of_shares = SHARDED * shared * ((c.stage > 0) & (ranks > 1))
    of_activations = np.hypot(UNTRACED * MEMORY["activations"].sigma * guessed, uneven) * b.activations.max(axis=0)
    return np.asarray(np.sqrt(of_states**2 + of_shares**2 + of_activations**2))


def quirks_of(c: Columns, nodes: int = 1) -> Floats:
    """Return (n, quirks): the extent to which each of `constants.QUIRKS` applies to each candidate, in their order."""
    zero = c.stage > 0
    columns = {
        "machine": np.ones(len(c)),
        "stage1": c.stage == 1,
        "stage2": c.stage == 2,
        "stage3": c.stage == 3,
        "checkpointed": c.checkpointing,
        "offloaded": c.offload_optimizer > 0,
        "parameters out": c.offload_param > 0,
        "overlapped": (c.overlap > 0) & zero,
        "micro-batch": np.log2(c.micro_batch) - 2,
        "bucket": np.where(zero, np.log10(c.reduce_bucket / 5e8), 0.0),
        "sub-group": np.where(c.stage == 3, np.log10(c.sub_group / 1e9), 0.0),
        "contiguous": (c.contiguous > 0) & zero,
        "compiled": c.compiled,
        "adapted": c.lora > 0,
        "packed": c.packed,
        "nodes": np.full(len(c), np.log2(nodes)),
    }
    rows: Floats = np.array([columns[name] for name in QUIRKS], dtype=np.float64)
    return np.asarray(rows.T)


def job_features(job: Job, hardware: Hardware, trace: Trace) -> Floats:
    """Return (job features,): their distance measures the similarity of two jobs and machines. They are equal within a study
    and change no distance there."""
    elements = max(sum(trace.parameters) + trace.frozen, 1)
    sizes = [0.5 * np.log2(elements), 0.3 * np.log2(job.seq_len), 0.3 * np.log2(job.ranks)]
    facts = hardware.gpu_facts
    card = 1.5 * np.log2(facts.tflops) if facts else 0.0
    return np.array([*sizes, card, job.element_bytes, 2.0 * bool(job.autocast), 0.3 * stepper(job).state_bytes])


def features_of(c: Columns) -> Floats:
    """Return (n, features): the distance between two rows measures the similarity of two candidates."""
    zero = c.stage > 0
    columns = [
        1.5 * (c.stage == 0),
        1.5 * (c.stage == 1),
        1.5 * (c.stage == 2),
        1.5 * (c.stage == 3),
        c.checkpointing,
        1.5 * (c.offload_optimizer > 0),
        1.5 * (c.offload_param > 0),
        0.7 * c.overlap * zero,
        0.4 * c.contiguous * zero,
        0.5 * np.log2(c.micro_batch),
        0.3 * np.log2(c.accumulation),
        np.where(zero, 0.3 * np.log10(c.reduce_bucket), 0.0),
        np.where(c.stage == 3, 0.2 * np.log10(c.sub_group), 0.0),
        3.0 * c.attention,
        1.5 * c.compiled,
        1.5 * (c.lora > 0),
        0.2 * np.log2(1 + c.lora),
        1.5 * c.packed,
        1.5 * c.liger,
    ]
    rows: Floats = np.array(columns, dtype=np.float64)
    return np.asarray(rows.T)
