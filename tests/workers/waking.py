"""A module that calls cuInit when it is imported: what no module that the fork server preloads may do."""

import ctypes

RESULT: int = ctypes.CDLL("libcuda.so.1").cuInit(0)
