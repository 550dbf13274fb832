"""Rebuilds of public training scripts, and more styles: their batch, and what their candidates train."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.problem.candidate import ACCUMULATION, MICRO_BATCH
from autotune.problem.outcome import OutcomeKind
from autotune.script.carriers import STEP
from autotune.script.profile import own_candidate
from autotune.search.certificate import Certifier, Verdict
from autotune.search.trials import SEARCH
from tests.conftest import SCRIPTS, Scripts

DEEP = "dataset.train.kwargs.batch_size"
# way: (its arguments, flags that are found, a part of the note on its batch, stages that train otherwise or are refused)
PUBLIC: dict[str, tuple[str, dict[str, str], str, tuple[int, ...]]] = {
    "minrf": ("--train_batch_size 32 --per_device_train_batch_size 4", {STEP: "--train_batch_size"}, "", ()),
    "latent_diffusion": ("", {MICRO_BATCH: "--batch_size", ACCUMULATION: "--ga_steps"}, "", ()),
    "controlnet": ("--cfg_path x.yaml", {MICRO_BATCH: DEEP, ACCUMULATION: "accelerate.accumulation"}, "", ()),
    "cifar_moe": ("", {MICRO_BATCH: "--batch_size"}, "", (3,)),
    "surgery": ("--bs 4", {MICRO_BATCH: "--bs"}, "", ()),
    "webdataset": ("", {MICRO_BATCH: "--batch_size", ACCUMULATION: "--accum_freq"}, "", ()),
    "imagenet": ("", {MICRO_BATCH: "--batch-size", ACCUMULATION: "--iter-size"}, "", ()),
    "rlhf": ("", {MICRO_BATCH: "--micro_train_batch_size", STEP: "--train_batch_size"}, "", ()),
    "tokens": ("", {MICRO_BATCH: "--max_tokens", ACCUMULATION: "--update_freq"}, "", ()),
    "scaled_by_hand": ("", {MICRO_BATCH: "--batch_size"}, "", (1, 2, 3)),
    "muon": ("", {MICRO_BATCH: "--device_batch_size", STEP: "--batch_size"}, "", (1, 2, 3)),
    "own_generators": ("", {MICRO_BATCH: "--bs", ACCUMULATION: "--ga"}, "", ()),
}
STYLES: dict[str, tuple[str, dict[str, str], str, tuple[int, ...]]] = {
    "rdrop": ("", {MICRO_BATCH: "--bsz", ACCUMULATION: "--ga"}, "", ()),
    "boundary": ("", {MICRO_BATCH: "--mb", ACCUMULATION: "--accumulate"}, "", ()),
    "unfreeze": ("", {MICRO_BATCH: "--batch", ACCUMULATION: "--ga"}, "", (0,)),
    "iter_decay": ("", {}, "learning rate has moved by", ()),
    "ctc": ("", {MICRO_BATCH: "--samples_per_gpu", ACCUMULATION: "--update_freq"}, "", ()),
    "codebook": ("", {}, "buffers that its forwards change", ()),
    "stochastic_depth": ("", {}, "update is 0.99", ()),  # it drops more after more forwards
}
OTHER_ROWS = {"ctc"}  # another cut trains on other rows, of noise that hides a factor of 1.5
ALL = [("public.py", way) for way in PUBLIC] + [("styles.py", way) for way in STYLES]


@pytest.mark.slow
@pytest.mark.parametrize(("file", "way"), ALL)
def test_a_script_is_tuned_or_says_why_not(scripts: Scripts, tmp_path: Path, file: str, way: str) -> None:
    words, flags, note, otherwise = (PUBLIC if file == "public.py" else STYLES)[way]
    (tmp_path / "x.yaml").write_text("dataset: {train: {kwargs: {batch_size: 4}}}\naccelerate: {accumulation: 2}\n")
    found = scripts.probe([str(SCRIPTS / file), way, *words.split()], tmp_path)
    profile = found.script.profile
    assert note in profile.batch_note if note else not profile.batch_note, profile.batch_note
    assert profile.found_flags == flags, profile.attempts
    own = own_candidate(found.script)
    assert found.baseline is not None
    others = [own.but(zero_stage=stage) for stage in (otherwise[:1] or (2 if own.stage != 2 else 1,))]
    if not note and own.accumulation > 1:
        others.append(own.but(**{MICRO_BATCH: own.micro_batch * 2, ACCUMULATION: own.accumulation // 2}))
    scripts.measure(found, own)  # sets the job of the script
    certifier = Certifier(scripts.executor.job)
    certifier.learn(own, found.baseline, SEARCH)
    for other in others:
        outcome = scripts.measure(found, other)
        if other.stage in otherwise:
            refused = outcome.kind is OutcomeKind.INVALID
            assert refused or certifier.certificate(other, outcome.trace).verdict is Verdict.DIFFERS, outcome
        else:
            assert outcome.ok, outcome
            cut = other.micro_batch != own.micro_batch
            expected = Verdict.NOT_COMPARED if cut and way in OTHER_ROWS else Verdict.SAME
            assert certifier.certificate(other, outcome.trace).verdict is expected, (other, outcome.trace)
