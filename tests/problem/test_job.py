"""What a Job is made of, and the texts it is read from."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.errors import UserError
from autotune.problem.job import MOST_LENGTHS, Job, Lora, Script, load_lengths, parse_lora
from autotune.problem.models import workload_spec
from tests.conftest import make_job


def test_a_job_survives_json() -> None:
    job = make_job(
        script=Script(("train.py", "--x"), "/tmp", (("zero_stage", "--z"),), True, {"micro_batch": 2}),
        lora=Lora(8, ("q_proj",)),
        attention="sdpa",
        lengths=((5, 2), (9, 1)),
    )
    assert Job.from_json(job.to_json()) == job


def test_what_is_not_used_leaves_older_studies_alone() -> None:
    assert {"script", "lora", "attention", "compiled", "lengths", "workload"}.isdisjoint(make_job().to_json())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("r=16", Lora(16)),
        ("r=8,targets=q_proj+v_proj,alpha=32", Lora(8, ("q_proj", "v_proj"), 32)),
        ("targets=all-linear", Lora(16)),
    ],
)
def test_lora(text: str, expected: Lora) -> None:
    assert parse_lora(text) == expected
    assert parse_lora(str(expected)) == expected


@given(st.text(max_size=20))
def test_lora_of_anything(text: str) -> None:
    try:
        assert 1 <= parse_lora(text).rank <= 4096
    except UserError as error:
        assert "\n" not in str(error) or "\n" in text


@pytest.mark.parametrize("text", ['{"5": 2, "9": 1}', "5,2\n9,1\n", "9\n5\n5\n"])
def test_lengths(tmp_path: Path, text: str) -> None:
    (tmp_path / "l").write_text(text)
    assert load_lengths(tmp_path / "l") == ((5, 2), (9, 1))
    job = make_job(seq_len=9, lengths=((5, 2), (9, 1)))
    assert job.tokens_per_sample == pytest.approx(19 / 3)
    assert "6 tokens on average, 9 at most" in job.summary


def test_many_lengths_are_merged_upwards(tmp_path: Path) -> None:
    (tmp_path / "l").write_text("\n".join(str(n) for n in range(1, 5001)))
    found = load_lengths(tmp_path / "l")
    assert len(found) <= MOST_LENGTHS
    assert found[-1][0] == 5000
    assert sum(count for _, count in found) == 5000
    assert sum(tokens * count for tokens, count in found) >= 5000 * 5001 / 2


@pytest.mark.parametrize("text", ["", "x\n", '{"a": 1}', "0\n", "5,-1\n", "[1]", '{"5": null}'])
def test_lengths_of_anything(tmp_path: Path, text: str) -> None:
    (tmp_path / "l").write_text(text)
    with pytest.raises(UserError, match="--lengths"):
        load_lengths(tmp_path / "l")


def test_a_workload_is_its_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine_a.py").write_text("def build():\n    pass\n")
    spec = workload_spec("mine_a:build")
    assert spec.name == "build"
    (tmp_path / "mine_a.py").write_text("def build():\n    return 1\n")
    assert workload_spec("mine_a:build") != spec
    for wrong, says in (("mine_a", "package.module"), ("mine_b:build", "no module"), ("mine_a:make", "has no make")):
        with pytest.raises(UserError, match=says):
            workload_spec(wrong)
