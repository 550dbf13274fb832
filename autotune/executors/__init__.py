"""Where candidates are run: base.py says what the tuner needs, local.py runs rank processes on this machine."""
