"""What the fork server imports: the libraries that the labs need, once for all checks of an era.

Forking is safe there because that process computes nothing: it has one thread, and no parallel region of torch ever
ran. It sees no GPU either.
"""

import os
import threading

from failurelab_course.labs.checker import (
    measure,  # noqa: F401  torch and transformers
    process,
)

process.PARENT = os.getpid()
process.end_with_parent()
process.BROKEN = process.import_needs()
if threading.active_count() != 1:
    raise RuntimeError("a forked check could hang: the fork server has more than one thread")
