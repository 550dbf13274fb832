"""Figures in the documents, taken from benchmarks/results."""
