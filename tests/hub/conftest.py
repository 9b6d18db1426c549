"""A class on one server, as it is held: `make class` starts a real JupyterHub, logs learners in, and lets them work.

It needs root, for each learner is a user, and a few minutes. Elsewhere it is NOT RUN, with exit status 3.
"""

import pathlib
import sys
import tempfile

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import hub

NOT_RUN = 3


def pytest_configure(config):
    if why := hub.missing():
        pytest.exit(f"NOT RUN: {why}", returncode=NOT_RUN)


@pytest.fixture
def room():
    """A folder for one class, short enough for a socket's path, and readable by learners."""
    with tempfile.TemporaryDirectory(prefix="class-", ignore_cleanup_errors=True) as folder:
        yield pathlib.Path(folder)
