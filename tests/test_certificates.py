"""Scripts whose training depends on the config, in two real ranks: the traces of their candidates are compared."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.commands.script_probe import Probe
from autotune.problem.candidate import ACCUMULATION, MICRO_BATCH, Candidate
from autotune.problem.faults import job_facts
from autotune.problem.outcome import OutcomeKind, Source
from autotune.script.profile import own_candidate
from autotune.search.certificate import Certificate, Certifier, Verdict, length_lines
from autotune.search.trials import SEARCH, VERIFY
from tests.conftest import SCRIPTS, Scripts

FLAGS = ((MICRO_BATCH, "--batch_size"), (ACCUMULATION, "--gas"))
STAGES = [{"zero_stage": stage} for stage in (1, 2, 3)]
OTHER_CUT = {MICRO_BATCH: 4, ACCUMULATION: 1}


def probed(scripts: Scripts, folder: Path, way: str) -> tuple[Probe, Candidate, Certifier]:
    command = [str(SCRIPTS / "cases/by_hand.py"), way]
    flags = () if way == "accumulates" else FLAGS
    found = scripts.probe(command, folder, flags)
    own = own_candidate(found.script)
    assert found.baseline is not None
    scripts.measure(found, own)  # sets the job of the script
    certifier = Certifier(scripts.executor.job)
    certifier.learn(own, found.baseline, SEARCH)
    return found, own, certifier


def certificate(scripts: Scripts, found: Probe, certifier: Certifier, candidate: Candidate) -> Certificate:
    outcome = scripts.measure(found, candidate)
    assert outcome.ok, outcome
    return certifier.certificate(candidate, outcome.trace)


@pytest.mark.main_path
@pytest.mark.slow
@pytest.mark.parametrize("way", ["plain", "dropout", "instance_norm"])
def test_a_script_that_trains_the_same_at_every_stage_raises_no_alarm(
    scripts: Scripts, tmp_path: Path, way: str
) -> None:
    found, own, certifier = probed(scripts, tmp_path, way)
    assert found.script.profile.batch_note == ""
    for changes in [*STAGES, OTHER_CUT]:
        verdict = certificate(scripts, found, certifier, own.but(**changes))
        assert verdict.verdict is Verdict.SAME, (changes, verdict)
        assert "gradient norm" in verdict.text
        assert "update" in verdict.text


@pytest.mark.slow
def test_gradients_clipped_by_hand_are_no_winner_above_stage_0(scripts: Scripts, tmp_path: Path) -> None:
    """Also if no gradient of the traced steps is clipped."""
    found, own, certifier = probed(scripts, tmp_path, "clips")
    outcome = scripts.measure(found, own.but(zero_stage=1))
    checked = certifier.checked(own.but(zero_stage=1), outcome, VERIFY)
    assert (checked.kind, checked.source, checked.trains_otherwise) == (OutcomeKind.INVALID, Source.TRACE, "zero_stage")
    assert '"gradient_clipping": 100 in the DeepSpeed config' in checked.reason
    assert job_facts(scripts.executor.job)["grad_changed_by_hand"]
    alike = certifier.shares_cause(own.but(zero_stage=1), checked)
    assert alike(own.but(zero_stage=1, reduce_bucket_size=1000))
    assert not alike(own)


@pytest.mark.slow
def test_stages_that_keep_the_last_of_several_gradients_are_excluded(scripts: Scripts, tmp_path: Path) -> None:
    """Case 22."""
    found, own, certifier = probed(scripts, tmp_path, "accumulates")
    for stage, same in ((1, False), (2, False), (3, True)):
        verdict = certificate(scripts, found, certifier, own.but(zero_stage=stage))
        assert (verdict.verdict is Verdict.SAME) is same, (stage, verdict)
        assert same or f"stage {stage} does not sum the 4 gradients of a step" in verdict.text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("negatives", "the loss depends on how the batch is cut"),  # case 06
        ("sum", "the loss depends on how the batch is cut"),
        ("batch_norm", "buffers that its forwards change, like BatchNorm's running statistics, move"),
        (
            "centers",
            "optimizers outside of the engine make 4 steps in each optimizer step of the engine, and 2 with yours",
        ),
        (
            "clips_each",
            "the script changes the gradients after 4 of the backwards of an optimizer step, and after 2 with yours",
        ),
        ("schedule_of_iterations", "this counts iterations of your loop"),  # cases 05, 21
    ],
)
def test_a_batch_whose_cut_changes_the_training_is_kept(scripts: Scripts, tmp_path: Path, way: str, words: str) -> None:
    found, own, certifier = probed(scripts, tmp_path, way)
    assert words in found.script.profile.batch_note
    if way != "clips_each":
        assert certificate(scripts, found, certifier, own.but(zero_stage=1)).verdict is Verdict.SAME


@pytest.mark.slow
def test_a_loop_that_counts_iterations_is_told_of_its_length(scripts: Scripts, tmp_path: Path) -> None:
    found, own, certifier = probed(scripts, tmp_path, "counts")
    outcome = scripts.measure(found, own.but(**OTHER_CUT))
    assert outcome.trace is not None
    assert certifier.reference is not None
    (line,) = length_lines(certifier.reference, outcome.trace)
    assert line.startswith("`at >= args.iterations` (by_hand.py:")
    assert line.endswith("after 600 optimizer steps instead of 300. Multiply the limit by 0.5")
    assert found.baseline.trace is not None
    assert length_lines(certifier.reference, found.baseline.trace) == []
