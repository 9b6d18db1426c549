"""What a learner does with a lab: check it, take a hint, look at the solution, start over.

A lab's `train.py` is the learner's to edit. It is made of `start.py` at first use, and again by `reset`, which keeps a
copy of what was there; nothing else writes to it.
"""

import ast
import collections
import difflib
import pathlib
import re
import shutil

from failurelab_course import eras
from failurelab_course.labs import progress as lab_state
from failurelab_course.labs import verify as labs
from failurelab_course.labs.definition import Lab, LabError, Script, WrongFix, copy_start, learner_script


def next_lab(state: lab_state.State, after: str = "") -> Lab:
    """Return the next lab that is not solved, the first after the lab `after` if there is one.

    Raises:
        LabError: all are.
    """
    names = labs.known()
    for name in [*(other for other in names if other > after), *names]:
        if not state.get(name, lab_state.Progress()).solved:
            return labs.find([name])[0]
    raise LabError("all labs are solved. Next: name the one you want to see again, such as 01")


def keep_result(lab: Lab, row: labs.ScriptOutcome) -> labs.ScriptOutcome:
    """Keep what a check of the learner's script found in the state file, and add what it looks like to the reason.

    Of a script that is as it was at first no figure is told: to find the place is what the lab trains.
    """
    tried = wrong_fix(lab)
    with lab_state.change(lab.name) as progress:
        if not progress.solved and row.result in (labs.PASS, labs.FAIL):
            progress.checks += 1
            if row.result == labs.PASS:
                progress.solved = lab_state.now()
            elif tried and tried.name not in progress.wrong_fixes:
                progress.wrong_fixes.append(tried.name)
    if row.result == labs.FAIL and row.metrics and _is_untouched(lab):
        row.reason = f"it does what the symptom says: {' '.join(lab.symptom.split())}"
    elif row.result == labs.FAIL and tried:
        row.reason += f". This is a repair that many try. {tried.reason}"
    return row


def _is_untouched(lab: Lab) -> bool:
    return bool(lab.symptom) and code_parts(lab.train.read_text(encoding="utf-8")) == code_parts(lab.broken.text())


def wrong_fix(lab: Lab) -> WrongFix | None:
    """Return the declared wrong fix that the learner's script holds, if any: its lines, whatever else is there.

    Where it holds several, it is the one that changes most.
    """
    try:
        before = code_parts(lab.broken.text())
        mine = code_parts(learner_script(lab).read_text(encoding="utf-8"))
    except SyntaxError:
        return None
    candidates = []
    for fix in lab.wrong_fixes:
        there = code_parts(fix.text())
        added, taken = there - before, before - there
        # What it adds was added, and what it takes away is gone.
        if added <= mine - before and taken <= before - mine:
            candidates.append(((added | taken).total(), fix))
    return max(candidates, key=lambda pair: pair[0], default=(0, None))[1]


def code_parts(source: str) -> collections.Counter[str]:
    """Return the lines of a script's code and the keyword arguments of its calls, and how often each occurs.

    Comments, docstrings, layout and what runs in a shell alone are left out, so that two scripts can be compared by
    what they do.

    Raises:
        SyntaxError: it is no Python.
    """
    tree = ast.parse(source)
    body = [node for node in tree.body if not (isinstance(node, ast.If) and "__main__" in ast.unparse(node.test))]
    if body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        body = body[1:]
    parts: collections.Counter[str] = collections.Counter()
    for call in (node for part in body for node in ast.walk(part) if isinstance(node, ast.Call)):
        parts.update(f"{ast.unparse(call.func)}({ast.unparse(keyword)})" for keyword in call.keywords)
        call.keywords = []
    text = ast.unparse(ast.Module(body=body, type_ignores=[]))
    parts.update(line.strip() for line in text.splitlines() if line.strip())
    return parts


def hint(lab: Lab) -> tuple[str, ...]:
    """Return the hints that were read and the next one; all, of which none is counted, when the lab is solved."""
    with lab_state.change(lab.name) as progress:
        if progress.solved:
            return lab.hints
        progress.hints = min(progress.hints + 1, len(lab.hints))
        return lab.hints[: progress.hints]


def solution(lab: Lab, *, asked: bool = False) -> str:
    """Return what the solution changes, as a unified diff.

    Raises:
        LabError: the lab is not solved, and it was not `asked` for all the same, which is noted.
    """
    with lab_state.change(lab.name) as progress:
        if not progress.solved and not asked:
            left = len(lab.hints) - progress.hints
            first = f"failurelab lab hint {lab.number} ({left} left), or " if left else ""
            raise LabError(
                f"lab {lab.number} is not solved yet. Next: {first}failurelab lab solution {lab.number} --yes"
            )
        progress.solution_seen |= not progress.solved
    old, new = (script.text().splitlines() for script in (lab.broken, lab.solution))
    return "\n".join(difflib.unified_diff(old, new, "start.py", "solution.py", n=2, lineterm=""))


def write(lab: Lab, script: Script) -> pathlib.Path:
    """Write a wrong fix or the solution whole, to be read or run; return its path, below `.course`.

    Raises:
        LabError: one of its edits does not apply.
    """
    return script.write(eras.root() / ".course" / lab.name)


def find_wrong_fix(lab: Lab, name: str) -> Script:
    """Return the wrong fix of this name.

    Raises:
        LabError: the lab has none.
    """
    by_name = {fix.name: fix for fix in lab.wrong_fixes}
    if name not in by_name:
        raise LabError(f"lab {lab.number} has no wrong fix {name!r}. It has: {', '.join(by_name)}")
    return by_name[name]


def reset(lab: Lab) -> pathlib.Path | None:
    """Make `train.py` as it was at first; return where the learner's script is kept, or None if it was unchanged."""
    kept = None
    if lab.train.is_file() and lab.train.read_bytes() != lab.start.read_bytes():
        numbers = (int(match[1]) for path in lab.folder.iterdir() if (match := _BACKUP.fullmatch(path.name)))
        kept = lab.folder / f"train.backup-{max(numbers, default=0) + 1}.py"
        partial = kept.with_suffix(".partial")
        try:
            shutil.copy2(lab.train, partial)
            partial.rename(kept)
        finally:
            partial.unlink(missing_ok=True)
    copy_start(lab)
    return kept


_BACKUP = re.compile(r"train\.backup-(\d+)\.py")
