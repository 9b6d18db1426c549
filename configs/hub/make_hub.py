#!/usr/bin/env python3
"""Make .hub: JupyterHub, its users' servers and its proxy, in an environment of their own; nothing once all is there.

    python configs/hub/make_hub.py

The course's locks stay as they are: a learner's notebooks run in .venv and .eras, and only the server in .hub. What is
installed is pinned with checksums: requirements.txt (Python packages, and node as one of them) and package-lock.json.
"""

import compileall
import hashlib
import json
import os
import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "helpers"))
from failurelab_course import eras  # noqa: E402

HERE, HUB, TODAY = ROOT / "configs" / "hub", ROOT / ".hub", ROOT / ".venv"
LOCKS = ("requirements.txt", "package.json", "package-lock.json")


def make() -> bool:
    """Make .hub where it is missing or of another lock; return whether it was made.

    Raises:
        SystemExit: the course is not set up, or something could not be installed.
    """
    python, stamp = HUB / "bin" / "python", HUB / "lock"
    text = b"".join((HERE / name).read_bytes() for name in LOCKS) + str(sys.version_info[:2]).encode()
    wanted = hashlib.sha256(text).hexdigest()
    if python.exists() and stamp.exists() and stamp.read_text() == wanted:
        return False
    if not (TODAY / "bin" / "uv").exists():
        raise SystemExit("ERROR the course is not set up: .venv is missing. Next: make setup")
    print("class: .hub is made, JupyterHub and its proxy (0.5 GB)", flush=True)
    state = HUB / "state"
    for old in HUB.iterdir() if HUB.is_dir() else ():
        if old != state:  # users and their cookies outlive an upgrade
            shutil.rmtree(old) if old.is_dir() and not old.is_symlink() else old.unlink()
    uv = str(TODAY / "bin" / "uv")
    base = getattr(sys, "_base_executable", None) or sys.executable
    # JupyterHub needs no torch: links to a torch of one's own would only hide the packages that are pinned here.
    plain = {key: value for key, value in os.environ.items() if key not in ("UV_FIND_LINKS", "PIP_FIND_LINKS")}
    _step([uv, "venv", "--quiet", "--allow-existing", "--python", base, str(HUB)], plain)
    install = [uv, "pip", "install", "--quiet", "--compile-bytecode", "--python", str(python), "--require-hashes"]
    _step([*install, "-r", str(HERE / "requirements.txt")], plain)
    for name in LOCKS[1:]:
        shutil.copyfile(HERE / name, HUB / name)
    path = {"PATH": f"{HUB / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    _step([str(HUB / "bin" / "npm"), "ci", "--ignore-scripts", "--no-audit", "--no-fund"], plain | path)
    stamp.write_text(wanted)
    return True


def _step(command: list[str], variables: dict[str, str]) -> None:
    done = subprocess.run(command, env=variables, cwd=HUB if HUB.is_dir() else ROOT, capture_output=True, text=True)
    if done.returncode:
        said = [line.strip() for line in (done.stderr + done.stdout).splitlines() if line.strip()] or ["no message"]
        raise SystemExit(
            f"ERROR {pathlib.Path(command[0]).name} could not make .hub: {said[-1][:300]} Next: check the network, "
            "which the first set-up needs (PyPI and the npm registry); then run the same command again."
        )


def register_kernels() -> None:
    """Write the kernels that a seat offers: the course's own by its full path, and the eras."""
    kernels = HUB / "course" / "kernels"
    shutil.rmtree(kernels, ignore_errors=True)
    kernels.mkdir(parents=True)
    for era in eras.known():
        if era.status == "ready":
            there = kernels / era.kernel_name
            shutil.copytree(TODAY / "share" / "jupyter" / "kernels" / era.kernel_name, there)
            spec = json.loads((there / "kernel.json").read_text())
            if era.name == eras.TODAY:
                # `python` would be the server's, which has no torch; and the extension tells of a seat's limit
                command = [
                    str(TODAY / "bin" / "python"),
                    "-m",
                    "ipykernel_launcher",
                    "--ext=failurelab_course.teaching.seat_home",
                ]
                spec |= {"argv": [*command, "-f", "{connection_file}"], "display_name": era.title}
            (there / "kernel.json").write_text(json.dumps(spec, indent=1))


def main() -> int:
    """Make what is missing; return the exit status."""
    made = make()
    register_kernels()
    # Learners may write no byte code here, so the teacher does.
    compileall.compile_dir(ROOT / "helpers" / "failurelab", quiet=2)
    if made:
        print("class: ready. Next: docs/class_server.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
