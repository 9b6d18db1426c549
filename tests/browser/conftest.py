"""JupyterLab in a real browser, on a copy of the course: what only shows there is tested there.

papermill and nbval run a notebook's cells; they do not see a table that is cut off, a page of warnings, or a cell that
says nothing for a minute. `make browser` does. It has an environment of its own (`.browser/`), so that the course's
locks stay as they are, drives the system's Chromium, and keeps what it saw in `.course/browser/`.

Without a Chromium it is NOT RUN, with exit status 3.
"""

import contextlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import time
import urllib.request

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PICTURES = ROOT / ".course" / "browser"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
NOT_RUN = 3
SECONDS = 120  # generous: nothing here is about speed


def browser_path() -> str | None:
    """Return the Chromium to drive: FAILURELAB_CHROMIUM, or the first on the path."""
    named = os.environ.get("FAILURELAB_CHROMIUM")
    return shutil.which(named) if named else next(filter(None, map(shutil.which, BROWSERS)), None)


def pytest_configure(config):
    if browser_path() is None:
        pytest.exit(
            f"NOT RUN: no Chromium is on the path ({', '.join(BROWSERS)}). Next: apt install chromium, or set "
            "FAILURELAB_CHROMIUM to one.",
            returncode=NOT_RUN,
        )


class Lab:
    """A JupyterLab that runs: `url`, `token`, `folder` (the copy of the course that it shows)."""

    def __init__(self, url: str, token: str, folder: pathlib.Path):
        self.url, self.token, self.folder = url, token, folder

    def states(self, path: str) -> list[str]:
        """Return the state of each kernel that runs for the file at `path`."""
        address = f"{self.url}/api/sessions"
        request = urllib.request.Request(address, headers={"Authorization": f"token {self.token}"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            return [each["kernel"]["execution_state"] for each in json.load(answer) if each["path"] == path]


def copy_course(folder: pathlib.Path) -> pathlib.Path:
    """Copy what a learner works on; the environments are linked, for nothing is written there."""
    left_out = shutil.ignore_patterns(
        ".venv", ".eras", ".browser", ".course", ".git", "__pycache__", ".*_cache", ".hypothesis", "build", "tests"
    )
    shutil.copytree(ROOT, folder, ignore=left_out)
    for name in (".venv", ".eras"):
        (folder / name).symlink_to(ROOT / name)
    return folder


@pytest.fixture(scope="session")
def lab(tmp_path_factory):
    """JupyterLab on a copy of the course, at a port and with a token that it chooses, which its own file tells."""
    place = tmp_path_factory.mktemp("lab")
    course = copy_course(place / "course")
    own = {
        "JUPYTER_CONFIG_DIR": place / "config",
        "JUPYTER_DATA_DIR": place / "data",
        "JUPYTER_RUNTIME_DIR": place / "runtime",
        "JUPYTERLAB_SETTINGS_DIR": place / "settings",
        "JUPYTERLAB_WORKSPACES_DIR": place / "workspaces",
        "IPYTHONDIR": place / "ipython",
        "FAILURELAB_ROOT": course,
        "FAILURELAB_STATE": place / "labs.json",
        "FAILURELAB_EVIDENCE": place / "evidence",
        "OMP_NUM_THREADS": "1",
    }
    # JupyterLab asks once whether to fetch its news from the network.
    settings = place / "settings" / "@jupyterlab" / "apputils-extension" / "notification.jupyterlab-settings"
    settings.parent.mkdir(parents=True)
    settings.write_text('{"fetchNews": "false", "checkForUpdates": false}')
    PICTURES.mkdir(parents=True, exist_ok=True)
    command = [str(ROOT / ".venv" / "bin" / "jupyter"), "lab", "--no-browser", "--ServerApp.ip=127.0.0.1"]
    command += [f"--notebook-dir={course}"]
    if os.geteuid() == 0:
        command.append("--allow-root")
    with open(PICTURES / "jupyter.log", "wb") as log:
        server = subprocess.Popen(
            command, env=os.environ | {key: str(value) for key, value in own.items()}, stdout=log, stderr=log
        )
    try:
        listens = _wait(lambda: _read_address(place / "runtime"), f"see {log.name}: JupyterLab is not there")
        yield Lab(listens["url"].rstrip("/"), listens["token"], course)
    finally:
        server.terminate()  # and it ends its kernels
        server.wait(SECONDS)


def _read_address(folder: pathlib.Path) -> dict | None:
    with contextlib.suppress(StopIteration, ValueError):  # it is not there, or not whole
        return json.loads(next(folder.glob("jpserver-*.json")).read_text())
    return None


def _wait(condition, what: str, seconds: float = SECONDS):
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what} after {seconds:.0f} s"
        time.sleep(0.2)
    return value


@pytest.fixture(scope="session")
def chromium():
    """A headless Chromium; it reaches this machine only."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=browser_path(), args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture
def page(chromium, lab, request):
    """A fresh page of JupyterLab; what it shows at the test's end is kept."""
    context = chromium.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(60_000)
    opened = context.new_page()
    opened.goto(f"{lab.url}/lab?token={lab.token}&reset")
    opened.wait_for_selector("#jp-main-dock-panel", timeout=SECONDS * 1000)
    yield opened
    opened.screenshot(path=PICTURES / f"end-of-{re.sub(r'[^a-z0-9]+', '-', request.node.name)}.png")
    context.close()


@pytest.fixture
def wait():
    """`wait(condition, what)`: ask until the condition holds."""
    return _wait


@pytest.fixture(scope="session")
def pictures():
    """The folder where screenshots are kept, to be looked at."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    return PICTURES
