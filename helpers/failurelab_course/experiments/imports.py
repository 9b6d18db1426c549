"""Large libraries imported a quarter faster: without a look for garbage, of which an import leaves little.

A stack makes half a million objects when it is imported, and Python's collector looks through them again and again
meanwhile, then at the beginning of each training. Standard library alone, so that a kernel starts fast.
"""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Inside, the collector rests; what is there at the end is left out of each later look (`gc.freeze`)."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()
