"""Benchmarks of several nodes."""
