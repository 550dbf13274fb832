"""Reads a model's configuration from the Hugging Face Hub, for a parent that must not import transformers.

    python -m autotune.rank.hub [--trust-remote-code] NAME

prints one line of JSON: `{"config": {...}}`, or `{"error": "first line of what went wrong"}`.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def read(name: str, trust_remote_code: bool) -> dict[str, Any]:
    """The configuration of a Hub id as plain JSON, without the transformers version that wrote it."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    except Exception as error:
        lines = str(error).strip().splitlines()
        return {"error": lines[0] if lines else type(error).__name__}
    data = {key: value for key, value in config.to_dict().items() if key != "transformers_version"}
    if trust_remote_code:
        data["_name_or_path"] = name  # where its code is found again
    return {"config": json.loads(json.dumps(data, default=str))}


def main() -> None:
    *flags, name = sys.argv[1:]
    print(json.dumps(read(name, "--trust-remote-code" in flags)))


if __name__ == "__main__":
    main()
