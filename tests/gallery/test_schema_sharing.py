"""A study becomes an entry that says how fast what was, and nothing of whose it is."""

import dataclasses
import re

import pytest

from autotune.errors import UserError
from autotune.gallery.schema import Entry, entry_of, public_lora
from autotune.problem.candidate import Candidate
from autotune.problem.hardware import Hardware, named_hardware
from autotune.problem.job import Job, Script, parse_lora
from autotune.problem.models import ModelSpec, resolve_model
from autotune.problem.outcome import Outcome, OutcomeKind, Phase
from autotune.search.trials import RESUME, VERIFY
from autotune.util.units import GIB
from tests.conftest import make_candidate
from tests.gallery.studies import job_of, ran, small_study, store_of, tell

PRIVATE = "zzacme"  # in whatever a person or a machine may have named


def private_job() -> Job:
    config = {
        **resolve_model("qwen2.5-0.5b").config,
        "model_type": f"{PRIVATE}_lm",
        "architectures": [f"{PRIVATE}ForCausalLM"],
        "_name_or_path": f"/home/{PRIVATE}/model",
        "hidden_size": 900,
        f"{PRIVATE}_width": 7,
    }
    script = Script(
        ("train.py", "--data", f"/data/{PRIVATE}.jsonl", "--token", f"hf_{PRIVATE}"),
        f"/home/{PRIVATE}",
        environment=(("WANDB_API_KEY", PRIVATE),),
        profile={"loader_prepared": True, "checkpointing": True, "batch_note": "", "config": {"note": PRIVATE}},
    )
    return Job(
        ModelSpec(f"{PRIVATE}-7b", config, f"/home/{PRIVATE}/model"),
        2,
        1024,
        script=script,
        base_config={"tensorboard": {"output_path": f"/home/{PRIVATE}"}},
        lora=parse_lora(f"r=8,targets={PRIVATE}_proj+q_proj,saved={PRIVATE}_head"),
    )


def test_nothing_of_whose_it_is_comes_along() -> None:
    job = private_job()
    machine = Hardware("cuda", "NVIDIA H100 80GB HBM3", 2, 80 * GIB, None, 64 * GIB, "h100", gpus=(f"GPU-{PRIVATE}",))
    store = store_of(job, machine)
    candidate = make_candidate(3, 8, **{"zero_optimization.offload_optimizer.nvme_path": f"/mnt/{PRIVATE}"})
    odd = make_candidate(3, 4, lora=f"r=4,targets={PRIVATE}_proj")
    broken = Outcome(OutcomeKind.CRASH, Phase.FORWARD, reason=PRIVATE, evidence=PRIVATE, log=f"/logs/{PRIVATE}")
    tell(store, odd, ran(job, odd, 3.0))
    tell(store, make_candidate(2, 2), broken)
    store.note_command(f"autotune run --study {PRIVATE}")
    store.set_winner(tell(store, candidate, ran(job, candidate, 2.0), VERIFY), PRIVATE)
    fingerprint = {
        **store.fingerprint,
        "versions": {"torch": f"2.5.1+{PRIVATE}", "deepspeed": "0.19.8", "driver": PRIVATE},
    }
    store._set("fingerprint", fingerprint)
    entry = entry_of(store)
    assert PRIVATE not in entry.text()
    assert "/" not in entry.text(), "no path"
    assert (entry.job.model, entry.job.architecture) == (None, None)
    assert entry.job.shape["hidden_size"] == 900
    assert entry.job.lora == "r=8"
    assert entry.versions.torch == "2.5.1"
    assert entry.machine.gpu == "h100"
    assert len(entry.candidates) == 3
    assert Entry.model_validate_json(entry.text()) == entry


def test_a_public_model_is_named_by_its_sizes_whatever_it_is_called() -> None:
    job = job_of()
    config = {**job.model.config, "_name_or_path": "/home/someone/checkpoint"}
    job = dataclasses.replace(job, model=ModelSpec("our-finetune", config, "/home/someone"))
    entry = entry_of(small_study(job))
    assert (entry.job.model, entry.job.architecture) == ("qwen2.5-0.5b", "qwen2")
    assert "our-finetune" not in entry.text()
    assert "someone" not in entry.text()


def test_each_candidate_has_how_it_ended_and_the_winner_what_it_was_verified_at() -> None:
    entry = entry_of(small_study())
    told = {one.candidate: one for one in entry.candidates}
    assert len(told) == 3, "what was cut short says nothing"
    assert told[make_candidate(0, 16)].outcome == "oom_device"
    assert told[make_candidate(0, 16)].missing_gib == 2.0
    assert entry.best is not None
    assert (entry.best.step_seconds, entry.verified) == (1.6, True)
    assert re.fullmatch(r"20\d\d-\d\d", entry.origin.date or "")
    assert set(entry.space["zero_stage"]) == {0, 1, 2, 3}


def test_one_that_runs_out_later_ran_out_and_one_that_goes_on_is_as_it_was() -> None:
    job = job_of()
    store = store_of(job, named_hardware("rtx4090", 2))
    one, other = make_candidate(2, 8), make_candidate(3, 8)
    for candidate in (one, other):
        tell(store, candidate, ran(job, candidate, 2.0))
    tell(store, one, Outcome(OutcomeKind.OOM_DEVICE, Phase.LOAD), RESUME)
    tell(store, other, Outcome(OutcomeKind.OK, peak_bytes=GIB), RESUME)
    assert {tried.candidate: tried.outcome for tried in entry_of(store).candidates} == {one: "oom_device", other: "ok"}


def test_what_was_not_measured_is_not_shared() -> None:
    store = store_of(job_of(), named_hardware("rtx4090", 2))
    with pytest.raises(UserError, match="has measured nothing"):
        entry_of(store)
    tell(store, make_candidate(0, 16), Outcome(OutcomeKind.OOM_DEVICE, Phase.BACKWARD))
    with pytest.raises(UserError, match="has measured nothing"):
        entry_of(store)
    replayed = small_study()
    replayed.note_table("a-table")
    with pytest.raises(UserError, match="searches a recorded table"):
        entry_of(replayed)


def test_layers_that_nobody_knows_are_all_linear_ones() -> None:
    assert public_lora("r=8,targets=q_proj+v_proj,saved=lm_head") == "r=8,targets=q_proj+v_proj,saved=lm_head"
    assert public_lora("r=8,targets=q_proj+mine,alpha=3") == "r=8,alpha=3"
    assert public_lora("r=8,targets=mine,quantize=nf4") == str(parse_lora("r=8,quantize=nf4"))


def test_a_knob_whose_value_is_a_text_is_left_out_of_its_candidate() -> None:
    job = job_of()
    store = store_of(job, named_hardware("rtx4090", 2))
    candidate = Candidate.of({**make_candidate(3, 8).as_dict, "zero_optimization.offload_param.nvme_path": "/x"})
    tell(store, candidate, ran(job, candidate, 2.0))
    (one,) = entry_of(store).candidates
    assert one.candidate == make_candidate(3, 8)
