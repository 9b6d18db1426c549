"""What an era takes from the machine's own Python, and how it sees that and nothing else of it.

The era must not find a second transformers there. So the machine's packages that were chosen (see `own_torch`) are
linked, one by one, into a folder that stands last on the era's path: its own packages come first, and what was not
chosen is not there. Only the standard library is needed.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import pathlib
import subprocess
from collections.abc import Iterable, Mapping

import failurelab
from failurelab_course import eras
from failurelab_course.eras import Era, EraError, environment
from failurelab_course.eras.offline import wheels

_SITE = "lib/python*/site-packages"


def installed() -> dict[str, importlib.metadata.Distribution]:
    """Return the distributions of the Python that runs this, by normalised name; this package is none of them."""
    found = {}
    for each in importlib.metadata.distributions():
        name = each.metadata["Name"]
        if name and wheels.normal(name) != "failurelab":
            found.setdefault(wheels.normal(name), each)
    return found


def link(distributions: Mapping[str, importlib.metadata.Distribution], folder: pathlib.Path) -> None:
    """Let the environment at `folder` see these distributions of the machine, after its own, and no others."""
    links = folder / eras.LINKS
    links.mkdir(exist_ok=True)
    for each in distributions.values():
        for part in sorted(_parts(each)):
            source = pathlib.Path(str(each.locate_file(part))).absolute()
            if source.exists() and not (links / source.name).exists():
                (links / source.name).symlink_to(source)
        for program in _programs(each):
            with contextlib.suppress(FileExistsError):
                (folder / "bin" / program.name).symlink_to(program)
    site = next(folder.glob(_SITE))
    (site / "failurelab-machine.pth").write_text(os.path.relpath(links, site) + "\n")


def _parts(each: importlib.metadata.Distribution) -> set[str]:
    """Return what a distribution holds at the top of its folder: packages, modules, its metadata."""
    if each.files:
        found = {file.parts[0] for file in each.files}
        return {part for part in found if part not in ("..", "__pycache__") and not part.endswith(".pth")}
    named = (each.read_text("top_level.txt") or each.metadata["Name"].replace("-", "_")).split()
    metadata = getattr(each, "_path", None)  # of a package without a list of its files, as Debian's are
    return {*named, *(f"{name}.py" for name in named), *([metadata.name] if metadata else [])}


def _programs(each: importlib.metadata.Distribution) -> Iterable[pathlib.Path]:
    """Yield the compiled programs that a distribution brings, such as ninja; scripts name another interpreter."""
    for file in each.files or ():
        if file.parts[0] == ".." and file.parent.name == "bin":
            path = pathlib.Path(str(each.locate_file(file))).resolve()
            with contextlib.suppress(OSError), open(path, "rb") as program:
                if program.read(4) == b"\x7fELF":
                    yield path


def add_course(folder: pathlib.Path) -> None:
    """Let the environment at `folder` import this package from the repository; nothing is built for that."""
    site, helpers = next(folder.glob(_SITE)), eras.root() / "helpers"
    (site / "failurelab-course.pth").write_text(f"{helpers}\n")
    metadata = site / f"failurelab-{failurelab.__version__}.dist-info"
    metadata.mkdir(exist_ok=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: failurelab\nVersion: {failurelab.__version__}\n")
    (metadata / "INSTALLER").write_text("failurelab\n")
    script = folder / "bin" / "failurelab"
    python = folder / "bin" / "python"
    script.write_text(f"#!{python}\nimport sys\n\nfrom failurelab.__main__ import main\n\nsys.exit(main())\n")
    script.chmod(0o755)


def told(era: Era, plan) -> list[str]:
    """Return lines on what the machine gives to the era, and what it has to do without."""
    pinned = wheels.lines(era.lock) | wheels.lines(era.lock.parent / "torch.txt")
    torch = plan.linked["torch"].version
    named = ", ".join(f"{name} {version} (lock: {pinned[name]})" for name, version in plan.other.items())
    lines = [
        f"era {era.name}: torch {torch} and {len(plan.linked) - 1} more packages are this Python's own; in another "
        f"version than the lock's: {named or 'none'}"
    ]
    if plan.left_out:
        lines.append(f"era {era.name}: left out, no wheel of it or of what it needs: {', '.join(plan.left_out)}")
    return lines


def try_imports(era: Era, python: str, modules: Iterable[str]) -> None:
    """Import modules once, in the environment of `python`: versions that fit on paper may still not work together.

    Raises:
        EraError: one does not import.
    """
    code = "".join(f"import {name}\n" for name in modules)
    done = subprocess.run([python, "-c", code], env=environment(era), capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr.strip() or "no message").splitlines()[-1][:300]
        raise EraError(
            f"era {era.name}: made from wheels and this Python's packages, it does not import: {said}. Next: put the "
            "lock's wheel of the package named there into the folder, and run the same command again"
        )
