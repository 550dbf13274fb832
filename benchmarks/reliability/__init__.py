"""Benchmarks of what must not grow, be lost or be left: README.md."""
