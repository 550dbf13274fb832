"""Steps on a GPU: `steps.py` lists them, `runner.py` runs them, and each is a module whose `run(ground)` yields rows."""
