"""The version, where `pyproject.toml` reads it too."""

__version__ = "0.1.0"
