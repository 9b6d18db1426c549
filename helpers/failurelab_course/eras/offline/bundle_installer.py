"""Install the course from an offline bundle: python3 install.py [FOLDER]

`failurelab pack` puts this file into a bundle, as install.py. It needs a Python of the bundle's version and nothing
else: no network, no uv, no pip. Every file is checked against the manifest's checksum first; then the course is copied
to FOLDER (by default grpo-failure-lab, here), its environments are made from the wheels, and `failurelab doctor` looks
at the result. Interrupted, or run twice: run it again. A file that you changed in FOLDER is kept.
"""

from __future__ import annotations  # a Python that is too old must get as far as saying so

import hashlib
import json
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys

BUNDLE = pathlib.Path(__file__).resolve().parent
MINE = ".failurelab-bundle.json"
AGAIN = "Next: copy the bundle here again, then run the same command"


class InstallError(Exception):
    """The bundle cannot be installed; the message says what was found and the next step."""


def manifest() -> dict:
    """Return the bundle's manifest.

    Raises:
        InstallError: it is missing, or cut short.
    """
    try:
        found = json.loads((BUNDLE / "manifest.json").read_text(encoding="utf-8"))
        return found if found["files"] else {}
    except FileNotFoundError as error:
        raise InstallError(f"manifest.json is not in {BUNDLE}, so nothing can be checked. {AGAIN}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise InstallError(f"manifest.json is cut short or changed ({error}). {AGAIN}") from error


def check_machine(made: dict) -> None:
    """Hold that this Python and machine are those that the wheels are for.

    Raises:
        InstallError: another Python, system, processor, or an older glibc.
    """
    have = f"{sys.version_info[0]}.{sys.version_info[1]}"
    if have != made["python"]:
        raise InstallError(
            f"the bundle's wheels are for Python {made['python']}, and this is {platform.python_version()} "
            f"({sys.executable}). Next: python{made['python']} install.py, or a bundle made with --python {have}"
        )
    number = re.fullmatch(r"manylinux_2_(\d+)_x86_64", made["platform"])
    here = f"{platform.system()} {platform.machine()}"
    if here != "Linux x86_64" or number is None:
        raise InstallError(
            f"the bundle is for {made['platform']}, and this is {here}: its compiled packages do not load here. "
            "Next: a machine with Linux on x86-64"
        )
    glibc = re.search(r"glibc 2\.(\d+)", os.confstr("CS_GNU_LIBC_VERSION") or "")
    if glibc is None or int(glibc[1]) < int(number[1]):
        found = glibc[0] if glibc else "another C library"
        raise InstallError(
            f"the bundle is for {made['platform']}, and this machine has {found}. Next: a bundle made with "
            "--platform manylinux_2_N_x86_64, N being this machine's number or less, or a newer system"
        )


def check_files(made: dict) -> None:
    """Compare every file of the bundle with its checksum.

    Raises:
        InstallError: one is missing, short or changed; names it.
    """
    for name, wanted in made["files"].items():
        path = BUNDLE / name
        if not path.is_file():
            raise InstallError(f"{name} is missing from the bundle: the copy did not end. {AGAIN}")
        size = path.stat().st_size
        if size != wanted["bytes"]:
            raise InstallError(f"{name} has {size} bytes of {wanted['bytes']}: the copy was cut short. {AGAIN}")
        if digest(path) != wanted["sha256"]:
            raise InstallError(f"{name} is not what was packed: its checksum differs. {AGAIN}")


def digest(path: pathlib.Path) -> str:
    """Return a file's sha256."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_folder(folder: pathlib.Path, made: dict) -> None:
    """Hold that the folder is new, empty, or one that this bundle was put into before.

    Raises:
        InstallError: it holds something else, or another version of the course, or the disk has too little room.
    """
    if folder.exists() and not folder.is_dir():
        raise InstallError(f"{folder} is a file. Next: name a folder: python3 install.py FOLDER")
    if folder.is_dir() and any(folder.iterdir()):
        try:
            before = json.loads((folder / MINE).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InstallError(
                f"{folder} is not empty, and no bundle was installed there: nothing in it is touched. "
                "Next: name a new folder: python3 install.py FOLDER"
            ) from error
        if before.get("commit") != made["commit"]:
            raise InstallError(
                f"{folder} holds the course of commit {str(before.get('commit'))[:12]}, and this bundle is of "
                f"{made['commit'][:12]}. Next: name a new folder; your work in labs/*/train.py can be copied over"
            )
    above = next(each for each in (folder, *folder.parents) if each.exists())
    free = shutil.disk_usage(above).free
    if not (folder / ".venv").exists() and free < made["installed_bytes"]:
        raise InstallError(
            f"{free / 1e9:.1f} GB of disk are free at {above} and the course needs about "
            f"{made['installed_bytes'] / 1e9:.1f} GB. Next: free some, or name a folder on another disk"
        )


def copy(folder: pathlib.Path, made: dict) -> int:
    """Copy the course's files to the folder, each whole or not at all; return how many changed ones were kept."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MINE).write_text(json.dumps({"commit": made["commit"], "course": made["course"]}))
    kept = 0
    for name, wanted in made["files"].items():
        if not name.startswith("course/"):
            continue
        target = folder / name.removeprefix("course/")
        if target.exists():
            kept += digest(target) != wanted["sha256"]
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".{target.name}.partial")
        shutil.copy(BUNDLE / name, partial)
        partial.replace(target)
    return kept


def environment(folder: pathlib.Path) -> dict[str, str]:
    """Return this process's variables, without what would lead the set-up to another course or Python."""
    hidden = ("FAILURELAB_ROOT", "PYTHONHOME", "VIRTUAL_ENV", "PYTHONPATH")
    return {key: value for key, value in os.environ.items() if key not in hidden} | {
        "PYTHONPATH": str(folder / "helpers")
    }


def main(arguments: list[str]) -> int:
    """Check, copy, make the environments, look at the result; return the exit status."""
    if len(arguments) > 1 or any(each.startswith("-") for each in arguments):
        print(__doc__.splitlines()[0], file=sys.stderr)
        return 2
    folder = pathlib.Path(arguments[0] if arguments else "grpo-failure-lab").resolve()
    try:
        made = manifest()
        check_machine(made)
        print(f"{len(made['files'])} files are compared with their checksums", flush=True)
        check_files(made)
        check_folder(folder, made)
        kept = copy(folder, made)
        print(f"the course is in {folder}{f', {kept} files that you changed are kept' if kept else ''}", flush=True)
    except InstallError as error:
        print(f"ERROR {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"ERROR {error}. Next: mend that, then run the same command again", file=sys.stderr)
        return 1
    create = [
        sys.executable,
        "-m",
        "failurelab_course.eras",
        "create",
        "--wheels",
        str(BUNDLE / "wheels"),
        *made["eras"],
    ]
    status = subprocess.run(create, env=environment(folder)).returncode
    if status:
        return status
    command = folder / ".venv" / "bin" / "failurelab"
    status = subprocess.run([str(command), "doctor"], cwd=folder, env=environment(folder)).returncode
    print(f"Next: cd {folder}, then .venv/bin/jupyter lab --notebook-dir=. or .venv/bin/failurelab run")
    return status


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        print("\ninterrupted: what is done already is kept; run the same command again", file=sys.stderr)
        sys.exit(130)
