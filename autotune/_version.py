"""Version of this package, which `pyproject.toml` reads too, and the command that installs it."""

__version__ = "0.2.0"
ON_PYPI = False  # `.github/release.py --switch` sets it and changes the documents before the first release


def install_command(extra: str) -> str:
    """Return the pip command that installs this package with an extra: from PyPI, or from a checkout before the first release."""
    if ON_PYPI:
        return f"pip install 'deepspeed-autotune[{extra}]'"
    return f"pip install '.[{extra}]' in a checkout of autotune"
