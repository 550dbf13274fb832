"""`--sync`: translate paths in texts between a folder's original place and its place on a node."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class PathMap:
    """Original folders of the tuner's machine and their places on this node.

    The tuner uses only the original places, which are the same for the ranks of all machines.
    """

    places: dict[str, str] = field(default_factory=dict)  # original place -> place on this node

    @property
    def back(self) -> PathMap:
        """Reverse translation."""
        return PathMap({new: old for old, new in self.places.items()})

    def path(self, text: str) -> str:
        """Return a text with every original place replaced."""
        for old, new in self.places.items():
            if old in text:
                pattern = rf"(?<![^=:,;'\"\s\[]){re.escape(old)}(?=$|[/:,;'\"\s\]])"
                text = new.join(re.split(pattern, text))
        return text

    def all_of(self, value: Any) -> Any:
        """Translate all texts of a JSON value."""
        if not self.places:
            return value
        if isinstance(value, str):
            return self.path(value)
        if isinstance(value, Mapping):
            return {self.all_of(key): self.all_of(one) for key, one in value.items()}
        if isinstance(value, Sequence):
            return [self.all_of(one) for one in value]
        return value
