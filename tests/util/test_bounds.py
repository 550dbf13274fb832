"""What enters from outside is within bounds, or ends in one line."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from autotune.errors import UserError
from autotune.predict import trace as tracing
from autotune.util import bounds
from autotune.util.bounds import MOST, check_data, whole_number
from tests.cli_call import call

FILES = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
NUMBERS = st.one_of(
    st.integers(),
    st.sampled_from([10**400, -(10**400), 2**63, -1, 0, 10**9, 1e9, 1e308, -3, True, None]),
    st.floats(allow_nan=True, allow_infinity=True),
)
VALUES = st.recursive(
    st.one_of(NUMBERS, st.text(max_size=20), st.just("a\0b"), st.just("9" * 5000)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner, max_size=3)),
    max_leaves=6,
)
PLAN = ("plan", "--model", "tiny-llama", "--gpu", "a100-80gb")


def refused(told: tuple[int, str, str]) -> None:
    """Bad input, or a plan: in one line, and never a traceback."""
    code, out, err = told
    assert code in (0, 2, 3), (out, err)
    assert "Traceback" not in out + err
    if code == 2:
        lines = [line for line in err.splitlines() if line.strip()]
        assert len(lines) == 1, err
        assert len(lines[0]) < 1200


@pytest.mark.parametrize("value", ["x", MOST + 1, -1, True, None, 1.5, "²", [1], 10**400])
def test_what_is_no_whole_number_is_refused_in_a_short_line(value: Any) -> None:
    with pytest.raises(UserError, match=r"^slots: expected a whole number") as caught:
        whole_number(value, "slots")
    assert len(str(caught.value)) < 200


def test_whole_numbers_are_read_however_they_are_written() -> None:
    assert [whole_number(one, "x") for one in (5, "5", 5.0, MOST)] == [5, 5, 5, MOST]


@pytest.mark.parametrize(
    "data", [{"a": [1, 10**400]}, {"a": {"b": "x\0"}}, ["x" * 100_000], {"k\0": 1}, {"a": {"b\n": 1}}, {"\x1b[2J": 1}]
)
def test_nested_data_out_of_bounds_is_refused(data: Any) -> None:
    with pytest.raises(UserError, match=r"^f: "):
        check_data(data, "f")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("worker-1 slots=9999999999", "slots"),
        (f"worker-1 slots={'9' * 5000}", "slots"),
        ("wor\0ker slots=2", "NUL"),
        ("w;rm slots=2", "does not parse"),
        ("-oProxyCommand=x slots=2", "does not parse"),
        ("worker-1 slots=²", "does not parse"),
        ("\udcff", "UTF-8"),
    ],
)
def test_a_bad_hostfile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str, words: str
) -> None:
    file = tmp_path / "hosts"
    file.write_bytes(text.encode("utf-8", "surrogateescape"))
    told = call(monkeypatch, capsys, "run", "--model", "tiny-llama", "--hostfile", str(file))
    refused(told)
    assert told[0] == 2
    assert words in told[2]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"train_batch_size": int("9" * 400)}, "train_batch_size"),
        ({"gradient_clipping": 10**400}, "gradient_clipping"),
        ({"zero_optimization": {"stage": 0, "x": 10**400}}, "zero_optimization.x"),
        ({"wandb": {"team": "a\0"}}, "NUL"),
    ],
)
def test_a_bad_ds_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], config: Any, words: str
) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(config))
    told = call(monkeypatch, capsys, *PLAN, "--ds-config", str(tmp_path / "ds.json"))
    refused(told)
    assert told[0] == 2
    assert words in told[2]


@pytest.mark.parametrize("layers", ["-3", "9" * 400, "9" * 5000, '"\\u0000"', "1.5"])
def test_a_model_of_impossible_size_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], layers: str
) -> None:
    known = json.loads((Path(__file__).parents[2] / "autotune/data/models/tiny-llama.json").read_text())["config"]
    text = json.dumps({**known, "num_hidden_layers": "LAYERS"}).replace('"LAYERS"', layers)
    (tmp_path / "config.json").write_text(text)
    told = call(monkeypatch, capsys, "plan", "--model", str(tmp_path), "--gpu", "a100-80gb")
    refused(told)
    assert told[0] == 2


@pytest.mark.parametrize("text", ["1,2,3", "5,1\n1 2 3", "x", "0", "-5", '{"5": 1e400}', '{"5": [1]}', "[1]", ""])
def test_a_bad_file_of_lengths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    (tmp_path / "lengths").write_text(text)
    told = call(monkeypatch, capsys, *PLAN, "--lengths", str(tmp_path / "lengths"))
    refused(told)
    assert told[0] == 2
    assert "512,1000" in told[2] or "whole number" in told[2]


@pytest.mark.parametrize(
    "text",
    [
        f"knobs:\n  zero_stage: [0]\n  reduce_bucket_size: [{10**400}]\n",
        f"knobs:\n  zero_stage: [0]\n  reduce_bucket_size: [{'9' * 5000}]\n",
        f"knobs:\n  zero_stage: [0]\n  train_micro_batch_size_per_gpu: {{from: 1, to: {10**400}}}\n",
        f"at_once: {10**400}\nknobs:\n  zero_stage: [0]\n",
    ],
)
def test_a_bad_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    (tmp_path / "s.yaml").write_text(text)
    told = call(monkeypatch, capsys, *PLAN, "--space", str(tmp_path / "s.yaml"))
    refused(told)
    assert told[0] == 2


INTEGERS = ["-9" * 1, "0", str(2**31), str(2**63), str(10**30), "9" * 400, "9" * 5000, "x", "1e9", "nan"]


@pytest.mark.few(8)
@pytest.mark.parametrize("number", INTEGERS)
@pytest.mark.parametrize(
    "option", ["--gpus", "--nodes", "--seq-len", "--global-batch-size", "--image-size", "--tokens", "--lora"]
)
def test_numbers_of_options(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], option: str, number: str
) -> None:
    monkeypatch.setattr(tracing, "_run_tracer", lambda *_: ("", "not traced here"))  # a closed form suffices
    word = f"r=16,alpha={number}" if option == "--lora" else number
    refused(call(monkeypatch, capsys, *PLAN, f"{option}={word}"))


@FILES
@given(
    data=st.dictionaries(
        st.sampled_from(["train_batch_size", "zero_optimization", "optimizer", "fp16", "x"]), VALUES, max_size=4
    )
)
def test_any_ds_config(tmp_path: Path, data: Any) -> None:
    from autotune.problem.ds_config import load_ds_config

    (tmp_path / "ds.json").write_text(json.dumps(data))
    read_or_refused(lambda: load_ds_config(tmp_path / "ds.json"))


@FILES
@given(text=st.one_of(st.text(max_size=60), st.binary(max_size=60), st.from_regex(r"[\w.@:-]{1,9} slots=\d{1,30}")))
def test_any_hostfile(tmp_path: Path, text: str | bytes) -> None:
    from autotune.executors.cluster.transports import read_hostfile

    write(tmp_path / "hosts", text)
    read_or_refused(lambda: read_hostfile(tmp_path / "hosts"))


@FILES
@example(text=",")
@given(text=st.one_of(st.text(max_size=40), st.binary(max_size=40), VALUES.map(lambda one: json.dumps({"512": one}))))
def test_any_file_of_lengths(tmp_path: Path, text: str | bytes) -> None:
    from autotune.commands.setup import load_lengths

    write(tmp_path / "lengths", text)
    read_or_refused(lambda: load_lengths(tmp_path / "lengths"))


@FILES
@example(text='{"knobs":{"zero_stage":{"\\n":1}}}')
@given(
    text=st.one_of(
        st.text(max_size=60),
        st.binary(max_size=60),
        st.tuples(st.sampled_from(["zero_stage", "reduce_bucket_size", "offload_optimizer.ratio", "lora"]), VALUES).map(
            lambda one: json.dumps({"knobs": {one[0]: one[1]}})
        ),
    )
)
def test_any_space(tmp_path: Path, text: str | bytes) -> None:
    from autotune.problem.space import load_space

    write(tmp_path / "s.yaml", text)
    read_or_refused(lambda: load_space(str(tmp_path / "s.yaml")))


@FILES
@given(
    key=st.sampled_from(["num_hidden_layers", "hidden_size", "vocab_size", "text_config", "auto_map", "model_type"]),
    value=VALUES,
)
def test_any_model(tmp_path: Path, key: str, value: Any) -> None:
    from autotune.problem.models import resolve_model

    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", key: value}))
    read_or_refused(lambda: resolve_model(str(tmp_path / "config.json")))


def test_a_pipe_is_read_until_its_writers_close_it_and_is_empty_without_one(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert bounds.read_text(pipe, "F", "more") == ""
    code = "import sys; from pathlib import Path; from autotune.util.bounds import read_text; print(read_text(Path(sys.argv[1]), 'F', ''))"
    command = '"$0" -c "$1" <(sleep 0.1; echo first; sleep 0.1; echo second)'
    done = subprocess.run(["bash", "-c", command, sys.executable, code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["first", "second"]


def test_a_device_without_an_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "MOST_BYTES", 9)
    with pytest.raises(UserError, match=r"^F has more than 9 bytes: more$"):
        bounds.read_text(Path("/dev/zero"), "F", "more")


def write(path: Path, text: str | bytes) -> None:
    path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "replace"))


def read_or_refused(read: Any) -> None:
    try:
        read()
    except UserError as error:
        assert "\n" not in str(error)
        assert len(str(error)) < 1200
