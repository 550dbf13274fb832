"""The steps of `gpu_acceptance.py`, one module each: `run(ground)` yields rows as they are measured."""
