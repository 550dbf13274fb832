"""Link this environment's torch, and the libraries of its CUDA build, into another: `python .ci/share_torch.py ENVIRONMENT`."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

_LIBRARIES = ("nvidia-", "cuda-", "triton")  # distributions that only torch needs


def main() -> None:
    """Make a link for each top-level file and folder of these distributions."""
    (site,) = Path(sys.argv[1]).glob("lib/python*/site-packages")
    for distribution in metadata.distributions():
        name = distribution.metadata["Name"].lower()
        if name != "torch" and (name == "nvidia-ml-py" or not name.startswith(_LIBRARIES)):
            continue
        tops = {file.parts[0] for file in distribution.files or []} - {"..", "__pycache__"}
        for top in tops:
            link = site / top
            if not link.exists():
                link.symlink_to(Path(str(distribution.locate_file(top))).resolve())


if __name__ == "__main__":
    main()
