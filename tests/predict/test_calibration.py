"""What is believed before anything is measured."""

import dataclasses

import pytest

from autotune.predict.calibration import QUIRKS, TIME, Prior, time_priors
from autotune.problem.hardware import Hardware, detect, named_hardware

OF_PARAMETERS = {"comm", "reduce", "pcie", "cpu_adam", "optimizer", "collectives"}


def believed(hardware: Hardware, untraced: bool = False, counted: bool = True) -> dict[str, Prior]:
    return dict(zip([*TIME, *QUIRKS], time_priors(hardware, 1.0, untraced, counted), strict=True))


def test_on_gpus_no_kind_of_config_is_expected_to_be_slower_than_predicted() -> None:
    priors = believed(named_hardware("a100-80gb", 8))
    assert {name: (priors[name].mean, priors[name].sigma) for name in QUIRKS} == {
        name: (0.0, sigma) for name, sigma in QUIRKS.items()
    }


def test_on_cpu_ranks_later_stages_are() -> None:
    priors = believed(detect("cpu", 2))
    means = [priors[f"stage{stage}"].mean for stage in (1, 2, 3)]
    assert 0 < means[0] < means[1] < means[2]


@pytest.mark.parametrize("threads", [None, 16])
@pytest.mark.parametrize("counted", [True, False])
def test_of_an_untraced_model_only_what_counted_parameters_decide_is_as_sure(
    counted: bool, threads: int | None
) -> None:
    hardware = dataclasses.replace(named_hardware("a100-80gb", 8), threads=threads)
    sure, unsure = believed(hardware), believed(hardware, untraced=True, counted=counted)
    wider = {name: unsure[name].sigma / sure[name].sigma for name in TIME}
    assert wider == pytest.approx({name: 1.0 if counted and name in OF_PARAMETERS else 3.0 for name in TIME})
