"""A module that calls cuInit and starts a thread when it is imported, which no module that the fork server preloads may do."""

import ctypes
import threading
import time

RESULT: int = ctypes.CDLL("libcuda.so.1").cuInit(0)
threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
