"""Pack the course and all wheels into one folder, for a room without a network: `make pack OUT=DIR`; docs/offline.md.

uv reads the locks for the Python that was asked for, pip downloads the wheels, and what an index holds as source alone
is built. SHA256SUMS names every file; install.sh checks them, and makes the environments with uv offline.
"""

import argparse
import hashlib
import pathlib
import re
import shutil
import subprocess
import sys

from failurelab_course import eras
from failurelab_course.eras import install

SOURCE_ONLY = "deepspeed=="
# Older names of platforms, by their glibc.
LEGACY = {17: "manylinux2014_x86_64", 12: "manylinux2010_x86_64", 5: "manylinux1_x86_64"}


def choose_wheels(python: str, glibc: int) -> list[str]:
    """Return pip's options for the wheels of this Python that run with this glibc, so also those for an older one."""
    platforms = [name for n in range(glibc, 4, -1) for name in (LEGACY.get(n), f"manylinux_2_{n}_x86_64") if name]
    options = [f"--platform={name}" for name in [*platforms, "linux_x86_64"]]
    options += [f"--abi={abi}" for abi in (f"cp{python.replace('.', '')}", "abi3", "none")]
    return ["--only-binary=:all:", "--implementation=cp", f"--python-version={python}.99", *options]


def copy_course(folder: pathlib.Path) -> str:
    """Write the repository's files, as committed, into the folder; return the commit."""
    git = ["git", "-C", str(eras.root())]
    if changed := subprocess.check_output([*git, "status", "--porcelain"], text=True).splitlines():
        print(f"{len(changed)} files have changes that are not committed ({changed[0][3:]} first): they stay behind")
    shutil.rmtree(folder, ignore_errors=True)
    archive = subprocess.run([*git, "archive", "HEAD"], stdout=subprocess.PIPE, check=True).stdout
    folder.mkdir(parents=True)
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive, check=True)
    return subprocess.check_output([*git, "rev-parse", "HEAD"], text=True).strip()


def fetch_wheels(folder: pathlib.Path, chosen: list[eras.Era], python: str, glibc: int, torch_index: str) -> None:
    """Bring a wheel of every line of the eras' locks, and of torch for CPUs, into the folder."""
    pip = [sys.executable, "-m", "pip", "--quiet"]
    download = [*pip, "download", "--no-deps", "--dest", str(folder), *choose_wheels(python, glibc)]
    lines: set[str] = set()
    for era in chosen:
        for release in (0, 99):  # a lock's markers can tell an early release of a Python from a late one
            options = ["--no-deps", "--no-header", "--no-annotate", "--quiet", "--python-platform=linux"]
            options += [f"--python-version={python}.{release}", str(era.lock)]
            lines |= set(subprocess.check_output([install.uv(), "pip", "compile", *options], text=True).split())
    built = {line for line in lines if line.startswith(SOURCE_ONLY)}
    for line in sorted(built):
        subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", str(folder), line], check=True)
    lines -= built
    while lines:  # pip takes one version of a package at once
        batch = {line.partition("==")[0]: line for line in sorted(lines)}
        subprocess.run([*download, *batch.values()], check=True)
        lines -= set(batch.values())
    torch = re.search(r"^torch==\S+", (eras.root() / "eras" / "torch.txt").read_text(), re.MULTILINE)[0]
    # An index of all packages is never asked for torch: it would bring gigabytes for GPUs.
    place = ["--index-url", torch_index] if torch_index else ["--no-index", "--find-links", install.find_links()]
    subprocess.run([*download, *place, torch], check=True)


def main() -> None:
    """Make the folder, whole or not at all; what was fetched before a failure is kept for the next try."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=pathlib.Path, help="the folder to write")
    parser.add_argument("--python", choices=("3.11", "3.12"), default="3.11", help="the Python that will install it")
    parser.add_argument("--glibc", type=int, default=28, help="N of the machines' glibc 2.N, on Linux on x86-64")
    parser.add_argument("--eras", nargs="*", metavar="NAME", default=[], help="eras beside today; all without")
    parser.add_argument("--torch-index", default="", help="an index of torch's builds for CPUs; else PIP_FIND_LINKS")
    options = parser.parse_args()
    if options.out.exists():
        raise eras.EraError(f"{options.out} is there already: nothing is written. Next: another folder")
    if not (options.torch_index or install.find_links()):
        raise eras.EraError(
            "no build of torch for CPUs is at hand. Next: --torch-index URL, the index of CPU builds that PyTorch's "
            "page on installing names; or PIP_FIND_LINKS with a folder that holds the wheel"
        )
    names = dict.fromkeys([eras.TODAY, *options.eras])
    chosen = [eras.find(name, ready=False) for name in names] if options.eras else eras.known()
    partial = options.out.resolve().with_name(f".{options.out.name}.partial")
    commit = copy_course(partial / "course")
    fetch_wheels(partial / "wheels", chosen, options.python, options.glibc, options.torch_index)
    shutil.copy(partial / "course" / "tools" / "install_offline.sh", partial / "install.sh")
    facts = {"python": options.python, "eras": " ".join(era.name for era in chosen), "commit": commit}
    (partial / "bundle.txt").write_text("".join(f'{key}="{value}"\n' for key, value in facts.items()))
    files = sorted(path for path in partial.rglob("*") if path.is_file() and path.name != "SHA256SUMS")
    with open(partial / "SHA256SUMS", "w", encoding="utf-8") as sums:
        for path in files:
            with open(path, "rb") as file:
                sums.write(f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {path.relative_to(partial)}\n")
    partial.rename(options.out)
    print(f"{options.out}: {len(list((options.out / 'wheels').iterdir()))} wheels of {len(chosen)} eras")


if __name__ == "__main__":
    try:
        main()
    except (eras.EraError, subprocess.CalledProcessError) as error:
        sys.exit(f"ERROR {error}")
