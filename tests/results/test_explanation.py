"""Explanations of failed trainings, by public threads in `tests/data/ooms`: what their numbers prove, and what helped there.

`python -m tests.results.test_explanation` prints each with its thread's facts.
"""

import functools
import json
import re
import tempfile
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from autotune.errors import UserError
from autotune.explain.command import explain_log
from autotune.explain.explanation import Explanation, explain_end, training_of
from autotune.explain.training import read_training
from tests.cli_call import call
from tests.conftest import make_candidate, make_job

CASES = Path(__file__).parents[1] / "data" / "ooms"
ROWS: list[dict[str, Any]] = json.loads((CASES / "cases.json").read_text())
_WEIGHT = r"weight|embedding|output layer|query, key and value|parameter that stage 3"
_DDP = r"DistributedDataParallel|gradient buckets"
# the kind of a tensor, by words of the thread's facts, and of an explanation
KINDS = {
    "attention": (r"attention scores|softmax of one layer|attention mask", "scores of one layer"),
    "logits": (r"logits|log-softmax", "logits"),
    "ddp": (_DDP, _DDP),
    "copy": (r"flat bf16 copy", "flat copy of all weights"),
    "share": (
        r"fp32 partition|temporary|state or temp|gradient partition|first moment",
        "32-bit tensor|temporary|moment|master",
    ),
    "weight": (_WEIGHT, _WEIGHT),
}


@functools.cache
def explained(file: str) -> Explanation:
    """What `explain` says with the facts that threads have: model, ranks and config."""
    row = next(one for one in ROWS if one["file"].startswith(file))
    names = (row["model"], f"of-{row['parameters_count'] / 1e9:.3f}b" if row["parameters_count"] else None)
    with tempfile.NamedTemporaryFile("w", suffix=".json") as config:
        config.write(json.dumps(row["ds_config"] or {}))
        config.flush()
        for model in names:
            with suppress(UserError):
                return explain_log(CASES / row["file"], model, row["ranks"], Path(config.name))
    raise AssertionError(row["file"])


def kinds_of(text: str, at: int) -> set[str]:
    return {name for name, patterns in KINDS.items() if re.search(patterns[at], text)}


def test_most_tensors_have_their_exact_size_and_kind() -> None:
    counted = Counter[str]()
    for row in ROWS:
        if row["bytes_expected"] is None or "cuda oom" not in row["kind"]:
            continue
        found = explained(row["file"])
        exact = " = " in found.tensor
        right = bool(kinds_of(found.tensor.partition(": ")[2], 1) & kinds_of(row["tensor"], 0))
        counted.update(all=1, exact=exact, right=exact and right)
    assert counted["all"] >= 35
    assert counted["exact"] >= 0.85 * counted["all"], counted
    assert counted["right"] >= 0.8 * counted["all"], counted


def test_nothing_is_advised_that_was_tried_in_vain() -> None:
    for row in ROWS:
        if row["cannot_help"]:
            change = explained(row["file"]).change
            tried = " ".join(row["cannot_help"])
            if re.search("batch|length|sequence|block_size", tried):
                assert not re.match("micro-batch|half the micro-batch|gradient checkpointing", change), row["file"]
            if "optimizer offload" in tried:
                assert not change.startswith("offload_optimizer"), row["file"]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["file"])
def test_the_change_is_what_helped_or_what_the_numbers_prove(row: dict[str, Any]) -> None:
    assert explained(row["file"]).change.startswith(row.get("change", ""))


@pytest.mark.parametrize(("log", "line"), json.loads((CASES / "logs.json").read_text()).items())
def test_the_end_of_a_log_is_explained(log: str, line: str, tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text(log)
    assert line in "\n".join(explain_log(tmp_path / "train.log").lines())


ODD = (
    f"""batch_size_per_gpu={"9" * 5000} [rank{"9" * 5000}] --model a-{"9" * 5000}b model_max_length={10**30}
{" " * 10**5}error
"""
    + 5000 * '{"zero_optimization": {"x": {\n'
)
COMMAND = "torchrun --nproc_per_node=8 train.py --model_name_or_path meta-llama/Llama-2-7b-hf --deepspeed ds_z2.json"


def test_a_log_alone_may_tell_model_ranks_and_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Several ranks print at once, with the launcher's prefixes and the codes of a terminal, below lines of odd content."""
    text = (CASES / "01-LlamaFactory-1221.txt").read_text()
    log = tmp_path / "train.log"
    ranks = text.replace("\n", "\x1b[0m\r\n\x1b[31m2026-03-20T17:39:14.5Z [INFO] node1: [rank3]: ")
    log.write_text(f"{ODD}{COMMAND}\n{ranks}\nexits with return code = -9", "utf-16")
    code, out, _ = call(monkeypatch, capsys, "explain", str(log))
    assert code == 0
    assert "3.14 GiB = 6.74 B parameters x 4 bytes / 8 ranks" in out
    assert "useless" in out
    assert len(out.splitlines()) <= 6


def test_a_launch_is_explained_in_its_own_precision() -> None:
    ended = "oom_device: CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity of 2.00 GiB"
    half, full = (explain_end(ended, make_job(precision=one), make_candidate(2)) for one in ("bf16", "fp32"))
    assert half != full


def test_a_training_under_deepspeed_is_not_told_to_take_it() -> None:
    job, own = make_job(), make_candidate(0)
    ended = f"oom_device: you tried to allocate {2 * training_of(job, own).of_model} bytes"
    assert not re.search("DeepSpeed|autotune run", str(explain_end(ended, job, own)))


def test_what_a_log_says_is_not_taken_for_more() -> None:
    assert read_training("GPU 5 has").ranks is None
    assert read_training("[rank0]: a\n[rank1]: b").ranks == 2
    assert not read_training("Number of trainable parameters = 1,000").adapters
    assert read_training("world_size 16 != 1 * 8 * 1").ranks is None
    assert read_training("--model starcoder2-7b").model is None
    known = read_training("--model Qwen/Qwen2.5-Coder-7B-Instruct --deepspeed zero3_offload NPROC_PER_NODE=4")
    assert known.model.name == "qwen2.5-7b"
    assert (known.ranks, known.candidate.stage, known.candidate.offload_param) == (4, 3, "cpu")


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        ("all went well\n", (), "shows no failure"),
        ("MemoryError\n", ("--gpus", "0"), "--gpus 0: expected at least 1"),
        ("MemoryError\n", ("--model", "unheard"), "--model unheard: not known offline"),
        ("MemoryError\n", ("--ds-config", "gone.json"), "gone.json: no such file"),
    ],
)
def test_bad_input_is_one_line(
    text: str,
    words: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    log = tmp_path / "train.log"
    log.write_text(text)
    code, _, err = call(monkeypatch, capsys, "explain", str(log), *words)
    assert code == 2
    assert message in err
    assert len(err.strip().splitlines()) == 1


if __name__ == "__main__":
    for one in ROWS:
        print(json.dumps(one), *explained(one["file"]).lines(), "", sep="\n")
