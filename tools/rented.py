#!/usr/bin/env python3
"""All of `make gpu` on a rented machine, from this one file: it ends in one archive of evidence to send.

    python3 rented.py                           the course comes from its address, or from an archive beside this file
    python3 rented.py --course course.tar.gz    from an archive, a folder or an address
    python3 rented.py --name a100               what the evidence is called

It needs Python 3.11 to 3.13 with a torch that finds the card, and pip or uv; not root, git or make. Nothing is
installed into that Python, and its torch stays as it is: all lies in the folder grpo-failure-lab beside you. Cut off in
the middle, run the same command again: it goes on. Exit status: 0, all has run (PASS, FAIL or NOT RUN); 1, something
broke off; 3, it cannot run here. Standard library alone.
"""

from __future__ import annotations  # a Python that is too old must get as far as saying so

import argparse
import contextlib
import fcntl
import importlib
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import urllib.request

COURSE = ""
FOLDER = "grpo-failure-lab"
# Free bytes, as measured for the five stacks without torch, and a half more; and what a part writes.
ROOM, ROOM_OF_A_PART = 6_000_000_000, 500_000_000
AGAIN = "run the same command again: it goes on"


class CannotRun(Exception):
    """This machine or this Python lacks something; the message is one line, with the next step."""


def say(line: str) -> None:
    """Print a line at once."""
    print(line, flush=True)


def look() -> None:
    """Look at this Python before anything is fetched.

    Raises:
        CannotRun: it is too old or too new, or has no torch or no installer.
    """
    version = ".".join(map(str, sys.version_info[:3]))
    if not (3, 11) <= sys.version_info[:2] <= (3, 13):
        raise CannotRun(f"this is Python {version}, and the locks are for 3.11 to 3.13. Next: run it with one of these")
    if not importlib.util.find_spec("torch"):
        raise CannotRun(f"{sys.executable} has no torch. Next: run it with a Python that has one, or pip install torch")
    if not (shutil.which("uv") or importlib.util.find_spec("pip")):
        raise CannotRun(f"{sys.executable} has no pip, and uv is not found. Next: install one of them")


def require_room(folder: pathlib.Path, need: int) -> None:
    """Raise CannotRun where a folder's disk has not as many bytes free."""
    if (free := shutil.disk_usage(folder).free) < need:
        raise CannotRun(
            f"{free / 1e9:.1f} GB of disk are free at {folder} and about {need / 1e9:.1f} GB are needed. "
            f"Next: free some, then {AGAIN}"
        )


def find_source(course: str) -> str:
    """Return where the course comes from: what was named, an archive beside this file, or its address.

    Raises:
        CannotRun: nowhere.
    """
    named = course or os.environ.get("FAILURELAB_COURSE", "")
    here = pathlib.Path(__file__).resolve().parent
    beside = sorted(str(path) for path in here.glob("*.tar.gz"))
    if source := named or (beside[0] if len(beside) == 1 else COURSE):
        return source
    many = f"{len(beside)} archives lie beside this file" if beside else "this file names no address of the course"
    raise CannotRun(f"{many}. Next: --course with an archive (git archive), a folder or an address")


def bring(course: str) -> pathlib.Path:
    """Return the course's folder; unpack it there, whole or not at all, where it is not yet.

    Raises:
        CannotRun: it does not come, or it is no course.
    """
    if course and pathlib.Path(course).is_dir():
        return _require_course(pathlib.Path(course).resolve(), course)
    target = pathlib.Path(FOLDER).resolve()
    if target.is_dir():
        return _require_course(target, str(target))
    source, partial = find_source(course), target.with_name(f".{FOLDER}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    say(f"the course comes from {source}")
    try:
        archive = source
        if "://" in source:
            archive, _ = urllib.request.urlretrieve(source, partial / "course.tar.gz")
        with tarfile.open(archive) as packed:
            packed.extractall(partial / "all", filter="data")
    except (OSError, EOFError, tarfile.TarError) as error:
        raise CannotRun(f"{source} did not bring the course ({error}). Next: look at it, then {AGAIN}") from error
    tops = list((partial / "all").iterdir())
    _require_course(tops[0] if len(tops) == 1 else partial / "all", source).rename(target)
    shutil.rmtree(partial)
    return target


def _require_course(folder: pathlib.Path, source: str) -> pathlib.Path:
    if not ((folder / "tools" / "gpu.py").is_file() and (folder / "eras" / "torch.txt").is_file()):
        raise CannotRun(f"{source} holds no course. Next: --course with an archive of the whole repository")
    return folder


@contextlib.contextmanager
def alone(folder: pathlib.Path):
    """Hold the folder for one run at a time.

    Raises:
        CannotRun: another one has it.
    """
    (folder / ".course").mkdir(exist_ok=True)
    with open(folder / ".course" / "rented.lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CannotRun(f"another run works in {folder}. Next: wait for it, or end it") from None
        yield


def bring_uv(folder: pathlib.Path) -> None:
    """Put uv on the path, from a folder of the course where this machine has none.

    Raises:
        CannotRun: pip could not fetch it.
    """
    place = folder / ".course" / "uv"
    os.environ["PATH"] = f"{os.environ.get('PATH', '')}{os.pathsep}{place / 'bin'}"
    if not shutil.which("uv"):
        words = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(place), "uv"]
        done = subprocess.run(words, capture_output=True, text=True)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise CannotRun(f"uv, which installs the stacks, could not be fetched: {last}. Next: look at the network, "
                            f"then {AGAIN}")  # fmt: skip


def pack(folder: pathlib.Path, name: str) -> pathlib.Path:
    """Write the archive of evidence, whole or not at all; return it."""
    archive = pathlib.Path(f"evidence-{name}.tar.xz").resolve()
    partial = archive.with_suffix(".partial")
    with tarfile.open(partial, "w:xz") as packed:
        packed.add(folder / "evidence" / name, name)
    return partial.replace(archive)


def run(course: str, name: str, without: list[str]) -> int:
    """Bring the course, install its stacks, run all parts, and write the archive after each; return the exit status.

    Raises:
        CannotRun: this machine or this Python lacks something.
    """
    look()
    require_room(pathlib.Path.cwd(), ROOM_OF_A_PART)
    folder = bring(course)
    with alone(folder):
        sys.path[:0] = [str(folder / "tools"), str(folder / "helpers")]
        gpu, eras = map(importlib.import_module, ("gpu", "failurelab_course.eras"))  # from there, and known from now on
        out = folder / "evidence" / name
        if not out.is_dir():  # the first run, which installs
            require_room(folder, ROOM)
        if problem := gpu.look(None):
            raise CannotRun(problem)
        bring_uv(folder)
        try:
            gpu.install_eras(without)
        except (eras.EraError, subprocess.CalledProcessError) as error:
            raise CannotRun(f"{error} (--without with an era's name leaves that one out)") from error
        out.mkdir(parents=True, exist_ok=True)
        python, parts = gpu.own_python(), gpu.parts(out)
        for number, steps in enumerate(parts, 1):
            say(f"part {number} of {len(parts)}: {gpu.tell_minutes(steps)}")
            require_room(folder, ROOM_OF_A_PART)
            ended = False
            while not ended:  # nine minutes at a time; each brings at least one step to its end
                ended = gpu.run_part(number, steps, out, python)
            (out / "README.md").write_text(gpu.page(out), encoding="utf-8")
            archive = pack(folder, name)
    say(f"all {len(parts)} parts have ended. Next: send {archive}; {out / 'README.md'} tells what is in it")
    return 0


def main(words: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--course", default="", help="an archive of the repository, its folder, or an address")
    parser.add_argument("--name", default="gpu", help="what the evidence is called, such as a100")
    parser.add_argument("--without", nargs="+", metavar="ERA", default=[], help="stacks that are left out")
    options = parser.parse_args(words)
    try:
        return run(options.course, options.name, options.without)
    except CannotRun as error:
        print(f"ERROR {error}", file=sys.stderr)
        return 3
    except OSError as error:
        print(f"ERROR {error}. Next: mend it, then {AGAIN}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\ninterrupted: what has ended is kept. Next: {AGAIN}", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
