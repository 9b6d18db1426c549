#!/usr/bin/env python3
"""Build the course's site into .site/html, from what is committed; nothing is executed.

    python3 docs/make_site.py            build
    python3 docs/make_site.py --test     build what is missing, then open it in a browser (check_site.py)

The site's packages live in an environment of their own, .site/env, so that the course's locks stay as they are.
"""

import hashlib
import os
import pathlib
import shutil
import subprocess
import sys
import time

try:
    import site_pages
except ModuleNotFoundError as error:  # tomllib came with Python 3.11
    version = sys.version.split()[0]
    raise SystemExit(f"ERROR Python {version} runs this, 3.11 is needed. Next: make site PYTHON=python3.11") from error

SITE = site_pages.ROOT / ".site"
ENV, SOURCE, HTML = SITE / "env", SITE / "source", SITE / "html"
LOCK = site_pages.ROOT / "docs" / "requirements.txt"


def environment() -> pathlib.Path:
    """Make .site/env from its lock, where it is not made yet; return its Python.

    Raises:
        SystemExit: a package could not be installed; the installer's last line says why.
    """
    python, stamp = ENV / "bin" / "python", ENV / "lock"
    wanted = hashlib.sha256(LOCK.read_bytes() + str(sys.version_info[:2]).encode()).hexdigest()
    if python.exists() and stamp.exists() and stamp.read_text() == wanted:
        return python
    print("site: .site/env is made from docs/requirements.txt", flush=True)
    shutil.rmtree(ENV, ignore_errors=True)
    own = site_pages.ROOT / ".venv" / "bin" / "uv"
    uv = str(own) if own.exists() else shutil.which("uv")
    links = os.environ.get("UV_FIND_LINKS") or os.environ.get("PIP_FIND_LINKS")
    variables = {**os.environ, **({"UV_FIND_LINKS": links, "PIP_FIND_LINKS": links} if links else {})}
    if uv:
        steps = [[uv, "venv", "-q", "--python", sys.executable, str(ENV)]]
        steps += [[uv, "pip", "install", "-q", "--python", str(python), "-r", str(LOCK)]]
    else:
        steps = [[sys.executable, "-m", "venv", str(ENV)]]
        steps += [[str(python), "-m", "pip", "install", "-q", "-r", str(LOCK)]]
    for step in steps:
        done = subprocess.run(step, env=variables, capture_output=True, text=True)
        if done.returncode:
            said = (done.stderr + done.stdout).strip().splitlines() or ["no message"]
            raise SystemExit(
                f"ERROR the site's packages could not be installed: {said[-1].strip()} "
                "Next: check the network, which the first build needs; then run the same command again."
            )
    stamp.write_text(wanted)
    return python


def build(python: pathlib.Path) -> None:
    """Stage the pages and build them. A warning of Sphinx, such as a link that leads nowhere, is an error.

    Raises:
        SystemExit: Sphinx found something; what it said stands above.
    """
    start = time.monotonic()
    for folder in (SOURCE, HTML):
        shutil.rmtree(folder, ignore_errors=True)
    site_pages.stage(SOURCE)
    docs = site_pages.ROOT / "docs"
    # Nothing is kept from an earlier build: a page that was deleted cannot linger, and the time is that of a fresh one.
    command = [str(python), "-m", "sphinx", "-b", "html", "-c", str(docs), "-d", str(SITE / "doctrees"), "-E", "-q"]
    done = subprocess.run([*command, "-W", "--keep-going", str(SOURCE), str(HTML)])
    if done.returncode:
        raise SystemExit("ERROR the site was not built: the lines above say where")
    # GitHub Pages would leave out folders that begin with an underscore.
    (HTML / ".nojekyll").touch()
    pages = len(list(HTML.rglob("*.html")))
    seconds = time.monotonic() - start
    print(f"site: {pages} pages in {seconds:.0f} s; open {HTML.relative_to(site_pages.ROOT)}/index.html")


def main() -> int:
    """Build, or with --test build what is missing and check it; return the exit status."""
    os.chdir(site_pages.ROOT)
    python = environment()
    if "--test" not in sys.argv[1:]:
        build(python)
        return 0
    if not (HTML / "index.html").exists():
        build(python)
    return subprocess.run([str(python), str(site_pages.ROOT / "docs" / "check_site.py")]).returncode


if __name__ == "__main__":
    sys.exit(main())
