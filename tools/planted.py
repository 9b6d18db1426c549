"""Plant known defects, one at a time, and demand that a test file finds each of them alone: `make planted`.

`planted.toml` lists the defects: each replaces one text in one file, and names the test file that must fail. A change
of the house that loses a check shows here, as a defect that nothing finds any more.

The tree is copied to a temporary folder, with links to the environments, and tested there: nothing is changed here.
Each test is first run on the copy as it is, where it must pass. What a test starts in an era's own process is the
installed package and not the copy, so the tests that are named measure in today's environment, or are of a notebook.

    python tools/planted.py [--only ID]... [--jobs N]

The exit status is 0 if every defect was found, 1 if not, 2 if the list does not fit the tree.
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import os
import pathlib
import queue
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import tomllib

ROOT = pathlib.Path(__file__).resolve().parents[1]
LIST = ROOT / "tools" / "planted.toml"
ENVIRONMENTS = (".venv", ".eras")
LIMIT = 600  # seconds for one test file


class StaleDefect(ValueError):
    """The list does not fit the tree; the message names the defect."""


@dataclasses.dataclass(frozen=True)
class Defect:
    """One known defect.

    Attributes:
        id: its name.
        room: what part of the house it is in.
        breaks: what goes wrong with it, in one line.
        file: that is changed, from the root.
        old: the text that is replaced; it stands there once.
        new: what takes its place.
        test: the file that must fail alone; a test's name may follow after `::`.
        select: an expression for pytest's `-k`, where the whole file takes minutes.
    """

    id: str
    room: str
    breaks: str
    file: str
    old: str
    new: str
    test: str
    select: str = ""

    @property
    def arguments(self) -> tuple[str, ...]:
        """What pytest is given."""
        return (self.test, *(("-k", self.select) if self.select else ()))

    def planted_in(self, folder: pathlib.Path) -> str:
        """Return the text of the file with the defect in it.

        Raises:
            StaleDefect: the file is gone, or `old` does not stand in it exactly once.
        """
        path = folder / self.file
        if not path.is_file():
            raise StaleDefect(f"{self.id}: {self.file} is not there")
        text = path.read_text(encoding="utf-8")
        if text.count(self.old) != 1:
            raise StaleDefect(f"{self.id}: its old text stands {text.count(self.old)} times in {self.file}, not once")
        return text.replace(self.old, self.new)


def read_defects(path: pathlib.Path = LIST) -> list[Defect]:
    """Read the list.

    Raises:
        StaleDefect: an id stands twice.
    """
    defects = [Defect(**entry) for entry in tomllib.loads(path.read_text(encoding="utf-8"))["defect"]]
    ids = [defect.id for defect in defects]
    if double := {id for id in ids if ids.count(id) > 1}:
        raise StaleDefect(f"{', '.join(sorted(double))}: the id stands more than once")
    return defects


def check_defect(defect: Defect, folder: pathlib.Path = ROOT) -> None:
    """Hold that a defect can be planted in the tree at `folder`, and that its test file is there.

    Raises:
        StaleDefect: it cannot.
    """
    defect.planted_in(folder)
    if defect.old == defect.new:
        raise StaleDefect(f"{defect.id}: its old and its new text are the same")
    if not (folder / defect.test.partition("::")[0]).is_file():
        raise StaleDefect(f"{defect.id}: {defect.test} is not there")


def copy_tree(folder: pathlib.Path) -> None:
    """Copy what git tracks or would track into `folder`, with links to the environments, as a repository of its own."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    for name in ENVIRONMENTS:
        (folder / name).symlink_to(ROOT / name)
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)


def run_python(folder: pathlib.Path, *arguments: str) -> subprocess.CompletedProcess:
    """Run today's Python on the copy: its packages come before those that are installed."""
    variables = {"PYTHONPATH": str(folder / "helpers"), "FAILURELAB_ROOT": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [str(folder / ".venv" / "bin" / "python"), *arguments],
        cwd=folder,
        env=os.environ | variables | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )


def check_copy(folder: pathlib.Path) -> None:
    """Hold that it is the copy's code that is tested."""
    asked = run_python(
        folder, "-c", "import failurelab, failurelab_course as f; print(failurelab.__file__, f.__file__)"
    )
    paths = [pathlib.Path(path) for path in asked.stdout.split()]
    if len(paths) != 2 or not all(path.is_relative_to(folder) for path in paths):
        raise RuntimeError(f"not the copy is imported: {asked.stdout or asked.stderr}")


def run_test(folder: pathlib.Path, arguments: tuple[str, ...]) -> tuple[str, str]:
    """Run a test file until its first failure; return `passed`, `failed` or `broken`, and what pytest said last."""
    options = ("-x", "-q", "--no-header", "-p", "no:cacheprovider", "-p", "no:randomly")
    try:
        done = run_python(folder, "-m", "pytest", *options, *arguments)
    except subprocess.TimeoutExpired:
        return "broken", f"it did not end within {LIMIT} s"
    last = (done.stdout.strip() or done.stderr.strip() or "nothing").splitlines()[-1]
    if done.returncode == 0 and re.search(r"\d passed", last):
        return "passed", last
    if done.returncode == 1 and re.search(r"\d failed", last):
        test = re.search(r"^FAILED \S+?::(\S+)", done.stdout, re.MULTILINE)
        return "failed", test[1] if test else last
    return "broken", f"pytest ended with status {done.returncode}: {last}"


def try_defect(folder: pathlib.Path, defect: Defect) -> tuple[bool, str]:
    """Plant a defect, run its test, take the defect out again; return whether it was found, and by what."""
    path = folder / defect.file
    healthy, spoilt = path.read_text(encoding="utf-8"), defect.planted_in(folder)
    path.write_text(spoilt, encoding="utf-8")
    try:
        outcome, said = run_test(folder, defect.arguments)
    finally:
        path.write_text(healthy, encoding="utf-8")
    return outcome == "failed", said if outcome != "passed" else f"{defect.test} passes with it"


@contextlib.contextmanager
def copies(count: int) -> Iterator["queue.Queue[pathlib.Path]"]:
    """Make so many copies of the tree, for as many tests at once."""
    with tempfile.TemporaryDirectory(prefix="planted-") as top:
        free: queue.Queue[pathlib.Path] = queue.Queue()
        for number in range(count):
            folder = pathlib.Path(top).resolve() / str(number)
            folder.mkdir()
            copy_tree(folder)
            check_copy(folder)
            free.put(folder)
        yield free


def try_all(defects: list[Defect], jobs: int) -> int:
    """Try the defects, print a line for each, and return how many were found."""
    controls = list(dict.fromkeys(defect.arguments for defect in defects))
    with copies(jobs) as free, concurrent.futures.ThreadPoolExecutor(jobs) as pool:

        def in_a_copy(function, argument):
            folder = free.get()
            try:
                return function(folder, argument)
            finally:
                free.put(folder)

        healthy = dict(zip(controls, pool.map(lambda control: in_a_copy(run_test, control), controls)))
        for control, (outcome, said) in healthy.items():
            print(
                f"{'ok' if outcome == 'passed' else 'BROKEN':8}{' '.join(control)}: without a defect {said}", flush=True
            )
        sound = [defect for defect in defects if healthy[defect.arguments][0] == "passed"]
        results = pool.map(lambda defect: in_a_copy(try_defect, defect), sound)
        found = 0
        for defect, (is_found, said) in zip(sound, results):
            found += is_found
            print(f"{'found' if is_found else 'MISSED':8}{defect.id} ({defect.room}): {said}", flush=True)
    return found


def main(arguments: list[str] | None = None) -> int:
    """Try the defects; return the exit status."""
    parser = argparse.ArgumentParser(description="Plant known defects and demand that a test finds each of them.")
    parser.add_argument("--only", action="append", metavar="ID", help="try this defect alone; may be repeated")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="tests at once, each in a copy (default: 2)")
    options = parser.parse_args(arguments)
    try:
        defects = read_defects()
        if unknown := set(options.only or ()) - {defect.id for defect in defects}:
            raise StaleDefect(f"no defect is called {', '.join(sorted(unknown))}")
        defects = [defect for defect in defects if not options.only or defect.id in options.only]
        for defect in defects:
            check_defect(defect)
    except StaleDefect as error:
        print(f"ERROR {error}", file=sys.stderr)
        return 2
    found = try_all(defects, max(1, options.jobs))
    print(f"{found} of {len(defects)} found")
    return 0 if found == len(defects) else 1


if __name__ == "__main__":
    sys.exit(main())
