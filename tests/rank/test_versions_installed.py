"""Facts that the tuner keeps as data, against the libraries that are installed."""

import copy
import re
from pathlib import Path

import pytest

from autotune.predict.features import installed_deepspeed
from autotune.problem.job import Job
from autotune.problem.knobs import READ
from autotune.problem.models import default_task, resolve_model, shipped_models
from autotune.problem.space import DS_TOP_LEVEL, DS_ZERO_KEYS


@pytest.mark.few(15)
@pytest.mark.parametrize("name", [name for name, spec in shipped_models().items() if spec.parameters])
def test_parameter_counts_are_the_published_ones(name: str) -> None:
    import torch
    from transformers import CONFIG_MAPPING
    from transformers import __version__ as transformers_version

    from autotune.rank.model_builder import task_model, transformers_config

    spec = resolve_model(name)
    if spec.config["model_type"] not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers_version} knows no {spec.config['model_type']}")
    shipped = copy.deepcopy(spec.config)
    with torch.device("meta"):
        model = task_model(transformers_config(spec), Job(spec, 1, 32, "bf16", task=default_task(spec.config)))
    assert sum(parameter.numel() for parameter in model.parameters()) == spec.parameters
    assert spec.config == shipped, "the shipped configuration decides cache keys of later jobs in this process"


def test_deepspeed_keys_are_those_of_the_installed_deepspeed() -> None:
    import deepspeed
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    installed = set()
    for name, field in DeepSpeedZeroConfig.model_fields.items():
        installed |= {name, *([field.alias] if field.alias else [])}
    deprecated = {name for name in installed if name.startswith(("cpu_offload", "stage3_gather_fp16"))}
    assert installed - deprecated <= DS_ZERO_KEYS
    read_elsewhere = {
        "mics_shard_size",
        "mics_hierarchical_params_gather",
        "zeropp_loco_param",
    }  # runtime/zero/mics.py …
    if installed_deepspeed() >= READ:  # an older one knows fewer
        assert DS_ZERO_KEYS - installed <= read_elsewhere
        sources = Path(deepspeed.__file__).parent.rglob("*.py")
        spelled = {
            word for path in sources for word in re.findall(r"[\"'](\w+)[\"']", path.read_text(errors="replace"))
        }
        assert spelled >= DS_TOP_LEVEL, "attributes of DeepSpeedConfig are no keys"
    assert {"zero_optimization", "bf16", "gradient_clipping"} <= DS_TOP_LEVEL
