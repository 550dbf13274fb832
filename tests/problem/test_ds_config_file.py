"""DeepSpeed configs as DeepSpeed reads them."""

import base64
import json
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.problem.ds_config import in_new_names, named_config, parsed_config, read_config

COMMENTED = """
// ours, since May
{
  "train_batch_size": 8,  # over all ranks
  "zero_optimization": {
    stage: 2
    "reduce_bucket_size": 5e8, /* as DeepSpeed's own */
  },
}
"""
SAYS = {"train_batch_size": 8, "zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8}}


def test_comments_and_commas_to_spare_say_nothing() -> None:
    found = parsed_config(COMMENTED)
    assert found == SAYS == parsed_config(json.dumps(SAYS))
    assert type(found["zero_optimization"]) is dict


@pytest.mark.parametrize("text", ["{", "two\nlines"])
def test_what_is_neither_is_no_json(text: str) -> None:
    with pytest.raises(json.JSONDecodeError):
        parsed_config(text)


def test_a_large_file_is_read_as_json_alone() -> None:
    data = f'{{"train_batch_size": 8, "text": "{"x" * (1 << 20)}"}}'
    assert parsed_config(data)["train_batch_size"] == 8
    with pytest.raises(json.JSONDecodeError):
        parsed_config(f"{data} // which would take minutes")


def test_a_config_by_name_or_in_base64(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(COMMENTED)
    assert read_config(tmp_path / "ds.json") == SAYS
    assert named_config(tmp_path / "ds.json") == named_config(str(tmp_path / "ds.json")) == SAYS
    assert named_config(base64.urlsafe_b64encode(COMMENTED.encode()).decode()) == SAYS
    for name in ("gone.json", "none", "12345678"):  # the last is base64 of no text, the one before of no object
        with pytest.raises(FileNotFoundError, match=name):
            named_config(name)


def test_plain_json_needs_no_reader_of_hjson() -> None:
    code = "import sys; from autotune.problem.ds_config import parsed_config; parsed_config('{}'); print('hjson' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "False\n", done.stderr


@pytest.mark.parametrize(
    "zero",
    [
        {"stage": 2, "cpu_offload": True},
        {"stage": 2, "cpu_offload": False},
        {"stage": 3, "cpu_offload": True, "cpu_offload_param": True, "sub_group_size": 10},
        {"stage": 3, "stage3_gather_fp16_weights_on_model_save": True},
        {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
        True,
        False,
    ],
)
def test_new_names_are_those_that_deepspeed_itself_reads_of_the_old(zero: dict | bool) -> None:
    config_of = pytest.importorskip("deepspeed.runtime.zero.config").get_zero_config
    own = {"zero_optimization": zero, "allgather_size": 1000}
    written = json.dumps(own)
    found = in_new_names(own)
    assert json.dumps(own) == written, "the script's own stays as it is"
    assert isinstance(found["zero_optimization"], dict)
    assert not [key for key in found["zero_optimization"] if key.startswith("cpu_") or "fp16" in key]

    def read(config: dict) -> dict:
        old = (
            "cpu_offload",
            "cpu_offload_param",
            "cpu_offload_use_pin_memory",
            "stage3_gather_fp16_weights_on_model_save",
        )
        return config_of(config).model_dump(exclude=set(old))

    assert read(found) == read(own)
