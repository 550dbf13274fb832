"""The smallest kernel of Triton: launching it has a module loaded. Imported only where Triton is."""

# Triton reads a kernel's annotations itself, so it has only those that are meant for Triton.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl


@triton.jit
def add_one(pointer, size: tl.constexpr):
    at = tl.arange(0, size)
    tl.store(pointer + at, tl.load(pointer + at) + 1.0)
