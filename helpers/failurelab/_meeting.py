"""A port of this machine at which the processes of one launch meet."""

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def free_port() -> Iterator[int]:
    """Yield a port of 127.0.0.1 that no other program is given until the block ends.

    A port that is asked for and closed again can be another program's a moment later: then rank 0 finds it taken, and
    the others meet strangers there. So the socket stays bound and does not listen; rank 0 can listen on the same port
    beside it, for torch sets SO_REUSEADDR too.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]
