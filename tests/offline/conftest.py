"""The offline bundle, whole: packed, installed with the network cut, used. `make pack-test`; minutes and gigabytes.

It needs root, for a network namespace with nothing in it. Elsewhere it is NOT RUN, with exit status 3.
"""

import subprocess

import pytest

NOT_RUN = 3


def pytest_configure(config):
    try:
        done = subprocess.run(["unshare", "-n", "true"], capture_output=True, text=True)
        why = done.stderr.strip()
    except OSError as error:
        why = str(error)
    if why:
        pytest.exit(f"NOT RUN: no network namespace can be made ({why}). Next: run it as root, on Linux", NOT_RUN)
