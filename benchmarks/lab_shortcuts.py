#!/usr/bin/env python3
"""Shortcuts through the labs: scripts that hide a symptom, or learn something else. Does the checker refuse each?

    python benchmarks/lab_shortcuts.py [--labs 01 06]

`lab_shortcuts.tar.xz` has them, whole, by somebody who had not written the labs: two and more for each lab. Its
`lab_shortcuts.toml` says of each that passes why it may.

Eras: today.
"""

import pathlib
import tempfile

import archives
import frames
import recording
import tomllib

from failurelab_course.experiments import observe
from failurelab_course.labs import definition, verify

ARCHIVE = pathlib.Path(__file__).with_name("lab_shortcuts.tar.xz")
WHY = ARCHIVE.with_name("lab_shortcuts.toml")


def table_lab_shortcuts(folder: pathlib.Path) -> str:
    """How many shortcuts of each lab are refused, and why the others may pass."""
    runs = frames.read_runs(folder, "lab_shortcuts", r"shortcuts of lab (?P<lab>\d+)").sort_values("lab")
    why = tomllib.loads(WHY.read_text(encoding="utf-8"))
    refused, of = sum(len(each) for each in runs["refused"]), sum(len(each) for each in runs["shortcuts"])
    lines = [f"{refused} of {of} are refused, in {len(runs)} labs. These pass:", ""]
    kinds: dict[str, list[str]] = {}
    for passed in runs["passed"]:
        for each in passed:
            kinds.setdefault(why[each], []).append(each.removesuffix(".py"))
    return "\n".join(lines + [f"- {', '.join(sorted(names))}: {reason}." for reason, names in kinds.items()])


def main() -> None:
    """Check them and record."""
    options = recording.begin(__doc__, labs={"nargs": "*", "help": "numbers of labs; all without"})
    with tempfile.TemporaryDirectory(prefix="shortcuts-") as name:
        folder = archives.unpack(ARCHIVE, pathlib.Path(name))
        for number in sorted({path.name[:2] for path in folder.glob("*.py")}):
            if options.labs and number not in options.labs:
                continue
            (lab,) = definition.find([number])
            scripts = sorted(folder.glob(f"{number}_*.py"))
            rows = verify.check_all(lab, scripts)
            for row in rows:
                print(f"lab {number} {row.script}: {row.result}. {row.reason}", flush=True)
            passed = [script.stem for script, row in zip(scripts, rows) if row.result == verify.PASS]
            refused = [script.stem for script, row in zip(scripts, rows) if row.result == verify.FAIL]
            figures = {"shortcuts": [script.stem for script in scripts], "passed": passed, "refused": refused}
            failure = next(iter(lab.failures), "ground")
            observe.record(failure, "measured", figures, case=f"shortcuts of lab {number}", device=options.device)


if __name__ == "__main__":
    main()
