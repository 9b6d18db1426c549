"""A class on one server: what the configuration on its page tells JupyterHub, and the command that starts a seat."""

import os
import re
import subprocess

import pytest
from tests.files import write_program
from traitlets.config import Config

from failurelab_course import eras

PAGE = eras.root() / "docs" / "class_server.md"


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Return a function that reads the configuration as JupyterHub does, for a clone in `tmp_path`."""
    monkeypatch.setenv("PATH", os.environ["PATH"])  # the configuration changes it
    (tmp_path / ".hub").mkdir()

    def load(**variables):
        for name in ("FAILURELAB_CERT", "FAILURELAB_KEY", "FAILURELAB_HUB_PORT"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        config = Config()
        names = {"__file__": str(tmp_path / ".hub" / "jupyterhub_config.py"), "get_config": lambda: config}
        exec(re.search(r"```python\n(.+?)```", PAGE.read_text(), re.DOTALL)[1], names)
        return config

    return load


def test_seats_fit_the_memory_and_no_other_machine_gets_in_without_https(load, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 64 * 2**18}.get)
    config = load()
    assert config.JupyterHub.active_server_limit == 44
    assert config.JupyterHub.bind_url == "http://127.0.0.1:8000"
    assert (tmp_path / ".hub" / "state").stat().st_mode & 0o777 == 0o700
    config = load(FAILURELAB_CERT="/c.pem", FAILURELAB_KEY="/c.key", FAILURELAB_HUB_PORT="443")
    assert (config.JupyterHub.bind_url, config.JupyterHub.ssl_cert) == ("https://:443", "/c.pem")


def test_a_seat_starts_in_the_learner_s_clone(load, tmp_path):
    """The command of a seat, run by bash; nbgitpuller and the server are stand-ins."""
    command = load().Spawner.cmd
    tools = tmp_path / ".hub" / "bin"
    write_program(tools / "gitpuller", '#!/bin/sh\ntest "$1" = "file://$COURSE" && mkdir -p "$3"\n')
    says = '#!/bin/sh\npwd; echo "$FAILURELAB_ROOT"; readlink .venv; ulimit -d; echo "$@"\n'
    write_program(tools / "jupyterhub-singleuser", says)
    home = tmp_path / "home"
    home.mkdir()
    variables = {"HOME": str(home), "COURSE": str(tmp_path), "PATH": "/usr/bin:/bin"}
    for _ in range(2):
        done = subprocess.run([*command, "--port=1"], env=variables, capture_output=True, text=True)
        clone = str(home / tmp_path.name)
        limit = str(6 * 2**20)  # KiB
        assert done.stdout.splitlines() == [clone, clone, str(tmp_path / ".venv"), limit, "--port=1"], done.stderr
    assert subprocess.run(command, env=variables | {"COURSE": ""}, capture_output=True).returncode == 0, "the old copy"
    variables["HOME"] = str(tmp_path / "nowhere")
    assert subprocess.run(command, env=variables, capture_output=True).returncode == 1
