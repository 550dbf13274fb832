"""Benchmarks of trials: their cost, and their agreement with plain training."""
