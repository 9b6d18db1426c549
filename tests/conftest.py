"""Waiting for processes: by what the system says of them, and by a pipe; no test sleeps and looks again."""

import os
import select
import signal

import pytest

PATIENCE = 300  # seconds until a test gives up: a limit against hanging, which no test waits for


@pytest.fixture
def gone():
    """Return a function that waits until processes have ended; it ends and returns those that have not."""

    def wait(pids):
        left = []
        for pid in pids:
            try:
                handle = os.pidfd_open(pid)
            except ProcessLookupError:
                continue
            if not select.select([handle], [], [], PATIENCE)[0]:
                os.kill(pid, signal.SIGKILL)
                left.append(pid)
            os.close(handle)
        return left

    return wait


@pytest.fixture
def pipe():
    """Return a function that makes a named pipe at a path; it returns one that waits for what is written there."""
    handles = []

    def make(path):
        os.mkfifo(path)
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        handles.append(handle)

        def read():
            assert select.select([handle], [], [], PATIENCE)[0], f"nothing was written to {path}"
            return os.read(handle, 65536).decode()

        return read

    yield make
    for handle in handles:
        os.close(handle)
