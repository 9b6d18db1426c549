"""`failurelab pack`: all that a room or a cluster without a network needs, in one folder or tar, with checksums.

A bundle holds the wheels of the eras (one of two eras that agree, once), the course's files as committed, a manifest,
and install.py, which needs a Python and nothing else (see `bundle_installer`). For a machine that has its own torch,
`wheels_only` writes the smallest folder for `failurelab eras create --wheels DIR --torch here`.
"""

import dataclasses
import io
import json
import pathlib
import re
import shutil
import subprocess
import tarfile
import time
from collections.abc import Iterable, Mapping

import failurelab
from failurelab_course import eras
from failurelab_course.eras import EraError
from failurelab_course.eras.offline import bundle_installer, wheels
from failurelab_course.eras.offline import fetch as pack_wheels
from failurelab_course.eras.offline.wheels import Target

# Free bytes asked for before anything is fetched, as measured and a half more.
ROOM = 1_500_000_000
PYTHONS = ("3.11", "3.12")
# Modules compiled on installing, beside what the wheels unpack to.
_COMPILED = 1.35


@dataclasses.dataclass(frozen=True)
class Order:
    """What to pack: a Python, a platform, eras (all without), and what torch comes from."""

    python: str = "3.11"
    platform: str = "manylinux_2_28_x86_64"
    eras: tuple[str, ...] = ()
    wheels_only: bool = False
    torch: bool = True
    torch_index: str = ""
    have: pathlib.Path | None = None
    also: tuple[str, ...] = ()


def pack(out: pathlib.Path, order: Order, say=print) -> dict:
    """Make a bundle at `out`, a folder or a `.tar`, whole or not at all; return its manifest, with `seconds`.

    Raises:
        EraError: an unknown Python, platform or era; no network; no room; something stands at `out`; a lock's wheel
            is missing. What was fetched by then is kept for the next try.
    """
    start = time.monotonic()
    target = _target(order)
    chosen = [eras.find(name, ready=False) for name in order.eras] or eras.known()
    have = _have(order.have) if order.have else {}
    if order.have and order.torch:
        raise EraError("--have goes with --wheels-only --without torch: a whole bundle leaves nothing out")
    out = pathlib.Path(out).resolve()
    _check_place(out)
    partial = out.with_name(f".{out.name}.partial")
    folder = partial / "wheels"
    pack_wheels.fetch(folder, _wanted(chosen, target, order), target, say)
    if order.torch:
        pack_wheels.fetch_torch(folder, target, order.torch_index, say)
    pack_wheels.fetch_pip(folder, say)
    if order.wheels_only:
        made = _finish_wheels(folder, chosen, target, order, have, out)
        made["seconds"] = time.monotonic() - start
        shutil.rmtree(partial, ignore_errors=True)
    else:
        made = _finish_bundle(partial, chosen, target, order, out, say, start)
    kind = "wheels" if order.wheels_only else "files"
    say(f"{out}: {len(made['files'])} {kind}, {made['bytes'] / 1e6:.0f} MB, {made['seconds'] / 60:.1f} min")
    return made


def _target(order: Order) -> Target:
    if order.python not in PYTHONS:
        raise EraError(f"Python {order.python}: the locks are for {' and '.join(PYTHONS)}. Next: --python 3.11")
    if not order.torch and not order.wheels_only:
        raise EraError(
            "--without torch goes with --wheels-only: install.py makes whole environments. Next: --wheels-only too"
        )
    target = Target(order.python, order.platform)
    target.platforms()
    return target


def _have(path: pathlib.Path) -> dict[str, str]:
    """Read `pip list --format=freeze` of the machine.

    Raises:
        EraError: it is something else, or cannot be read.
    """
    try:
        found = re.findall(r"^([\w.-]+)==(\S+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    except (OSError, UnicodeDecodeError) as error:
        raise EraError(f"{path} cannot be read ({error}). Next: --have FILE, as pip list --format=freeze") from error
    if not found:
        raise EraError(f"{path} names no package as NAME==VERSION. Next: pip list --format=freeze > FILE, there")
    return {wheels.normal(name): version for name, version in found}


def _wanted(chosen: Iterable, target: Target, order: Order) -> dict[str, set[str]]:
    wanted = pack_wheels.pinned(chosen, target)
    if order.wheels_only and not order.torch:
        return {name: each for name, each in wanted.items() if name in order.also or name not in pack_wheels.LARGE}
    return wanted


def _check_place(out: pathlib.Path) -> None:
    if out.exists():
        raise EraError(f"{out} is there already: nothing in it is touched. Next: another --out, or remove it")
    if not out.parent.is_dir():
        raise EraError(f"{out.parent} is no folder. Next: make it, or another --out")
    free = shutil.disk_usage(out.parent).free
    if free < ROOM:
        raise EraError(
            f"{free / 1e9:.1f} GB of disk are free at {out.parent} and packing needs about {ROOM / 1e9:.1f} GB. "
            "Next: free some, or --out on another disk"
        )


def _finish_wheels(folder, chosen, target, order: Order, have: Mapping[str, str], out: pathlib.Path) -> dict:
    kept = pack_wheels.smallest(folder, chosen, target, have, order.also) if not order.torch else None
    for path in folder.iterdir():
        if kept is not None and path not in kept:
            path.unlink()
    files = {path.name: {"bytes": path.stat().st_size} for path in sorted(folder.iterdir())}
    folder.rename(out)
    return {"files": files, "bytes": sum(each["bytes"] for each in files.values())}


def _finish_bundle(partial, chosen, target, order: Order, out: pathlib.Path, say, start: float) -> dict:
    folder = partial / "wheels"
    found = wheels.read(folder, target)
    torch = wheels.lines(eras.root() / "eras" / "torch.txt")
    for era in chosen:
        for release in pack_wheels.RELEASES:
            wheels.select(torch | wheels.lines(era.lock, target, release), found, era.name, folder)
    commit = _course(partial / "course", say)
    shutil.copy(bundle_installer.__file__, partial / "install.py")
    made = {
        "schema": 1,
        "course": failurelab.__version__,
        "commit": commit,
        "python": order.python,
        "platform": order.platform,
        "torch": next(each.version for (name, _), each in found.items() if name == "torch"),
        "eras": {era.name: bundle_installer.digest(era.lock) for era in chosen},
        "installed_bytes": int(_COMPILED * sum(each.unpacked_bytes() for each in found.values())),
        "files": _files(partial),
    }
    made["bytes"] = sum(each["bytes"] for each in made["files"].values())
    made["seconds"] = time.monotonic() - start
    (partial / "manifest.json").write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    if out.suffix == ".tar":
        half = out.with_name(f".{out.name}.half")
        with tarfile.open(half, "w") as tar:
            tar.add(partial, arcname=out.stem)
        half.replace(out)
        shutil.rmtree(partial, ignore_errors=True)
    else:
        partial.rename(out)
    return made


def _files(top: pathlib.Path) -> dict[str, dict]:
    paths = sorted(path for path in top.rglob("*") if path.is_file() and path.name != "manifest.json")
    return {
        str(path.relative_to(top)): {"bytes": path.stat().st_size, "sha256": bundle_installer.digest(path)}
        for path in paths
    }


def _course(folder: pathlib.Path, say) -> str:
    """Write the repository's files, as committed, into the folder; return the commit.

    Raises:
        EraError: this is no clone.
    """
    shutil.rmtree(folder, ignore_errors=True)
    changed = [line for line in _git("status", "--porcelain").decode().splitlines() if line]
    commit = _git("rev-parse", "HEAD").decode().strip()
    with tarfile.open(fileobj=io.BytesIO(_git("archive", "HEAD"))) as tar:
        tar.extractall(folder, filter="data")
    if changed:
        say(
            f"{len(changed)} files have changes that are not committed ({changed[0][3:]} first): packed is what commit "
            f"{commit[:12]} holds. Next: commit first, if they belong to it"
        )
    return commit


def _git(*arguments: str) -> bytes:
    try:
        return subprocess.run(["git", "-C", str(eras.root()), *arguments], check=True, capture_output=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", b"") or str(error).encode()
        raise EraError(
            f"git tells no files of {eras.root()} ({said.decode().strip()[:200]}): a bundle holds what is committed. "
            "Next: run this in a clone of the course"
        ) from error
