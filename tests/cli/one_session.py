"""Several scripts that are run in one session of preflight: their libraries are imported once."""

import contextlib
import dataclasses
import os
import sys

from failurelab_preflight.finding import Change
from failurelab_preflight.session import Session


def session_of(script, saved, python, variables, limit=600, processes=1):
    """Return a session of a script; what it saves goes to the new folder `saved`."""
    spec = {"script": str(script), "folder": str(script.parent), "module": "", "arguments": [], "steps": 3}
    spec |= {"real_model": False, "world_size": processes, "zero_stage": 0, "left_out": [], "visible": ""}
    saved.mkdir()
    return Session(saved, str(python), variables, spec, limit, lambda stage: None)


@contextlib.contextmanager
def scripts(folder, begin="", python=sys.executable, variables=None, processes=1, limit=600):
    """Inside, a function runs a text as FOLDER/train.py, with a change too, and returns what the run reports.

    Args:
        folder: of the script, and for what the session saves.
        begin: the imports that all of the scripts begin with.
        python: to run them in.
        variables: of the environment.
        processes: of the launch.
        limit: seconds for all of them.
    """
    path = folder / "train.py"
    path.write_text(begin)
    session = session_of(path, folder / "session", python, variables or {}, limit, processes=processes)
    with session.open():

        def run(text, change=None):
            files = {os.path.realpath(path): begin + text}
            change = change or Change()
            return session.run(dataclasses.replace(change, files=files | change.files))

        yield run
