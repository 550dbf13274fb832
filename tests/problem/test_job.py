"""What a Job is made of, and the texts and files it is read from."""

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.commands.setup import MOST_LENGTHS, load_lengths, longest_sequence
from autotune.errors import UserError
from autotune.problem.ds_config import load_ds_config
from autotune.problem.job import Job, Lora, Script, ScriptProfile, parse_lora
from tests.conftest import make_job

SCRIPT = Script(("train.py", "--x"), "/tmp", (("zero_stage", "--z"),), True, "ds.json", ScriptProfile(micro_batch=2))


def test_a_job_survives_json() -> None:
    job = make_job(
        script=SCRIPT,
        lora=Lora(8, ("q_proj",), 3),
        attention="sdpa",
        compiled=True,
        workload="a:b",
        lengths=((5, 2), (9, 1)),
        packed=True,
        torch_alone=True,
        global_batch_size=8,
        base_config={"gradient_clipping": 1.0},
    )
    data = json.loads(json.dumps(job.to_json()))
    assert Job.from_json(data) == job
    assert Job.from_json(data).key == job.key
    assert Job.from_json({**data, "invented_later": 1}) == job
    plain = make_job()
    assert Job.from_json(json.loads(json.dumps(plain.to_json()))) == plain


def test_what_is_not_used_leaves_older_studies_alone() -> None:
    unused = {"script", "lora", "attention", "compiled", "lengths", "workload", "packed", "torch_alone"}
    assert unused.isdisjoint(make_job().to_json())
    assert {"global_batch_size", "base_config"} <= make_job().to_json().keys()


def test_the_key_is_of_everything_and_of_no_order() -> None:
    one = make_job(base_config={"a": 1, "b": 2})
    assert one.key == make_job(base_config={"b": 2, "a": 1}).key
    assert len({one.key, make_job().key, make_job(seq_len=33).key, make_job(ranks=4).key}) == 4
    assert len(one.key) == 16


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ranks": 0}, "--gpus 0: expected at least 1"),
        ({"seq_len": 0}, "--seq-len 0: expected between 1 and 10000000 tokens"),
        ({"seq_len": 10_000_001}, "--seq-len 10000001: expected between 1 and 10000000 tokens"),
        ({"precision": "fp8"}, "--precision fp8: expected one of bf16, fp16, fp32"),
        (
            {"attention": "fast"},
            "--attn fast: expected one of eager, sdpa, flash_attention_2, flash_attention_3, flex_attention",
        ),
        ({"global_batch_size": 0}, "--global-batch-size: expected a whole number from 1 to 2147483648, found 0"),
        (
            {"ranks": 4, "global_batch_size": 10},
            "--global-batch-size 10 cannot be split evenly over 4 ranks: try 8 or 12",
        ),
        ({"ranks": 4, "global_batch_size": 3}, "--global-batch-size 3 cannot be split evenly over 4 ranks: try 4"),
    ],
)
def test_what_is_no_job(changes: dict, message: str) -> None:
    with pytest.raises(UserError) as caught:
        make_job(**changes)
    assert str(caught.value) == message


def test_the_least_and_the_most_of_a_job() -> None:
    assert make_job(1, seq_len=1, global_batch_size=1).global_batch_size == 1
    assert make_job(seq_len=10_000_000).seq_len == 10_000_000
    assert make_job(4, global_batch_size=8).global_batch_size == 8
    assert make_job(attention="sdpa").attention == "sdpa"


@pytest.mark.parametrize(
    ("changes", "element_bytes", "optimizer"),
    [
        ({"precision": "fp32"}, 4.0, "adamw"),
        ({"precision": "fp16", "optimizer": "lion"}, 2.0, "lion"),
        ({"precision": "bf16", "base_config": {"optimizer": {"type": "AdamW"}}, "optimizer": "sgd"}, 2.0, "adamw"),
        ({"base_config": {"optimizer": None}, "optimizer": "sgd"}, 4.0, "sgd"),
        ({"base_config": {"optimizer": {"params": {}}}, "optimizer": "sgd"}, 4.0, "sgd"),
    ],
)
def test_arithmetic_and_optimizer(changes: dict, element_bytes: float, optimizer: str) -> None:
    job = make_job(**changes)
    assert (job.element_bytes, job.optimizer_kind) == (element_bytes, optimizer)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "tiny-llama, 32 tokens, fp32, adamw, batch free"),
        ({"precision": "bf16", "global_batch_size": 8}, "tiny-llama, 32 tokens, bf16, adamw, global batch 8"),
        (
            {"lora": Lora(8), "attention": "sdpa", "compiled": True},
            "tiny-llama, 32 tokens, fp32, LoRA of rank 8, sdpa, compiled, adamw, batch free",
        ),
        ({"script": SCRIPT}, "tiny-llama, 32 tokens, fp32, its own optimizer, batch free"),
        (
            {"script": dataclasses.replace(SCRIPT, profile=ScriptProfile(sequence_ranks=4)), "ranks": 8},
            "tiny-llama, 128 tokens, fp32, sequences split over 4 ranks, its own optimizer, batch free",
        ),
        (
            {"seq_len": 9, "lengths": ((5, 2), (9, 1))},
            "tiny-llama, 6 tokens on average, 9 at most, fp32, adamw, batch free",
        ),
        (
            {"seq_len": 9, "lengths": ((5, 2), (9, 1)), "packed": True},
            "tiny-llama, 6 tokens on average, packed to 9, fp32, adamw, batch free",
        ),
    ],
)
def test_one_line_for_people(changes: dict, text: str) -> None:
    assert make_job(**changes).summary == text


def test_tokens_of_a_sequence() -> None:
    lengths = ((5, 2), (9, 1))
    assert make_job(seq_len=9).tokens_per_sample == 9
    assert make_job(seq_len=9, lengths=lengths).tokens_per_sample == pytest.approx(19 / 3)
    seen = dataclasses.replace(SCRIPT, profile=ScriptProfile(tokens_per_sample=7))
    assert make_job(seq_len=9, lengths=lengths, script=seen).tokens_per_sample == 7
    assert make_job(seq_len=9, script=SCRIPT).tokens_per_sample == 9
    assert make_job(seq_len=9, lengths=lengths).samples_per_row == 1
    assert make_job(seq_len=9, lengths=lengths, packed=True).samples_per_row == pytest.approx(27 / 19)


# -- LoRA ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected", "short"),
    [
        ("r=16", Lora(16), "r=16"),
        ("targets=all-linear", Lora(16), "r=16"),
        (
            "r=64,saved=embed_tokens+lm_head",
            Lora(64, saved=("embed_tokens", "lm_head")),
            "r=64,saved=embed_tokens+lm_head",
        ),
    ],
)
def test_lora(text: str, expected: Lora, short: str) -> None:
    assert parse_lora(text) == expected
    assert str(expected) == short
    assert parse_lora(short) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected r=16,targets=all-linear (or q_proj+v_proj),alpha=32"),
        ("r=8,16", "expected r=16,targets=all-linear (or q_proj+v_proj),alpha=32"),
        ("rank=8", "expected r=16,targets=all-linear (or q_proj+v_proj),alpha=32"),
        ("r=8,", "expected r=16,targets=all-linear (or q_proj+v_proj),alpha=32"),
        ("r=x", "r: expected a whole number from 1 to 4096, found x"),
        ("r=8,alpha=1.5", "alpha: expected a whole number from 0 to 2147483648, found 1.5"),
        ("r=0", "r: expected a whole number from 1 to 4096, found 0"),
        ("r=4097", "r: expected a whole number from 1 to 4096, found 4097"),
    ],
)
def test_what_is_no_lora(text: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_lora(text)
    assert str(caught.value) == f"LoRA {text}: {message}"


# -- scripts -------------------------------------------------------------------------------------------------------------


def test_a_script_or_a_module() -> None:
    file = Script(("sub/train.py", "--lr", "1"), "/home/me")
    assert (file.target, file.arguments, file.name, file.is_module) == ("sub/train.py", ("--lr", "1"), "train", False)
    assert file.path == Path("/home/me/sub/train.py")
    module = Script(("-m", "trl.scripts.sft", "--lr", "1"), "/home/me")
    assert (module.target, module.arguments, module.name, module.is_module) == (
        "trl.scripts.sft",
        ("--lr", "1"),
        "sft",
        True,
    )
    assert module.path is None
    assert len(module.key) == 12


# -- data sets' lengths --------------------------------------------------------------------------------------------------


@given(st.dictionaries(st.integers(1, 100_000), st.integers(1, 1000), min_size=1, max_size=600))
def test_many_lengths_are_merged_upwards(tmp_path_factory: pytest.TempPathFactory, counts: dict[int, int]) -> None:
    file = tmp_path_factory.mktemp("lengths") / "l.json"
    file.write_text(json.dumps(counts))
    found = load_lengths(file)
    assert len(found) <= MOST_LENGTHS
    assert list(found) == sorted(found)
    assert found[-1][0] == max(counts), "the longest stays what it is"
    assert sum(count for _, count in found) == sum(counts.values())
    for tokens in counts:  # no batch is taken for shorter than it is
        assert sum(n for at, n in found if at >= tokens) >= sum(n for at, n in counts.items() if at >= tokens)
    if len(counts) <= MOST_LENGTHS:
        assert dict(found) == counts


def test_a_merge_is_no_coarser_than_it_must_be(tmp_path: Path) -> None:
    (tmp_path / "l").write_text("\n".join(str(n) for n in range(1, 1001)))
    assert load_lengths(tmp_path / "l")[:2] == ((4, 4), (8, 4))  # 1000 lengths in 250 steps of 4
    few = range(1, 10 * MOST_LENGTHS, 10)
    (tmp_path / "l").write_text("\n".join(str(n) for n in few))
    assert load_lengths(tmp_path / "l") == tuple((n, 1) for n in few), "as many as may be: none is merged"


LENGTHS = 'expected {"512": 1000, …}, lines of `512,1000`, or one length a line'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", " is empty"),
        ("5,0\n", " is empty"),
        ("x\n", ": expected a whole number from 1 to 10000000, found x"),
        ('{"a": 1}', ": expected a whole number from 1 to 10000000, found a"),
        ("{", ":1: not JSON (Expecting property name enclosed in double quotes)"),
        ("0\n", ": expected a whole number from 1 to 10000000, found 0"),
        ("5,-1\n", ": expected a whole number from 0 to 9223372036854775807, found -1"),
        ("[1]", ": expected a whole number from 1 to 10000000, found [1]"),
    ],
)
def test_lengths_of_anything(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "l"
    file.write_text(text)
    with pytest.raises(UserError) as caught:
        load_lengths(file)
    assert str(caught.value) == f"--lengths {file}{message}; {LENGTHS}"


def test_lengths_that_are_no_file(tmp_path: Path) -> None:
    (tmp_path / "null").write_text('{"5": null}')
    for path, says in ((tmp_path / "none", "no such file"), (tmp_path, "directory"), (tmp_path / "null", "found None")):
        with pytest.raises(UserError, match=f"--lengths {path}.*{says}.*expected"):
            load_lengths(path)


# -- configurations ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        ({"max_position_embeddings": 4096, "n_ctx": 1}, 4096),
        ({"max_position_embeddings": None, "n_positions": 5}, 5),
        ({}, None),
    ],
)
def test_the_longest_sequence_of_a_model(config: dict, tokens: int | None) -> None:
    assert longest_sequence(config) == tokens


def test_the_users_own_config(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{"zero_optimization": {"stage": 2}}')
    assert load_ds_config(file) == {"zero_optimization": {"stage": 2}}
    file.write_text("{} // nothing yet")
    assert load_ds_config(file) == {}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "--ds-config {file}: no such file; expected a DeepSpeed config JSON"),
        (b'{\n"a" 1}', "{file}:2: not JSON (Expecting ':' delimiter); expected a DeepSpeed config"),
        (b"[1]", "{file}: expected a JSON object with DeepSpeed's keys, found list"),
        (b'{"zero_optimization": 3}', "{file}: zero_optimization: expected an object, found 3"),
        (b"\xff", "--ds-config {file} cannot be read (it is no UTF-8 text): expected a DeepSpeed config JSON"),
    ],
)
def test_what_is_no_config(tmp_path: Path, content: bytes | None, message: str) -> None:
    file = tmp_path / "ds.json"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UserError) as caught:
        load_ds_config(file)
    assert str(caught.value) == message.format(file=file)


def test_lora_with_whole_modules_is_another_job_and_without_them_the_same_as_before() -> None:
    plain, whole = Lora(8), Lora(8, saved=("lm_head",))
    assert "saved" not in make_job(lora=plain).to_json()["lora"]
    for lora in (plain, whole):
        assert Job.from_json(make_job(lora=lora).to_json()).lora == lora
    assert make_job(lora=plain).key != make_job(lora=whole).key
