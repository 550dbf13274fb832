"""Benchmarks of the certificate: a winner trains the same."""
