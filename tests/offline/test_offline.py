"""A room without a network: a bundle is installed where nothing can be reached, passes doctor and runs a notebook.

The home folder is a new one, the caches are empty, and neither uv nor a compiler nor make is on the path. With
BUNDLE=DIR in the environment that bundle is taken instead of a new one.
"""

import os
import pathlib
import re
import resource
import shutil
import subprocess
import sys

import pytest

from failurelab_course import eras

ROOT = eras.root()
# A new namespace has not even a loopback that is up, as every machine has without a network: Jupyter's kernels need it.
LOOPBACK = (
    "import fcntl, os, socket, struct, sys; request = struct.pack('16sh14x', b'lo', 1); "
    "fcntl.ioctl(socket.socket(), 0x8914, request); os.execvp(sys.argv[1], sys.argv[1:])"
)
PROGRAMS = ("sh", "bash", "env", "uname", "cat", "cmp", "cp", "dirname", "find", "mkdir", "mv", "rm", "rmdir", "sed")
PROGRAMS += ("chmod", "sha256sum", "sort")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    """The bundle's folder, for this Python, with all eras."""
    if "BUNDLE" in os.environ:
        yield pathlib.Path(os.environ["BUNDLE"])
        return
    out = tmp_path_factory.mktemp("packed") / "bundle"
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    command = [sys.executable, "tools/pack.py", str(out), "--python", version]
    subprocess.run(command, check=True, cwd=ROOT)
    yield out
    shutil.rmtree(out)


@pytest.fixture(scope="module")
def cut_off(tmp_path_factory):
    """Run a command where there is no network, no cache, another home, and few programs; return the CPU seconds too."""
    home, programs = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("programs")
    for name in PROGRAMS:
        if found := shutil.which(name):
            (programs / name).symlink_to(found)
    environment = {"HOME": str(home), "PATH": str(programs), "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}

    def run(*command):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        whole = [shutil.which("unshare"), "-n", str(base_python()), "-c", LOOPBACK, *map(str, command)]
        done = subprocess.run(whole, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return done, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    return run


def base_python():
    """An interpreter that holds nothing of the course."""
    return pathlib.Path(sys.base_prefix) / "bin" / "python3"


def bytes_of(folder):
    """Disk that a folder takes: a file that two eras share counts once."""
    seen = {(each.st_dev, each.st_ino): each.st_blocks * 512 for each in map(os.lstat, folder.rglob("*"))}
    return sum(seen.values())


def test_a_room_without_a_network(bundle, cut_off, tmp_path):
    """Install, doctor, notebook 01, and the same install again, which finds all there."""
    room = tmp_path / "room"
    install = ("env", f"PYTHON={base_python()}", "sh", bundle / "install.sh", room)
    code = "import socket; socket.create_connection(('1.1.1.1', 53), 2)"
    assert cut_off(base_python(), "-c", code)[0].returncode != 0
    done, processor = cut_off(*install)
    print(done.stdout)
    assert done.returncode == 0, done.stdout
    names = re.search(r'eras="(.*)"', (bundle / "bundle.txt").read_text())[1].split()
    assert all(f"era {name}: ready" in done.stdout for name in names)
    assert re.search(r"^PASS +Kernel of ", done.stdout, re.MULTILINE) and "FAIL" not in done.stdout
    took = bytes_of(room)
    notebook, _ = cut_off(room / ".venv/bin/failurelab", "run", "01")
    print(notebook.stdout)
    assert notebook.returncode == 0 and "1 of 1 PASS" in notebook.stdout, notebook.stdout
    (room / "labs/01_frozen_embeddings/train.py").write_text("# my work\n")
    again, processor_again = cut_off(*install)
    assert again.returncode == 0 and "files that you changed are kept" in again.stdout, again.stdout
    assert " packages" not in again.stdout and processor_again < processor
    assert (room / "labs/01_frozen_embeddings/train.py").read_text() == "# my work\n"
    print(f"{bytes_of(bundle) / 1e6:.0f} MB; installed {took / 1e9:.1f} GB in {processor / 60:.1f} processor minutes")
