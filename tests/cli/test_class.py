"""A class on one server: the hub's configuration and its page say the same, and the ledger said it first."""

import os
import subprocess

from traitlets.config import Config

from failurelab_course import eras
from failurelab_course.ledger import records as evidence

ROOT = eras.root()
CONFIG = ROOT / "configs" / "hub" / "jupyterhub_config.py"
PAGE = (ROOT / "docs" / "class_server.md").read_text()


def load(folder, monkeypatch, **variables):
    """Return the configuration as JupyterHub reads it, for a clone in `folder`."""
    monkeypatch.setenv("PATH", os.environ["PATH"])  # the configuration changes it
    for name in ("FAILURELAB_CERT", "FAILURELAB_KEY", "FAILURELAB_HUB_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    (folder / ".hub").mkdir(exist_ok=True)
    config = Config()
    names = {"__file__": str(folder / "configs" / "hub" / CONFIG.name), "get_config": lambda: config}
    exec(compile(CONFIG.read_text(), CONFIG.name, "exec"), names)
    return config


def test_the_page_says_what_the_ledger_and_the_configuration_say(tmp_path, monkeypatch):
    """Figures of the table, memory of a seat, limits; and no other machine reaches the class without HTTPS."""
    records = evidence.read_ledger(ROOT / "evidence" / "cpu.json")
    measured = [record["figures"] for record in records if record["source"] == "class"]
    assert len(measured) == 3
    for run in measured:
        sizes = [run[f"{name}_mib"] for name in ("own", "shared", "together", "largest_data")]
        cells = [run["seats"], *(f"{value:.0f}" for value in (*sizes, run["cpu_seconds"], run["seconds"]))]
        assert f"| {' | '.join(map(str, cells))} |" in PAGE
    own, shared = (max(run[name] for run in measured) / 1024 for name in ("own_mib", "shared_mib"))
    assert f"Seats = (GiB of memory - {shared + 1:.1f}) / {own:.1f}:" in PAGE  # a GiB is the system's
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 64 * 2**18}.get)
    config = load(tmp_path, monkeypatch)
    assert config.JupyterHub.active_server_limit == int((64 - 1.1) / 1.4)
    assert config.JupyterHub.bind_url == "http://127.0.0.1:8000"
    assert (tmp_path / ".hub" / "state").stat().st_mode & 0o777 == 0o700
    assert f"prlimit --data={6 * 2**30} choom" in config.Spawner.cmd[2] and "6 GiB of data a process" in PAGE
    config = load(tmp_path, monkeypatch, FAILURELAB_CERT="/c.pem", FAILURELAB_KEY="/c.key", FAILURELAB_HUB_PORT="443")
    assert (config.JupyterHub.bind_url, config.JupyterHub.ssl_cert) == ("https://:443", "/c.pem")


def test_a_seat_starts_in_the_learner_s_clone(tmp_path, monkeypatch):
    """The command of a seat, run by bash; nbgitpuller and the server are stand-ins."""
    command = load(tmp_path, monkeypatch).Spawner.cmd
    tools = tmp_path / ".hub" / "bin"
    tools.mkdir()
    (tools / "gitpuller").write_text('#!/bin/sh\ntest "$1" = "file://$COURSE" && mkdir -p "$3"\n')
    (tools / "jupyterhub-singleuser").write_text('#!/bin/sh\npwd; echo "$FAILURELAB_ROOT"; readlink .venv; echo "$@"\n')
    for tool in tools.iterdir():
        tool.chmod(0o755)
    home = tmp_path / "home"
    home.mkdir()
    variables = {"HOME": str(home), "COURSE": str(tmp_path), "PATH": "/usr/bin:/bin"}
    for _ in range(2):
        done = subprocess.run([*command, "--port=1"], env=variables, capture_output=True, text=True)
        clone = str(home / tmp_path.name)
        assert done.stdout.splitlines() == [clone, clone, str(tmp_path / ".venv"), "--port=1"], done.stderr
    assert subprocess.run(command, env=variables | {"COURSE": ""}, capture_output=True).returncode == 0, "the old copy"
    variables["HOME"] = str(tmp_path / "nowhere")
    assert subprocess.run(command, env=variables, capture_output=True).returncode == 1
