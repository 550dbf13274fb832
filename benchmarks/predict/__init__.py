"""Benchmarks of the predictor: peaks, step times, the allocator."""
