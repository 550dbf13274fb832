"""A rank that says nothing at all."""

import time

if __name__ == "__main__":
    time.sleep(3600)
