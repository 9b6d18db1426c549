"""`failurelab pack`: the course and all wheels in one folder, for a room without a network.

pip downloads the wheels. uv reads the locks before that, because pip would read their markers for the Python that runs
it and not for the one that was asked for. DeepSpeed is built, for an index holds its source alone. SHA256SUMS names
every file; install.sh (eras/install_offline.sh) checks them and makes the environments by `eras create --wheels`.

Only the standard library is needed, and an environment with uv, pip and git.
"""

import dataclasses
import functools
import hashlib
import io
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterable

from failurelab_course.eras import TODAY, EraError, find, install, known, root

PYTHONS = ("3.11", "3.12")
# An index has these as source alone.
SOURCE_ONLY = ("deepspeed",)
# Older names of platforms, by their glibc.
_LEGACY = {17: "manylinux2014_x86_64", 12: "manylinux2010_x86_64", 5: "manylinux1_x86_64"}


@dataclasses.dataclass(frozen=True)
class Target:
    """What wheels are for: a Python such as `3.11`, and a platform such as `manylinux_2_28_x86_64`.

    Raises:
        EraError: the locks are for another Python, or it is no Linux on x86-64.
    """

    python: str
    platform: str

    def __post_init__(self):
        if self.python not in PYTHONS:
            raise EraError(f"Python {self.python}: bundles are for {' and '.join(PYTHONS)}. Next: --python 3.11")
        if not re.fullmatch(r"manylinux_2_\d+_x86_64", self.platform):
            raise EraError(
                f"unknown platform {self.platform!r}: a bundle is made for Linux on x86-64, elsewhere none was tried. "
                "Next: manylinux_2_28_x86_64, or another number of glibc that the machines have"
            )

    @property
    def pip_options(self) -> list[str]:
        """Which wheels pip may choose: for this Python, and for this glibc or an older one."""
        platforms = ["linux_x86_64"]
        for glibc in range(5, int(self.platform.split("_")[2]) + 1):
            platforms += [f"manylinux_2_{glibc}_x86_64", *([_LEGACY[glibc]] if glibc in _LEGACY else [])]
        abis = [f"cp{self.python.replace('.', '')}", "abi3", "none"]
        named = [option for platform in reversed(platforms) for option in ("--platform", platform)]
        named += [option for abi in abis for option in ("--abi", abi)]
        return ["--only-binary=:all:", "--implementation=cp", f"--python-version={self.python}.99", *named]


def pack(
    out: pathlib.Path, target: Target, names: Iterable[str] = (), torch_index: str = "", say=print
) -> pathlib.Path:
    """Make a bundle at `out`, whole or not at all; return its folder.

    Args:
        out: a folder that is not there yet.
        target: the Python and platform of the machines.
        names: of eras; `today` comes with them. All without.
        torch_index: an index of torch's builds for CPUs; else the folder that find-links name.
        say: is told what is done.

    Raises:
        EraError: an unknown era, no network, no room, something stands at `out`, no build of torch, or no wheel of a
            lock's package. What was fetched by then is kept for the next try.
    """
    chosen = [find(name, ready=False) for name in dict.fromkeys([TODAY, *names])] if names else known()
    out = out.resolve()
    if out.exists() or not out.parent.is_dir():
        what = f"{out} is there already" if out.exists() else f"{out.parent} is no folder"
        raise EraError(f"{what}: nothing is written. Next: another --out")
    if not (torch_index or install.find_links()):
        raise EraError(
            "no build of torch for CPUs is at hand. Next: --torch-index URL, the index of CPU builds that PyTorch's "
            "page on installing names; or PIP_FIND_LINKS with a folder that holds the wheel"
        )
    partial = out.with_name(f".{out.name}.partial")
    commit = _copy_course(partial / "course", say)
    _fetch(partial / "wheels", [era.lock for era in chosen], target, torch_index, say)
    facts = {"python": target.python, "eras": " ".join(era.name for era in chosen), "commit": commit}
    (partial / "bundle.txt").write_text("".join(f'{key}="{value}"\n' for key, value in facts.items()))
    shutil.copy(partial / "course" / "eras" / "install_offline.sh", partial / "install.sh")
    size = _write_checksums(partial)
    partial.rename(out)
    say(f"{out}: {len(list((out / 'wheels').iterdir()))} wheels of {len(chosen)} eras, {size / 1e6:.0f} MB")
    return out


def _copy_course(folder: pathlib.Path, say) -> str:
    """Write the repository's files, as committed, into the folder; return the commit.

    Raises:
        EraError: this is no clone.
    """
    git = functools.partial(subprocess.check_output, stderr=subprocess.PIPE, cwd=root())
    try:
        changed = git(["git", "status", "--porcelain"], text=True).splitlines()
        commit = git(["git", "rev-parse", "HEAD"], text=True).strip()
        archive = git(["git", "archive", "HEAD"])
    except (OSError, subprocess.CalledProcessError) as error:
        said = str(getattr(error, "stderr", None) or error).strip()
        raise EraError(
            f"git tells no files of {root()} ({said[:200]}): a bundle holds what is "
            "committed. Next: run this in a clone of the course"
        ) from error
    shutil.rmtree(folder, ignore_errors=True)
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")
    if changed:
        say(
            f"{len(changed)} files have changes that are not committed ({changed[0][3:]} first): packed is what commit "
            f"{commit[:12]} holds. Next: commit first, if they belong to it"
        )
    return commit


def _fetch(folder: pathlib.Path, locks: Iterable[pathlib.Path], target: Target, torch_index: str, say) -> None:
    """Bring a wheel of every line of the locks, of torch and of pip into the folder."""
    run = functools.partial(
        install.step,
        subject="pack",
        unresolved="another --python or --platform, or a lock that pins a version with a wheel for it",
    )
    folder.mkdir(exist_ok=True)
    pip = [sys.executable, "-m", "pip", "--quiet", "--retries=2"]
    download = [*pip, "download", "--no-deps", "--dest", str(folder)]
    lines = set()
    for lock in locks:
        # A lock's markers can tell an early release of a Python from a late one, and a bundle serves both.
        for release in ("0", "99"):
            options = ["--quiet", "--no-deps", "--no-header", "--no-annotate", "--python-platform=linux"]
            python = f"--python-version={target.python}.{release}"
            lines |= set(run([install.uv(), "pip", "compile", *options, python, str(lock)], lock.name).split())
    built = {line for line in lines if line.startswith(tuple(f"{name}==" for name in SOURCE_ONLY))}
    lines -= built
    while lines:  # pip takes one version of a package at once
        batch = {line.partition("==")[0]: line for line in sorted(lines)}
        lines -= set(batch.values())
        say(f"{len(batch)} wheels are fetched for Python {target.python} on {target.platform}")
        run([*download, *target.pip_options, *batch.values()], f"{len(batch)} wheels")
    for line in sorted(built):
        say(f"{line} is built: an index holds its source alone")
        run([*pip, "wheel", "--no-deps", "--wheel-dir", str(folder), line], line)
    (torch,) = re.findall(r"^torch==\S+", (root() / "eras" / "torch.txt").read_text(), re.MULTILINE)
    say(f"{torch}, for CPUs, and pip are fetched")
    # An index of all packages is never asked for torch: it would bring gigabytes for GPUs.
    place = [f"--index-url={torch_index}"] if torch_index else ["--no-index", "--find-links", install.find_links()]
    run([*download, *target.pip_options, *place, torch], torch)
    run([*download, "--only-binary=:all:", "pip>=25"], "pip")


def _write_checksums(folder: pathlib.Path) -> int:
    """Write SHA256SUMS, as `sha256sum` does, of every file in the folder; return their bytes."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "SHA256SUMS")
    with open(folder / "SHA256SUMS", "w", encoding="utf-8") as sums:
        for path in paths:
            with open(path, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            sums.write(f"{digest}  {path.relative_to(folder)}\n")
    return sum(path.stat().st_size for path in paths)
