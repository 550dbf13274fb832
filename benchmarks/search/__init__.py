"""Benchmarks of searches: replayed, recorded and beside DeepSpeed's own tuner."""
