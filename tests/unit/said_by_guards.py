"""A plugin of pytest that writes what guards say in each test, for `tools/goldens.py`.

The file is named by the variable SAID_BY_GUARDS.
"""

import collections
import json
import os
import pathlib

import pytest

SAID = pytest.StashKey[dict[str, dict[str, int]]]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Count a test's notices, by guard, kind and failures; no sentences."""
    from failurelab.guards.base import Guard

    said, leave = collections.Counter(), Guard._leave

    def recorded(guard, kind, message, failures=()):
        said[f"{type(guard).__name__} {kind} {' '.join(sorted(failures or guard.failures))}"] += 1
        return leave(guard, kind, message, failures)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Guard, "_leave", recorded)
        result = yield
    if said:
        item.config.stash.setdefault(SAID, {})[item.nodeid.removeprefix("tests/unit/")] = dict(sorted(said.items()))
    return result


def pytest_sessionfinish(session):
    """Write what was counted."""
    pathlib.Path(os.environ["SAID_BY_GUARDS"]).write_text(json.dumps(session.config.stash.get(SAID, {})))
