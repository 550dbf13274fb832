"""`--sync`: texts that name a folder's old place name the new one on a node, and the other way round."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Moved:
    """Where folders of the tuner's machine lie on this one. The tuner itself hears of the old places only, which are the same
    for the ranks of all machines."""

    places: dict[str, str] = field(default_factory=dict)  # old place -> new one

    @property
    def back(self) -> Moved:
        """The same the other way round."""
        return Moved({new: old for old, new in self.places.items()})

    def path(self, text: str) -> str:
        """A text in which every mention of an old place is one of the new."""
        for old, new in self.places.items():
            if old in text:
                pattern = rf"(?<![^=:,;'\"\s\[]){re.escape(old)}(?=$|[/:,;'\"\s\]])"
                text = new.join(re.split(pattern, text))
        return text

    def all_of(self, value: Any) -> Any:
        """The same in all texts of what came as JSON."""
        if not self.places:
            return value
        if isinstance(value, str):
            return self.path(value)
        if isinstance(value, Mapping):
            return {self.all_of(key): self.all_of(one) for key, one in value.items()}
        if isinstance(value, Sequence):
            return [self.all_of(one) for one in value]
        return value
