"""autotune: finds the fastest DeepSpeed config that fits, by measuring it.

Importing this package imports neither torch nor deepspeed; see docs/architecture.md for the rooms of the house.
"""

__version__ = "0.1.0"
