"""First, unmodified run of a user's script, and the check that it honours a batch size."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from autotune.commands.setup import FREE, Setup
from autotune.errors import MachineError, NoWinner, ScriptFails, Stopped, UserError
from autotune.executors.base import Executor, MeasureSpec
from autotune.executors.machine import op_name
from autotune.problem.candidate import ACCUMULATION, CHECKPOINTING, MICRO_BATCH, Candidate, Value
from autotune.problem.faults import own_facts, warnings
from autotune.problem.job import Job, Script, ScriptProfile
from autotune.problem.knobs import RequirementInputs, steps_on_gpu
from autotune.problem.outcome import Limit, Outcome, OutcomeKind, Source
from autotune.problem.space import SearchSpace, fitted
from autotune.problem.training_trace import TrainingTrace
from autotune.results.console import larger_budget, startup_used_all, throughput_text
from autotune.script.argument_files import argument_names, integers_in_words, own_files
from autotune.script.argument_writer import integers_in_files, with_argument_files
from autotune.script.carriers import OF_A_BATCH, STEP, carrier_of, own_numbers, place_in_file, with_profile
from autotune.script.environment import READ, READ_INTEGERS, VARIABLE, own_variables
from autotune.script.profile import (
    RAN,
    TOKENS,
    UNCOUNTED,
    UNCOUNTED_BESIDE,
    batch_held,
    batch_seen,
    growth_line,
    job_of,
    own_candidate,
    own_samples,
    unheeded_accumulation,
)
from autotune.script.recorded import is_data
from autotune.script.script import LOCAL_RANK_FLAGS, carries_knob, with_flag
from autotune.script.source_digests import MEMORY, SOURCES, digests, stored_findings
from autotune.search.certificate import Verdict, compare, with_noise
from autotune.util.files import write_atomically
from autotune.util.units import format_bytes, format_duration
from autotune.workers.failure_classifier import UNEQUAL_COLLECTIVES, log_tail

MEASURE_SPEC = MeasureSpec(full=True, min_steps=4, max_steps=8, min_seconds=2.0, max_seconds=60.0)
LEAST_STEPS = 3  # two warm-up steps and a measured one, to which the share of the budget cuts the first run
MEASURED_SHARE = 0.25  # share of the budget after which the first run ends, if it has LEAST_STEPS
FIRST_SHARE = 0.95  # share of the budget, at most, for the first run; the next call goes on from a measured one
# Share of the budget left after the first run, at most, for the runs that follow it. The rest then holds a trial, which takes
# longer than one of them, and its verification.
SHORT_RUNS_SHARE = 1 / 3
# after two warm-up steps, all that a trace records
_TRACED_STEPS = MeasureSpec(min_steps=3, max_steps=3, min_seconds=0.0)
# Settings for a script that runs out of memory unmodified, so that some of its facts can still be learnt.
_LEAST_MEMORY: dict[str, Value] = {
    "zero_stage": 3,
    MICRO_BATCH: 1,
    ACCUMULATION: 1,
    "offload_optimizer": "cpu",
    "offload_param": "cpu",
    CHECKPOINTING: True,
    "reduce_bucket_size": 1_000_000,
    "sub_group_size": 10_000_000,
}
# accept the script's own optimizer
_ANY_OPTIMIZER = {"zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True}

# causes that need no traceback, by a pattern to search in the exceptions' types, the reason and its evidence
_CAUSES = {
    r"EOF when reading a line": "asks for input, and ranks have nobody to ask: give the answer as an argument",
    r"^bdb\.BdbQuit": "stops at a breakpoint, and ranks have nobody to ask: take it out",
    r"Address already in use|EADDRINUSE": (
        "opens a port that is taken, by itself, another of its ranks or another process: open it once, on one rank alone, or "
        "a free one (port 0) on each"
    ),
    re.escape(UNEQUAL_COLLECTIVES): "fails by itself, before anything is tuned",
    r"^builtins\.FileNotFoundError": "reads what is not there, as seen from the folder in which you call autotune",
    r"^(urllib\.error\.URLError|socket\.gaierror|builtins\.Connection\w+|(requests|httpx|httpcore)\.\S*Connect\w+)": (
        "cannot reach what it reads over the network: put it on this machine"
    ),
}

# file in a study's folder: a measured first run, before the checks that follow it
_UNFINISHED = "probe-unfinished.json"
_OWN_STEPS = "own_steps"  # key of facts: a run with minimal memory had the script's own batch


@dataclass(frozen=True)
class Probe:
    """Findings of a probe run."""

    script: Script  # includes its profile
    baseline: Outcome | None  # measurement of the script's config; None if that ran out of memory
    kept: str = ""  # text to store in the study's folder; empty if it was loaded from there
    ran_out: Outcome | None = None  # OOM of the script's config, if its batch was known by then


class StartupDeadline:
    """End of the budget during start-up: imports, a script's probe run, the trace. A search keeps its own `Budget`.

    Args:
        seconds: budget of the call, without builds of DeepSpeed's ops.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._clock: tuple[Executor, float] | None = None  # the executor, and its time at the start
        self._starting = True

    def begin(self, executor: Executor, began: float) -> None:
        """Start at a time of the executor's clock."""
        self._clock = executor, began

    @property
    def left_seconds(self) -> float:
        """Return the seconds that are left, all of them before `begin`."""
        if self._clock is None:
            return self.seconds
        executor, began = self._clock
        return self.seconds - (executor.now() - began - executor.ops.all_build_seconds)

    @property
    def passed(self) -> bool:
        """Return True if the budget is used."""
        return self.left_seconds <= 0

    @property
    def ends_startup(self) -> bool:
        """Return True if the start-up must end because the budget is used."""
        return self._starting and self.passed

    def end_startup(self) -> None:
        """Leave the rest of the budget to the search."""
        self._starting = False

    @contextmanager
    def ended(self, *, without_trial: bool) -> Iterator[None]:
        """Suppress `Stopped` if the deadline ended the work, so that the search ends as one without time.

        Args:
            without_trial: raise NoWinner in its place.

        Raises:
            NoWinner: the deadline ended work without which there is no trial.
        """
        try:
            yield
        except Stopped:
            if not self.ends_startup:
                raise
            if without_trial:
                raise NoWinner(startup_used_all(self.seconds, self.seconds)) from None


def probe(
    executor: Executor, script: Script, folder: Path, budget: StartupDeadline, print_line: Callable[[str], None]
) -> Probe:
    """Run the script unchanged for a few steps, or load the findings of an earlier call on the same files (`remember`).

    Args:
        folder: holds the findings.
        budget: of the call.
        print_line: receives lines for display.

    Raises:
        UserError: it never calls DeepSpeed, ends too early, or fails by itself; the message ends with its own traceback.
        MachineError: the machine failed in the first run.
        Stopped: the user stopped the tuner.
    """
    key = f"{script.key}-{executor.hardware.device}-{executor.hardware.count}-{executor.hardware.limit_bytes}"
    if known := _stored(folder / MEMORY, key, script):
        facts, baseline, ran_out = known
        return Probe(_mapped(script, ScriptProfile.from_json(facts)), baseline, ran_out=ran_out)
    facts, baseline, _ = _stored(folder / _UNFINISHED, key, script) or ({}, None, None)
    if baseline is not None and baseline.measurement is not None:
        print_line(f"{script.name} as it is, from an earlier call: {throughput_text(baseline.measurement)}")
    else:
        print_line(f"running {script.name} without changes, to learn what it trains")
        left_seconds = budget.left_seconds
        baseline, facts = _run_with_ops(executor, Candidate(()), "probe", left_seconds)
        _refuse_unless_run(executor, baseline, facts, left_seconds, budget)
        if grows := facts.get("grows"):
            _, last, longest = grows
            facts["grows"] = grows[:2]
            if longest > last:  # forwards are padded to the length of the data
                padded = replace(script, profile=ScriptProfile(pads_to=longest))
                job = replace(executor.job, script=padded)
                longer, found = _run_with_ops(executor, Candidate(()), "probe-last-length", budget.left_seconds, job)
                if longer.ok:
                    baseline, facts = longer, {**found, "pads_to": longest, "grows": grows}
            print_line(growth_line(facts["grows"]))
    try:
        return _checked(executor, script, baseline, facts, key, budget, print_line)
    except Stopped:
        if baseline.measurement is not None:
            kept = {"key": key, "baseline": baseline.to_json(), "facts": facts, SOURCES: _sources(script, facts)}
            kept[READ] = own_variables(facts.get(READ, {}))
            write_atomically(folder / _UNFINISHED, json.dumps(kept, indent=1), private=True)
            print_line(
                f"{script.name} as it is: {throughput_text(baseline.measurement)}; kept, and the same command goes on from there"
            )
        raise


def _stored(path: Path, key: str, script: Script) -> tuple[dict[str, Any], Outcome | None, Outcome | None] | None:
    """Return the profile or facts of a stored first run, its measurement and its OOM; None if there is none to use."""
    known = stored_findings(path)
    if not known.hold(key, script.cwd):
        return None
    facts = known.data.get("profile") or known.data["facts"]
    outcomes = [one and Outcome.from_json(one) for one in map(known.data.get, ("baseline", "ran_out"))]
    return (facts, *outcomes) if is_data(ScriptProfile.from_json(facts), script) else None


def _checked(
    executor: Executor,
    script: Script,
    baseline: Outcome,
    facts: dict[str, Any],
    key: str,
    budget: StartupDeadline,
    print_line: Callable[[str], None],
) -> Probe:
    """Return the findings of a first run, and of the runs that follow it: flags, another batch, noise."""
    measured: Outcome | None = baseline
    ran_out: Outcome | None = None
    if baseline.kind.is_oom:
        print_line(f"the unmodified script does not fit ({baseline.reason}); trying the config with the least memory")
        found = _run_with_least_memory(executor, script, facts, budget)
        measured = None
        if "micro_batch" in facts:
            ran_out = baseline
        else:
            print_line("the script ran out of memory before its batch was known: give it as --global-batch-size")
        facts = {**found, **facts}
    for one in facts.get("largest", {}).values():
        which = f"sample {one['index']} is the largest" if one["bytes"] else "no sample is larger than another"
        print_line(f"--worst-case: {which} ({script.name} has {one['samples']} samples, {one['read']} were read)")
    if facts.get("largest") == {}:
        print_line(f"--worst-case: no sample could be read by number ({facts['unread']}); batches are only padded")
    if late := facts.get("late"):
        print_line(late)
    if named := ", ".join(sorted(facts.get("variables", {}))):
        print_line(f"{script.name} sets {named} in its code: ranks start with it now")
    facts = {**facts, READ: own_variables(facts.get(READ, {})), SOURCES: _sources(script, facts)}
    facts["said"] = _script_batch_sizes(script, facts)
    own = measured is not None or facts.get(_OWN_STEPS, False)
    profile = _profile(facts, own=own)
    if profile.evaluating:
        print_line(
            f"{script.name} trains its model in evaluation mode (no model.train()): dropout and checkpointing do nothing"
        )
    elif profile.checkpointed and not profile.checkpointing:
        print_line("the script's activation checkpointing cannot be switched off and stays on")
    runs = ShortRuns(executor, SHORT_RUNS_SHARE * budget.left_seconds, measured)
    if measured is not None and not runs.left:
        print_line(
            f"no time is left to run {script.name} with another batch ({format_duration(runs.expected_seconds())}), so each "
            "trial checks its own batch"
        )
    unheeded = unheeded_accumulation(facts, profile, executor.hardware.count) if own else ""
    if measured is not None and not unheeded:
        profile = carriers_found(runs, replace(script, profile=profile), facts)
        for line in _found_lines(profile):
            print_line(line)
    else:
        why = unheeded or "its own batch does not fit"
        profile = replace(profile, attempts=(f"no flag or variable was tried: {why}",))
    trace = _with_noise(runs, script, profile, measured.trace) if measured is not None else None
    # a tensor is counted by name if steps have other rows each, and another loss
    reference = None if profile.counted_by else trace
    least = least_memory_candidate(facts.get("optimizer", ""), executor.hardware.device) if measured is None else None
    note = unheeded or check_batch(runs, _mapped(script, profile), reference, least)
    if note:
        print_line(f"{note}; its batch is kept, and everything else is tuned")
        profile = replace(_profile(facts, own=own, note=note), attempts=profile.attempts)
    if measured is None or runs.names_same_seeds:
        profile = replace(profile, seeds=())
    mapped = _mapped(script, profile)
    if measured is not None:
        if runs.repeats_seeds:
            print_line(f"{script.name} has other seeds in each run: trials repeat those of its first run")
        measured = replace(_counted_as(measured, mapped, executor.hardware.count), trace=trace)
    outcomes = {"baseline": measured and measured.to_json(), "ran_out": ran_out and ran_out.to_json()}
    kept = {"key": key, "profile": profile.to_json(), **outcomes}
    return Probe(mapped, measured, json.dumps(kept, indent=1), ran_out)


def _sources(script: Script, facts: dict[str, Any]) -> dict[str, str]:
    """Return the digests of the script's file and of those that it was seen to use."""
    return digests([*filter(None, [script.path]), *facts.get(SOURCES, ())], script.cwd)


def _mapped(script: Script, profile: ScriptProfile) -> Script:
    """Return the script with its profile, and with the flags and files that were found to carry knobs."""
    return with_argument_files(with_profile(script, profile))


def remember(probed: Probe, folder: Path) -> None:
    """Store a script's findings in a study's folder.

    This happens after the study accepted them, so that a refusal changes nothing.
    """
    if probed.kept:
        write_atomically(folder / MEMORY, probed.kept, private=True)
        (folder / _UNFINISHED).unlink(missing_ok=True)


def _run_with_least_memory(
    executor: Executor, script: Script, facts: dict[str, Any], budget: StartupDeadline
) -> dict[str, Any]:
    """Return the facts of a script that runs out of memory unmodified, from a run with minimal memory.

    A script that takes its batch from elsewhere than its config cannot have one sample a step yet, and keeps its own batch.

    Raises:
        UserError: it runs out of memory there too.
    """
    job = replace(executor.job, base_config=_ANY_OPTIMIZER)
    candidate = least_memory_candidate(facts.get("optimizer", ""), executor.hardware.device)
    executor.load_ops([candidate], job=job)
    left_seconds = budget.left_seconds
    outcome, found = _run_with_ops(executor, candidate, "probe-least-memory", left_seconds, job)
    if outcome.source is Source.BATCH and "micro_batch" in facts:
        own = {MICRO_BATCH: facts["micro_batch"], ACCUMULATION: facts["accumulation"]}
        left_seconds = budget.left_seconds
        outcome, found = _run_with_ops(executor, candidate.but(**own), "probe-least-memory-2", left_seconds, job)
        found |= {_OWN_STEPS: True}
    _refuse_unless_run(executor, outcome, found, left_seconds, budget)
    if not outcome.ok:
        raise UserError(f"{script.name} does not fit, even with the config of the least memory: {outcome.reason}")
    return found


def least_memory_candidate(optimizer: str, device: str) -> Candidate:
    """Return the candidate with the least memory under which a script with this optimizer can run."""
    stays = {"offload_optimizer"} if device == "cuda" and steps_on_gpu(optimizer) else set()
    return Candidate.of({name: value for name, value in _LEAST_MEMORY.items() if name not in stays})


def _script_batch_sizes(script: Script, facts: dict[str, Any]) -> dict[str, list[int]]:
    """Return by knob the script's own batch sizes outside its config: from words, files, arguments and loaders."""
    found, integers = {}, _integers(script, facts)
    for knob in (MICRO_BATCH, ACCUMULATION):
        places = [place_in_file(script, file.data, knob) or () for file in own_files(script)]
        names = [dict(script.flags).get(knob, ""), *(".".join(place) for place in places)]
        said = [integers[name] for name in names if name in integers]
        found[knob] = [*said, *facts.get("said", {}).get(knob, ())]
    return found


def _with_noise(
    runs: ShortRuns, script: Script, profile: ScriptProfile, trace: TrainingTrace | None
) -> TrainingTrace | None:
    """Return the probe run's trace with the noise of its script.

    A second run of the same config draws other random numbers from its first forward on (dropout, noise). It is left
    out for a script that draws none there.
    """
    if trace is None or not trace.draws or not runs.holds(1.0):
        return trace
    seen = ScriptProfile(seeds=profile.seeds, largest=profile.largest, pads_to=profile.pads_to)
    job = replace(runs.executor.job, script=replace(script, profile=seen))
    again, _ = runs.run(Candidate(()), "probe-noise", job, reseed=True)
    return with_noise(trace, again.trace) if again.trace else trace


def _counted_as(baseline: Outcome, script: Script, ranks: int) -> Outcome:
    """Return the script's own speed in samples as trials count them; it was measured in the config's samples."""
    if baseline.measurement is None:
        return baseline
    samples = own_samples(script, ranks) * script.profile.accumulated_by_hand
    speed = samples / baseline.measurement.step_seconds
    return replace(baseline, measurement=replace(baseline.measurement, samples_per_second=speed))


def _run_with_ops(
    executor: Executor, candidate: Candidate, name: str, left_seconds: float, job: Job | None = None
) -> tuple[Outcome, dict[str, Any]]:
    """Return the outcome and facts of a run in its share of the budget. Each missing op is built first."""
    spec = replace(MEASURE_SPEC, share_seconds=MEASURED_SHARE * left_seconds)
    until, ops = executor.now() + FIRST_SHARE * left_seconds, list[str]()
    while True:
        began = executor.now()
        with closing(executor.session(candidate, name, job=job)) as session:
            outcome = session.measure(candidate, spec, until - began)
        if not session.missing_op or session.missing_op in executor.tried_ops:
            break
        building = executor.now()
        executor.load_ops([], session.missing_op, job=job)
        # Builds do not use up the time of the starts, and neither does the first failed start.
        until += executor.now() - (building if ops else began)
        ops.append(session.missing_op)
    found = {"ops": [op for op in ops if op not in executor.ops.failed]} if outcome.ok or outcome.kind.is_oom else {}
    return outcome, {**session.facts, **found}


_NOT_BUILT = re.compile("building extension|JIT load|cannot link ops")  # torch's, DeepSpeed's and that of jit_ops


def _refuse_unless_run(
    executor: Executor, outcome: Outcome, facts: dict[str, Any], left_seconds: float, budget: StartupDeadline
) -> None:
    """Refuse a script whose run failed otherwise than by its memory.

    Args:
        facts: report of the run; empty if it has not called `deepspeed.initialize`.
        left_seconds: budget that was left at its start.

    Raises:
        ScriptFails: with the reason, and the end of its log.
        UserError: with the reason and the fix in one line.
        MachineError: the machine failed, such as a node or a disk, or another process took the GPU's memory.
        Stopped: the user stopped the tuner.
    """
    if outcome.ok or outcome.kind.is_oom:
        return
    assert executor.job.script is not None
    if outcome.kind is OutcomeKind.INTERRUPTED and outcome.source is Source.STOP:
        raise Stopped("stopped before the script was measured")
    failed = sorted(executor.ops.failed)
    if failed and _NOT_BUILT.search(outcome.reason):
        ops = ", ".join(f"DeepSpeed's {op_name(op)} ({executor.ops.failed[op]})" for op in failed)
        raise MachineError(
            f"the script needs an op that cannot be built: {ops}; `autotune doctor` says what is missing"
        )
    longer = _longer(facts.get(RAN), left_seconds, budget.seconds)
    if why := _in_one_line(outcome, executor.job.script.target, longer, reached=bool(facts)):
        raise UserError(why)
    if outcome.kind is OutcomeKind.INTERRUPTED:
        more = f": {longer}" if outcome.source is Source.BUDGET else ""
        raise UserError(f"{outcome.reason}, before the script was measured{more}")
    log = f"{outcome.log}/rank{outcome.rank or 0}.log"
    said = log_tail(Path(log)).strip()
    lines = [line for line in said.splitlines() if line.strip(" ~^")]  # Python marks a part of the line above
    tail = "\n".join(f"  {line}" for line in lines[-12:])
    if not outcome.kind.is_attributable_to_candidate:
        raise MachineError(
            f"the machine failed before the script was measured ({outcome.reason}):\n{tail}\n  log: {log}"
        )
    limits = _limits(outcome, executor.hardware.limit_bytes)
    who = "the script fails by itself" if not limits else "the script fails"
    raise ScriptFails(f"{who}, before anything is tuned ({outcome.reason}){limits}:\n{tail}\n  log: {log}")


def _longer(ran: dict[str, float] | None, left_seconds: float, budget_seconds: float) -> str:
    """Return which budget to try after a first run that its share of the budget ended.

    After what was used before this run, half of that budget goes to it, and the rest to candidates.

    Args:
        ran: seconds of its start and of an optimizer step so far; None if none of its micro-batches ended.
        left_seconds: budget that was left at its start.
        budget_seconds: budget of the call.
    """
    before_seconds = budget_seconds - left_seconds
    if ran is None:
        return f"use {larger_budget(before_seconds + 2 * left_seconds)}"
    needed = ran["start_seconds"] + LEAST_STEPS * ran["step_seconds"]
    return (
        f"a step takes about {format_duration(ran['step_seconds'])}, and the first run about {format_duration(needed)}; use "
        f"{larger_budget(before_seconds + max(2 * needed, 1.5 * left_seconds))}"
    )


_NEAR_CAP = 0.7  # share of the cap from which a rank's peak may have reached it between two samples


def _limits(outcome: Outcome, cap_bytes: int | None) -> str:
    """Return which limit of autotune may have made a script fail, and the remedy; empty if none can have."""
    found = []
    if cap_bytes is not None:
        near = outcome.peak_bytes is None or outcome.peak_bytes >= _NEAR_CAP * cap_bytes
        if near or not outcome.exceptions or Limit.MEMORY_CAP in outcome.limits:
            cap = format_bytes(cap_bytes)
            remedy = "raise --memory-cap or lower --reserve, or leave it out"
            found.append(f"the cap of {cap} a rank may be the cause: {remedy}")
    if Limit.SANDBOX in outcome.limits:
        found.append("the protection of your files may be the cause: run it on a copy of the folder with --unprotected")
    return "".join(f"; {one}" for one in found)


def _in_one_line(outcome: Outcome, target: str, longer: str, reached: bool) -> str:
    """Return the error and its fix in one line if the cause is known without a traceback, else an empty text.

    Args:
        longer: which budget to try if the script needs more time.
        reached: it has called `deepspeed.initialize`.
    """
    log = f"log: {outcome.log}/rank{outcome.rank or 0}.log"
    told = "\n".join([*outcome.exceptions, outcome.reason, outcome.evidence])
    for pattern, cause in _CAUSES.items():
        if re.search(pattern, told, re.MULTILINE):
            return f"{target} {cause} ({outcome.reason}; {log})"
    late = outcome.kind is OutcomeKind.TIMEOUT or (
        outcome.kind is OutcomeKind.INTERRUPTED and outcome.source is Source.BUDGET
    )
    if late and not reached:
        return (
            f"{target} had not called deepspeed.initialize after {format_duration(outcome.seconds)}: autotune tunes scripts "
            "that train with DeepSpeed, Trainer or accelerate included; if it only prepares its data for so long, "
            f"{longer} ({log})"
        )
    return ""


def _profile(facts: dict[str, Any], *, own: bool, note: str = "") -> ScriptProfile:
    """Return the findings to store, per sample of the micro-batch instead of per batch.

    Args:
        own: these are the script's own steps. Otherwise they had one sample, and its own are unknown.
        note: reason for which its batch is kept. No flag carries it then.
    """
    seen = facts if own else {**facts, "micro_batch": 1, "accumulation": 1, "said": {}}
    made = ScriptProfile.from_json({**facts, **(batch_held(seen) if note else batch_seen(seen)), "batch_note": note})
    samples = made.micro_batch * made.accumulation * made.accumulated_by_hand
    per_row = made.micro_batch if made.counted == TOKENS else 1
    made = replace(
        made,
        seq_len=max(1, int(facts.get("widest", 1)) // per_row),
        tokens_per_sample=facts.get("tokens", samples) / samples,
        saved_bytes_per_sample=facts.get("saved_bytes", 0) / made.micro_batch if made.counted else 0.0,
    )
    if made.evaluating:  # transformers' layers do not checkpoint in evaluation mode
        made = replace(made, checkpointing=False, checkpointed=False)
    if own:
        return made
    micro_batch, accumulation = facts["micro_batch"], facts["accumulation"]
    times = 0 if note else micro_batch * accumulation  # rows of the script's own steps were not counted
    beside = {number: rows * times for number, rows in made.beside.items()}
    return replace(made, micro_batch=micro_batch, accumulation=accumulation, beside=beside, held={})


def after_probe(setup: Setup, probed: Probe) -> Setup:
    """Return the setup of a script after its probe run: its real job, and the remaining space and candidates."""
    free = setup.request.global_batch_size == FREE
    job = job_of(probed.script, setup.hardware, setup.global_batch_size, free=free).called_like(setup.job)
    space, notes = fitted(setup.space, job, setup.hardware)
    deepspeed = RequirementInputs.of(job, setup.hardware).deepspeed
    # faults of the script's own training that its config alone did not show
    found = [line for line in warnings(own_facts(job), deepspeed) if line not in setup.warnings]
    own, candidates = own_candidate(probed.script), tuple(space.candidates(job))
    if own not in candidates:
        candidates = (*candidates, own)
    return replace(
        setup, job=job, space=_with_values(space, own), candidates=candidates, notes=(*setup.notes, *found, *notes)
    )


def _with_values(space: SearchSpace, own: Candidate) -> SearchSpace:
    """Return the space with the script's own values added to its knobs.

    Optuna rejects a choice that a study did not have from its first trial on.
    """
    knobs = dict(space.knobs)
    for name, value in own.knobs:
        if name in knobs and value not in knobs[name].values:
            knobs[name] = replace(knobs[name], values=(*knobs[name].values, value))
    return replace(space, knobs=knobs)


# -- short runs after the probe run ------------------------------------------------------------------------------------

_WARMUP_STEPS, _MOST_STEPS = 2, 5  # of a run; the second includes the first


class ShortRuns:
    """Short runs of a script after its probe run, of which a study makes at most two, in their share of the budget.

    The first ones find the flags that carry the batch, and the next ones check another batch. A script that draws random
    numbers is repeated once more, to measure their noise.
    Later trials find what a check that was left out would have shown: each compares its own batch and trace.

    Args:
        seconds: limit of all runs.
        baseline: the measured probe run, which shows how long a run takes; None if it ran out of memory.
    """

    def __init__(self, executor: Executor, seconds: float, baseline: Outcome | None = None) -> None:
        self.executor, self._runs, self._seconds = executor, 2, seconds
        self._baseline = baseline
        self.repeats_seeds = False  # the script named other seeds than in its first run
        self._measured = False

    def expected_seconds(self, times: float = 1.0) -> float:
        """Return the expected seconds of a run, 0 if unknown.

        Args:
            times: ratio of its steps' duration to those of the probe run.
        """
        if self._baseline is None or self._baseline.measurement is None:
            return 0.0
        step_seconds = self._baseline.measurement.step_seconds
        # its warm-up is outside the measured steps
        return self._baseline.outside_seconds + (_MOST_STEPS * times - _WARMUP_STEPS) * step_seconds

    @property
    def names_same_seeds(self) -> bool:
        """True if a measured run named the seeds of the first run, which trials then need not repeat."""
        return self._measured and not self.repeats_seeds

    @property
    def left(self) -> int:
        """Number of runs that are left, 0 if the time does not hold one."""
        return self._runs if self.holds(1.0) else 0

    def holds(self, times: float) -> bool:
        """Return True if the time that is left holds a run whose steps take so many times those of the probe run."""
        return self.expected_seconds(times) <= self._seconds

    def run(self, candidate: Candidate, name: str, job: Job, *, reseed: bool = False) -> tuple[Outcome, dict[str, Any]]:
        """Return the outcome and the facts of a run.

        Args:
            reseed: draw other random numbers than the probe run, in a run that the limited number leaves out.

        Raises:
            Stopped: the user stopped the tuner.
        """
        self._runs -= not reseed
        with closing(self.executor.session(candidate, name, job=job)) as session:
            outcome = session.measure(candidate, replace(_TRACED_STEPS, reseed=reseed), self._seconds)
        self._seconds -= outcome.seconds
        if outcome.kind is OutcomeKind.INTERRUPTED and outcome.source is Source.STOP:
            raise Stopped("stopped during the checks of the script's batch size")
        self.repeats_seeds |= bool(session.facts.get("repeats_seeds"))
        self._measured |= outcome.ok
        return outcome, dict(session.facts)


# -- places that carry the batch ---------------------------------------------------------------------------------------

_NAMED = {MICRO_BATCH: "micro-batch", ACCUMULATION: "accumulation", STEP: "batch of a whole step"}
_MOST_PLACES = 6  # places that get another value at once
_TIMES = (0.5, 2, 0.25, *range(3, 1000))  # of a place's own value, in the order in which they are tried


def carriers_found(runs: ShortRuns, script: Script, facts: dict[str, Any]) -> ScriptProfile:
    """Return the profile with the places that carry the micro-batch or the accumulation, if no known place does.

    Places that may hold one of these numbers get other values in one run, each another multiple of its own. The multiples of rows
    and backwards in its steps tell them apart. Each attempt leaves a line in the profile.

    Raises:
        Stopped: the user stopped the tuner.
    """
    profile, lines = script.profile, list[str]()
    if not profile.counted or not facts.get("rows") or not facts.get("micros"):
        return replace(profile, attempts=("no flag or variable was tried: its steps cannot be counted",))
    loop = of_loop(profile, facts)
    own, places, wanted = own_numbers(loop), _integers(script, facts), list[str]()
    for knob in (MICRO_BATCH, ACCUMULATION):
        place = carrier_of(script, knob).place
        # one of a known name may hold another value than the steps, such as all ranks' accumulation
        if carries_knob(script, knob) and places.get(place, own[knob]) == own[knob]:
            lines.append(f"{_NAMED[knob]} {own[knob]}: a flag or file of a known name carries it")
            places.pop(place, None)
        else:
            wanted.append(knob)
    may_be = _may_be(own, wanted, places, (runs.executor.hardware.count, int(facts.get("widest", 1))))
    exact = {place for place in may_be if places[place] in [own[knob] for knob in wanted]}
    sought = " and ".join(f"{_NAMED[knob]} {own[knob]}" for knob in wanted)
    attempts = _attempts(may_be, exact)
    if wanted and not attempts:
        lines.append(f"no flag, variable or value of a file may be its {sought}: none is set")
    found, seen = dict[str, str](), set[str]()
    for attempt in attempts:
        new = [place for place in attempt if place not in seen]
        missing = [knob for knob in wanted if knob not in found and (knob == MICRO_BATCH or own[knob] > 1)]
        if not new or not missing or STEP in found:
            continue
        if not runs.left:
            lines.append(f"what carries its {sought} was not sought further: no run or time is left")
            break
        changed = _other_values({place: places[place] for place in new}, may_be, exact, own)
        times, why = _times_with(runs, script, facts, changed)
        tried = f"tried {', '.join(f'{place} {places[place]} -> {value}' for place, value in changed.items())}"
        if why:
            lines.append(f"{tried}: not taken, {why}")
            continue
        seen |= changed.keys()
        before = len(found)
        for name in (*wanted, STEP):
            fits = [one for one in new if name in may_be[one] and changed[one] == times[name] * places[one]]
            is_sought = name not in found and not found.keys() >= {*wanted}
            if is_sought and fits and fits[0] not in found.values():
                found[name] = fits[0]
        taken = ", ".join([*found.values()][before:])
        steps = ", ".join(f"{_NAMED[knob]} {float(own[knob] * times[knob]):g}" for knob in (MICRO_BATCH, ACCUMULATION))
        lines.append(f"{tried}: {steps}; taken: {taken or 'nothing, no value explains it'}")
    if found.keys() - {MICRO_BATCH} or (found and loop.loop_accumulates == "cuts"):
        profile = loop
    own = own_numbers(profile)
    factors = {name: places[place] // own[name] for name, place in found.items() if places[place] > own[name]}
    return replace(profile, found_flags=found, flag_times=factors, attempts=tuple(lines))


def of_loop(profile: ScriptProfile, facts: dict[str, Any]) -> ScriptProfile:
    """Return the profile in numbers of a loop that accumulates in an engine without accumulation; unchanged for other loops.

    It sums several micro-batches of the engine, or cuts one of them.
    """
    micros, sums = facts["micros"], profile.accumulated_by_hand > 1
    cuts = facts["rows"] == profile.micro_batch and profile.micro_batch % micros == 0
    if micros == 1 or profile.accumulation > 1 or profile.counted != "rows" or not (sums or cuts):
        return profile
    micro_batch = profile.micro_batch if sums else profile.micro_batch // micros
    said = {MICRO_BATCH: [], ACCUMULATION: [micros]}
    loop = _profile({**facts, "micro_batch": micro_batch, "accumulation": 1, "said": said}, own=True)
    return loop if sums else replace(loop, loop_accumulates="cuts")


def _may_be(
    own: dict[str, int], wanted: list[str], places: dict[str, int], sizes: tuple[int, int]
) -> dict[str, list[str]]:
    """Return the numbers that each place may carry, without places that may carry none.

    Args:
        own: micro-batch, accumulation and samples of a rank's step.
        wanted: those that no known place carries.
        places: values by place.
        sizes: number of ranks, and of tokens in a row, by which a value may be a multiple.
    """
    ranks, tokens = sizes
    units = {MICRO_BATCH: {1, ranks, tokens, ranks * tokens}, ACCUMULATION: {1}}
    sought = [*wanted]
    if wanted and own[ACCUMULATION] > 1:
        # Without accumulation, the number of ranks alone would try each flag that happens to have it.
        units |= {ACCUMULATION: {1, ranks}, STEP: units[MICRO_BATCH]}
        sought.append(STEP)
    found = {
        place: names
        for place, value in places.items()
        if (names := [name for name in sought if value in [own[name] * unit for unit in units[name]]])
    }
    # The config may carry the micro-batch. An accumulation alone, or of 1, would try each flag that happens to have it.
    unlikely = MICRO_BATCH in wanted or own[ACCUMULATION] == 1
    if unlikely and all(names == [ACCUMULATION] for names in found.values()):
        return {place: names for place, names in found.items() if OF_A_BATCH.search(place)}
    return found


def _attempts(may_be: Mapping[str, list[str]], exact: Set[str]) -> list[tuple[str, ...]]:
    """Return the places to change in each run, those with a telling name first, and variables of other names last.

    Args:
        may_be: numbers that each place may carry. A file of data has many places. The micro-batch comes first, which is halved.
        exact: places whose value is no product.
    """
    order = sorted(may_be, key=lambda place: MICRO_BATCH not in may_be[place])
    order.sort(key=lambda place: (not OF_A_BATCH.search(place), not place.startswith("-")))
    telling = [place for place in order if OF_A_BATCH.search(place)]
    variables = [place for place in order if place.startswith(VARIABLE) and place not in telling]
    likely = [place for place in order if place not in variables]
    # a place that can only carry what a telling one does is tried if that one does not
    told = [may_be[place] for place in telling if len(may_be[place]) == 1]
    first = [place for place in likely if place in telling or may_be[place] not in told]
    fewer = telling or [place for place in likely if place in exact]
    return [*dict.fromkeys(tuple(one[:_MOST_PLACES]) for one in (first, fewer, likely, variables) if one)]


def _other_values(
    values: dict[str, int], may_be: Mapping[str, list[str]], exact: Set[str], own: dict[str, int]
) -> dict[str, int]:
    """Return another value for each place, each by another factor; the smallest values first, which need least memory.

    Args:
        values: by place.
        may_be: numbers that each place may carry. Those that are computed from them stay whole.
        exact: places whose value is no product. No quotient of a product's factor and another one is that of another place.
        own: micro-batch, accumulation and samples of a rank's step.
    """
    changed: dict[str, int] = {}
    factors: set[float] = {1}
    parts: list[tuple[int, float]] = []  # numbers that a product may give, with the factor by which it is then divided
    steps = any(STEP in may_be[place] for place in values.keys() - exact)
    for place in sorted(values, key=lambda place: place not in exact):
        options: list[float] = [times for times in _TIMES if values[place] * times % 1 == 0]
        if place not in exact:
            number = own[may_be[place][0]]
            options = [one for one in options if all(n * one / by % 1 == 0 for n, by in [(number, 1), *parts])]
            options = [one for one in options if factors.isdisjoint(one / by for by in factors)]
        elif steps and MICRO_BATCH not in may_be[place]:
            options = [4, *options]  # a smaller accumulation would make a larger micro-batch of a step
        times = next(one for one in options if one not in factors)
        factors.add(times)
        parts += [
            (own[ACCUMULATION if name == MICRO_BATCH else MICRO_BATCH], times) for name in may_be[place] if name != STEP
        ]
        changed[place] = int(values[place] * times)
    return changed


def _times_with(
    runs: ShortRuns, script: Script, facts: dict[str, Any], values: dict[str, int]
) -> tuple[dict[str, Fraction], str]:
    """Return the factors by which micro-batch, accumulation and samples of a step change in a run with other values of places.

    If its steps cannot be counted, there are no factors, and the text is the reason.
    """
    argv, in_words = list(script.argv), argument_names(script.argv)
    tried = {place: value for place, value in values.items() if not place.startswith("-") and place not in in_words}
    for place in values.keys() - tried.keys():
        argv = with_flag(argv, place, values[place])
    seen, flags = script.profile, (*script.flags, *zip(tried, tried, strict=True))
    profile = ScriptProfile(largest=seen.largest, pads_to=seen.pads_to, tried_values=tried)
    typed = with_argument_files(replace(script, argv=tuple(argv), flags=flags, profile=profile))
    outcome, now = runs.run(Candidate(()), "probe-flags", replace(runs.executor.job, script=typed))
    if not outcome.ok or not now.get("rows") or not now.get("micros"):
        return {}, outcome.reason or "its steps cannot be counted"
    rows, micros = Fraction(now["rows"], facts["rows"]), Fraction(now["micros"], facts["micros"])
    return {MICRO_BATCH: rows / micros, ACCUMULATION: micros, STEP: rows}, ""


def _integers(script: Script, facts: dict[str, Any]) -> dict[str, int]:
    """Return the positive integers of the script's parsers, words, argument files and variables, by place.

    Words of the command count for parsers other than argparse (click, fire, Hydra).
    """
    of_variables = facts.get(READ_INTEGERS, {}).items()
    read = {name: value for name, value in of_variables if name.removeprefix(VARIABLE) in facts.get(READ, {})}
    found = {**integers_in_files(script), **integers_in_words(script.argv), **facts.get("integers", {}), **read}
    return {place: value for place, value in found.items() if place not in LOCAL_RANK_FLAGS}


def _found_lines(profile: ScriptProfile) -> Iterator[str]:
    """Yield a line about each place that was found."""
    for name, place in profile.found_flags.items():
        times = profile.flag_times.get(name, 1)
        over = f" times {times}" if times > 1 else ""
        value = own_numbers(profile)[name] * times
        yield f"{place} {value} is its {_NAMED[name]}{over}: candidates set it (--map KNOB=--FLAG names another)"


# -- batch check -------------------------------------------------------------------------------------------------------

_AVERAGES = "--average_tokens_across_devices True averages the loss over the tokens of all ranks, however they are cut"
_MOST_TIMES = 4  # multiple of the script's micro-batch that is assumed to fit in memory


def check_batch(
    runs: ShortRuns, script: Script, reference: TrainingTrace | None = None, least: Candidate | None = None
) -> str:
    """Return why the script's batch cannot be changed; empty if it honours another, and trains the same on it.

    Args:
        runs: short runs that are left. Without one, the trials of the search check their own batch.
        reference: trace of the probe run with the noise of its script. A loss that depends on the cut of the batch, or a
            schedule that counts micro-batches, differs from it.
        least: settings with minimal memory, for a script that does not fit with its own.

    Raises:
        UserError: it does not take its own global batch from its known flag.
        Stopped: the user stopped the tuner.
    """
    if not script.profile.counted:
        return script.profile.uncounted or UNCOUNTED
    if not all(script.profile.beside.values()):
        return UNCOUNTED_BESIDE
    own = own_candidate(script)
    if least is not None:
        own = least.but(**{MICRO_BATCH: own.micro_batch, ACCUMULATION: own.accumulation})
    job = job_of(script, runs.executor.hardware, None).called_like(runs.executor.job)
    refused: list[tuple[Candidate, Outcome]] = []
    # a micro-batch may take as long as a larger one
    held = [other for other in others(own) if runs.holds(max(1.0, own.micro_batch / other.micro_batch))]
    for number, other in enumerate(held[: runs.left], 1):
        outcome, _ = runs.run(other, f"probe-batch-{number}", job)
        if outcome.ok and reference is not None and outcome.trace is not None:
            return _compared(script, reference, other, outcome.trace)
        if outcome.kind.is_attributable_to_candidate and not outcome.kind.is_oom and not outcome.ok:
            refused.append((other, outcome))
        elif outcome.ok or not refused:
            return ""
    if not refused:
        return ""
    other, first = refused[0]
    if first.source is not Source.BATCH:
        return f"told another batch ({other}), {script.target} fails: {first.reason}"
    disobeys = all(one.source is Source.BATCH and told.rows_per_rank == own.rows_per_rank for told, one in refused)
    typed = dict(script.flags).keys() - script.profile.found_flags.keys()
    if disobeys and {MICRO_BATCH, ACCUMULATION} & typed:
        raise UserError(first.reason)
    return first.reason


def _compared(script: Script, reference: TrainingTrace, other: Candidate, trace: TrainingTrace) -> str:
    """Return how a run on another cut of the script's batch trains differently; empty if it does not."""
    found = compare(reference, own_candidate(script), trace, other)
    if found.verdict is not Verdict.DIFFERS:
        return ""
    if script.profile.averages_by_rank and found.cause == MICRO_BATCH:
        return f"{found.text}; {_AVERAGES}"
    return found.text


def others(own: Candidate) -> list[Candidate]:
    """Return other batches to pass to a script, those nearest to half or twice its micro-batch first.

    They keep the script's global batch, which a script may enforce by a check or its own accumulation. If no other split exists,
    the global batch is changed.
    """
    total = own.rows_per_rank
    most = min(total, _MOST_TIMES * own.micro_batch)
    micros = [size for size in range(1, most + 1) if total % size == 0 and size != own.micro_batch]
    if not micros:
        return [own.but(**{MICRO_BATCH: 2 * own.micro_batch, ACCUMULATION: own.accumulation + 1})]
    micros.sort(key=lambda size: abs(max(size, own.micro_batch) / min(size, own.micro_batch) - 2))
    return [own.but(**{MICRO_BATCH: size, ACCUMULATION: total // size}) for size in micros]
