"""Executors run candidates: base.py defines the interface, local.py runs rank processes."""
