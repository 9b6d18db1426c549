"""Which files come first, the command in this process, and waiting for processes: by the system's word, and by a pipe.

No test sleeps and looks again.
"""

import gc
import io
import os
import pathlib
import select
import signal
import subprocess
import sys
from unittest import mock

import pytest
from tests import kept

from failurelab.errors import OWN_ERRORS
from failurelab_course import eras
from failurelab_preflight import session

# A shell without a terminal starts `make test &` with SIGINT ignored, and every process below it inherits that: a test
# that sends Ctrl-C to a command would wait for nothing. With a handler here, a child's begins as by default.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A guard's or preflight's own error ends a test, here and in every process below, and is no "could not check".
os.environ[OWN_ERRORS] = "raise"
os.environ["HF_HUB_OFFLINE"] = "1"  # tests have no network
kept.USUAL |= os.environ
kept.DIFFER |= {*session._SILENT, *session._OF_A_LAUNCH}

# While tests are collected, what they import is: large libraries leave little garbage, and to look through what they
# make takes a quarter of the time.
gc.disable()

# The files that take more than some twelve seconds, the longest first (`--durations` tells). The cheap ones come before
# them: most mistakes show there. A worker takes its next file when two tests are left of the one that it has.
LONG = """
    labs/units_in_every_era notebooks/notebooks cli/preflight notebooks/diffs cli/examples labs/checker
    unit/ranks cli/magics notebooks/course unit/preflight_reward unit/zero3 unit/textbook
    cli/preflight_ranks cli/preflight_step unit/guard_faults unit/preflight_step cli/preflight_forms
    notebooks/alone unit/names unit/textbook_options unit/textbook_algorithms cli/diagnose notebooks/torchrun
    unit/preflight_repairs unit/textbook_turns
"""
PATIENCE = 300  # seconds until a test gives up: a limit against hanging, which no test waits for


def pytest_collection_modifyitems(items):
    """Put the cheap files first and then the longest, so that two workers end together."""
    folder = pathlib.Path(__file__).parent
    place = {folder / name.replace("/", "/test_"): number for number, name in enumerate(LONG.split())}
    items.sort(key=lambda item: place.get(item.path.with_suffix(""), -1))


@pytest.fixture(autouse=True)
def same_environment():
    """What a test's script sets in its environment, the next test does not have: scripts choose a GPU so."""
    with mock.patch.dict(os.environ):
        yield


# A stack that is not there is no failure of what is tested in it, and no pass.


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call):
    """Tell a test that a stack was missing for, or broken, from one that failed."""
    report = yield
    if report.failed and call.excinfo and call.excinfo.errisinstance(eras.EraError):
        report.environment = " ".join(str(call.excinfo.value).split())
    return report


def pytest_report_teststatus(report):
    """Count it by its own name; it stays a failure of the run."""
    return ("environment", "N", "ENVIRONMENT") if hasattr(report, "environment") else None


def pytest_terminal_summary(terminalreporter):
    """Name each."""
    for report in terminalreporter.stats.get("environment", ()):
        terminalreporter.write_line(f"ENVIRONMENT {report.nodeid}: {report.environment}")


def pytest_collection_finish():
    """Let the collector begin, without what was imported."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def kept_processes(request):
    """What preflight starts in a stack is forked from what is kept for it, but for tests that have `own_processes`."""
    if "own_processes" in request.fixturenames:
        yield
        return
    with mock.patch.object(session, "subprocess", kept):
        yield


@pytest.fixture
def own_processes():
    """For tests of what is left behind by processes, or of what they are started with."""


@pytest.fixture
def own_errors_are_told(monkeypatch):
    """For tests of what a user is told of an error of this package's own."""
    monkeypatch.delenv(OWN_ERRORS)


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


@pytest.fixture
def failurelab(monkeypatch, capsys):
    """Return a function that runs the command `failurelab` in this process, which has imported all that it needs."""
    from failurelab.__main__ import main

    def run(*words, stdin=""):
        command = ["failurelab", *map(str, words)]
        monkeypatch.setattr(sys, "argv", command)
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        capsys.readouterr()
        status = main()
        return subprocess.CompletedProcess(command, status, *capsys.readouterr())

    handler = signal.getsignal(signal.SIGTERM)
    yield run
    signal.signal(signal.SIGTERM, handler)
