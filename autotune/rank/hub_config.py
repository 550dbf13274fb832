"""Print the configuration of a Hub model, in a separate process because the tuner imports no transformers.

Run as `python -m autotune.rank.hub_config [--trust-remote-code] NAME`. The last line of standard output is JSON: {"config":
{…}}, or {"error": "…"} with one line that gives the reason.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from typing import Any

_MAX_ERROR_CHARACTERS = 200


def configuration(name: str, *, trust_remote_code: bool) -> dict[str, Any]:
    """Return the model's config.json as transformers completes it. Raise like `AutoConfig.from_pretrained`."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    found = {key: value for key, value in config.to_dict().items() if key != "transformers_version"}
    if trust_remote_code:
        found["_name_or_path"] = name  # a rank loads the code from there
    return found


def answer(name: str, *, trust_remote_code: bool) -> dict[str, Any]:
    """Return the object to print."""
    try:
        with contextlib.redirect_stdout(sys.stderr):  # the model's own code may print
            return {"config": configuration(name, trust_remote_code=trust_remote_code)}
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return {"error": lines[0][:_MAX_ERROR_CHARACTERS]}


def main() -> None:
    """Print the configuration of the named Hub model as JSON."""
    parser = argparse.ArgumentParser(prog="python -m autotune.rank.hub_config", description=__doc__)
    parser.add_argument("--trust-remote-code", action="store_true")
    parser.add_argument("name")
    given = parser.parse_args()
    print(json.dumps(answer(given.name, trust_remote_code=given.trust_remote_code), default=str))


if __name__ == "__main__":
    main()
