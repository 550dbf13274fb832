"""Arithmetic of a named model's training, from the typed option and the user's DeepSpeed config."""

from __future__ import annotations

from typing import Any

from autotune.problem.hardware import Hardware


def precision_of(typed: str | None, config: dict[str, Any], hardware: Hardware) -> tuple[str, dict[str, Any]]:
    """Return the precision, and the config without settings that contradict it.

    The typed precision comes first, then the one that the config enables, then the best of the device that the config does not
    disable.
    """
    precision = typed or _precision(config, hardware)
    section = config.get(precision)
    if isinstance(section, dict):
        config = {**config, precision: {**section, "enabled": True}}
    return precision, config


def _precision(config: dict[str, Any], hardware: Hardware) -> str:
    said = {name: section.get("enabled") for name in ("bf16", "fp16") if isinstance(section := config.get(name), dict)}
    for name, enabled in said.items():
        if enabled is True:
            return name
    if hardware.device == "cpu":
        return "fp32"
    best = "bf16" if hardware.bf16 else "fp16"
    return "fp32" if said.get(best) is False else best
