"""Which code is the script's own: what it asks for its rank and its GPUs, and what it starts, is answered to it alone.

Own is the script, and what lies in its project: the folder above it that holds `.git`, `pyproject.toml` or `setup.py`,
else its own folder. A library is not, wherever it lies: the standard library, site-packages, and a clone that is
installed in place (`pip install -e`). The script's own project may be installed in place too. But an example that is
run inside the clone of a library does not make the library the script's: of a training library, and where the script
lies in `examples`, only what lies in the script's folder is its own.
"""

import functools
import importlib.metadata
import json
import os
import pathlib
import site
import sys
import sysconfig
import traceback
import urllib.parse
from collections.abc import Iterator

from failurelab.failures.loader import PACKAGES

HERE = tuple(
    str(pathlib.Path(__file__).resolve().parents[2] / name) + os.sep for name in ("failurelab", "failurelab_preflight")
)
_PROJECT = (".git", "pyproject.toml", "setup.py")


class OwnCode:
    """The code of one script, given by its path."""

    def __init__(self, script: str | os.PathLike):
        self._script = os.fspath(script)
        folder = pathlib.Path(script).resolve().parent
        self._folder, self._project = _folder(folder), _project_of(folder)
        example = "examples" in folder.relative_to(self._project).parts
        self._editable = tuple(
            clone
            for clone in editable_folders()
            if example or _is_training_library(clone) or _project_of(pathlib.Path(clone)) != self._project
        )
        self._of: dict[str, bool] = {}

    def holds(self, file: str) -> bool:
        """Return whether a file of code is the script's own."""
        if file not in self._of:
            self._of[file] = file == self._script or (not _has_no_file(file) and self._is_own(os.path.realpath(file)))
        return self._of[file]

    def may_edit(self, file: str) -> bool:
        """Return whether a repair may be written into a file: it is the script's own, and no installed package's."""
        return self._is_own(os.path.realpath(file))

    def _is_own(self, path: str) -> bool:
        if not path.startswith(self._project) or path.startswith((*HERE, *_libraries(), _standard_library())):
            return False
        clones = [clone for clone in self._editable if path.startswith(clone)]
        return not clones or (path.startswith(self._folder) and all(self._folder.startswith(clone) for clone in clones))

    def asks(self, through: tuple[str, ...] = (), through_here: bool = True) -> bool:
        """Return whether the script's own code is what calls this function's caller.

        The nearest frame decides that is not of the standard library, not of failurelab, unless `through_here` is
        false, and not of a function in `through`, by its name, which passes on what another one says.
        """
        for frame, _ in traceback.walk_stack(sys._getframe(2)):
            file = frame.f_code.co_filename
            if self.holds(file):
                return True
            if file.startswith(HERE) and not through_here:
                return False
            passes = frame.f_code.co_name in through or _has_no_file(file) or file.startswith(HERE)
            if not passes and not (file.startswith(_standard_library()) and not file.startswith(_libraries())):
                return False
        return False


def _has_no_file(name: str) -> bool:
    """Whether code has no file, as `<frozen os>` and what a dataclass makes: as a path it would be in any folder."""
    return name.startswith("<")


@functools.cache
def _standard_library() -> str:
    return _folder(pathlib.Path(os.path.realpath(sysconfig.get_path("stdlib"))))


@functools.cache
def _libraries() -> tuple[str, ...]:
    paths = {*site.getsitepackages(), site.getusersitepackages(), *map(sysconfig.get_path, ("purelib", "platlib"))}
    return tuple({_folder(pathlib.Path(form)) for path in paths for form in (path, os.path.realpath(path))})


def editable_folders() -> Iterator[str]:
    """Yield the folders of packages that are installed in place: by their metadata, path files, and import finders."""
    for distribution in importlib.metadata.distributions():
        url = json.loads(distribution.read_text("direct_url.json") or "{}")
        if url.get("dir_info", {}).get("editable"):
            yield _folder(pathlib.Path(urllib.parse.unquote(urllib.parse.urlparse(url["url"]).path)).resolve())
    for library in _libraries():
        for file in pathlib.Path(library).glob("*.pth"):
            for line in file.read_text(errors="replace").splitlines():
                if line.startswith(os.sep) and os.path.isdir(line):
                    yield _folder(pathlib.Path(line).resolve())
    for finder in sys.meta_path:  # setuptools: a module with a mapping from packages to folders
        mapping = getattr(sys.modules.get(getattr(finder, "__module__", "")), "MAPPING", None) or {}
        for path in mapping.values():
            yield _folder(pathlib.Path(path).resolve())


def _project_of(folder: pathlib.Path) -> str:
    """Return the nearest folder above that is a project's, or the folder itself."""
    projects = (at for at in (folder, *folder.parents) if any((at / name).exists() for name in _PROJECT))
    return _folder(next(projects, folder))


def _is_training_library(clone: str) -> bool:
    """Whether a clone holds one of the packages under study, in its root or in `src`."""
    roots = (pathlib.Path(clone), pathlib.Path(clone, "src"))
    return any((root / name / "__init__.py").is_file() for root in roots for name in PACKAGES)


def _folder(path: pathlib.Path) -> str:
    return str(path).rstrip(os.sep) + os.sep
