"""What every notebook of the course holds to, checked without running it: python -m tools.notebook_lint [NAME...]

A notebook in git tells its whole story on the web, runs the same under papermill and nbval, and gives the same file
when its outputs are made again. Each rule stands against something that was seen to break one of these.
"""

import re
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from tools.site_pages import OPENING
from tools.store_outputs import normalise

from failurelab_course.notebook_runs import notebooks as course
from failurelab_course.notebook_runs.stored import CHECKED, KERNELSPEC, declared_parameters, is_folded, tags

LINE, CELL, STORY = 79, 40, 35  # characters, lines, code cells in view
IMAGE_BYTES = 200_000
# What is no part of the story: who reads it in a cell has to ask whether it matters.
BOOKKEEPING = re.compile(r"\b(predict|observe|exercise)\.\w+\(|\bnotebook\.(setup|model_path)\(|\brecord\(")
UNITS = r"s|secs?|seconds?|ms|milliseconds?|µs|us|ns|min|mins|minutes?|h|hours?"
DIFFERS = {
    "a duration or a time of day": rf"\b\d+(\.\d+)?\s?({UNITS})\b|\b[sh]/it\b|runtime\b|_per_second|"
    r"\b(wall|cpu) times?\b|\b\d\d?:\d\d:\d\d\b",
    "a path of one machine": r"(?<![\w.:/<)])/[\w.+-]+(/[\w.+@-]+)+|(?<!\w)~/\w|\b[A-Z]:\\\w|site-packages|\.venv/|"
    r"ipykernel_\d+",
    "an address in memory": r"\b0x[0-9a-f]{6,}\b",
    "a progress bar": r"\r|\d+%\|| it/s\b|[█▏▎▍▌▋▊▉━]{3}",
}
# `%%bash` may: a command that fails there is an error.
SHELL = r"^\s*[!%]{0,2}(!|%(pip|conda|mamba|uv|sh|script|system|sx|cmd)\b)|=\s*!\w|\bos\.system\("
ASKED = re.compile(r'predict\.(ask|answer)(?:_number)?\(\s*"([\w-]+)"')


class View(NamedTuple):
    """A notebook as the rules look at it: `code` and `markdown` are pairs of a cell's place (from 1) and the cell."""

    name: str
    notebook: Any
    code: list[tuple[int, Any]]
    markdown: list[tuple[int, Any]]

    def outputs(self) -> Iterator[tuple[int, Any]]:
        """Yield every stored output, with the place of its cell."""
        yield from ((place, output) for place, cell in self.code for output in cell.outputs)

    def story(self) -> list[tuple[int, Any]]:
        """Return the code cells in view, in order."""
        return [(place, cell) for place, cell in self.code if not is_folded(cell)]


Found = Iterator[tuple[int, str]]  # a cell's place, 0 for the notebook itself, and what is wrong
RULES: dict[str, Callable[[View], Found]] = {}


def _rule(function: Callable[[View], Found]) -> Callable[[View], Found]:
    RULES[function.__name__.strip("_")] = function
    return function


def check(name: str, notebook: Any) -> list[str]:
    """Return every breach of a rule in a notebook: the rule, the cell, and why."""
    cells = list(enumerate(notebook.cells, 1))
    code = [(place, cell) for place, cell in cells if cell.cell_type == "code" and cell.source.strip()]
    view = View(name, notebook, code, [(place, cell) for place, cell in cells if cell.cell_type == "markdown"])
    return [
        f"{rule}: {f'cell {place}: ' if place else ''}{why}"
        for rule, find in RULES.items()
        for place, why in find(view)
    ]


def diff_of(source: str) -> str:
    """Return the unified diff in a markdown cell, as `git apply` takes it; empty if there is none."""
    match = re.search(r"^```diff\n(.*?^)```$", source, re.MULTILINE | re.DOTALL)
    return match[1] if match else ""


def output_texts(output: Any) -> Iterator[str]:
    """Yield the texts of one output, as a reader sees them: HTML without its tags."""
    if output.output_type == "stream":
        yield output.text
    for kind, data in output.get("data", {}).items():
        if kind.startswith("text/"):
            yield re.sub(r"<style.*?</style>|<[^>]*>", " ", data, flags=re.DOTALL) if kind == "text/html" else data


@_rule
def _stored(view: View) -> Found:
    if view.notebook.metadata.get("kernelspec", {}).get("name") != KERNELSPEC["name"]:
        yield 0, "its kernel is one that only its author's machine has; commit python3"
    elif normalise(view.notebook) != view.notebook:
        yield 0, "it is not as make outputs stores it: timings, versions, cells run out of order, or an injected cell"
    for place, cell in view.code:
        if cell.execution_count is None and "skip-execution" not in tags(cell):
            yield place, "it was not run: a reader on the web sees no outcome. Next: make outputs NAME=..."


@_rule
def _parameters(view: View) -> Found:
    tagged = [place for place, cell in view.code if "parameters" in tags(cell)]
    if len(tagged) != 1:
        yield 0, f"{len(tagged)} cells are tagged `parameters`, papermill needs exactly one"
        return
    try:
        declared = declared_parameters(view.notebook)
    except SyntaxError:
        declared = {}
    for name, value in course.DEFAULTS.items():
        if name not in declared or (declared[name], type(declared[name])) != (value, type(value)):
            yield tagged[0], f"a reader runs the fast CPU tier: {name} = {value!r}"
    after = next((cell.source for place, cell in view.code if place > tagged[0]), "")
    if not re.search(r"^[^#]*\bnotebook\.setup\([^)]*\bseed=seed\b", after, re.MULTILINE):
        yield 0, "the first cell after the parameters does not call notebook.setup(seed=seed)"


@_rule
def _error(view: View) -> Found:
    for place, output in view.outputs():
        if output.output_type == "error":
            yield place, f"a stored {output.ename}: an expected failure ends in expect.expect_failure"
        elif output.get("name") == "stderr":
            yield place, "notices on stderr differ by machine; where a warning is the subject, count and print it"


@_rule
def _differs(view: View) -> Found:
    for place, output in view.outputs():
        for text in output_texts(output):
            for what, pattern in DIFFERS.items():
                if match := re.search(pattern, text, re.IGNORECASE):
                    yield place, f"{match.group().strip()!r} is {what}: it differs on every run or machine"


@_rule
def _shown(view: View) -> Found:
    for place, output in view.outputs():
        for kind, data in output.get("data", {}).items():
            if "widget" in kind or kind == "application/javascript":
                yield place, "a widget is empty on the web, and its model id is random"
            elif kind.startswith("image/"):
                if len(output.metadata.get(kind, {}).get("alt", "").split()) < 3:
                    yield place, "a picture without a text that says what it shows: notebook.show(figure, alt=...)"
                if len(data) > IMAGE_BYTES:
                    yield place, f"a picture of {len(data)} bytes, at most {IMAGE_BYTES}: fewer points, or smaller"


@_rule
def _source(view: View) -> Found:
    for place, cell in view.code:
        lines = [line for line in cell.source.splitlines() if line.strip()]
        if (longest := max(map(len, lines))) > LINE:
            yield place, f"a line of {longest} characters scrolls sideways; at most {LINE}"
        if len(lines) > CELL:
            yield place, f"{len(lines)} lines of code; one idea a cell, at most {CELL}"
        if re.search(SHELL, cell.source, re.MULTILINE):
            yield place, "a shell line that fails passes unseen; use a %%bash cell, or subprocess.run(..., check=True)"


@_rule
def _opening(view: View) -> Found:
    first = view.notebook.cells[0]
    if not first.source.startswith("# ") or not OPENING.search(first.source.splitlines()[-1]):
        yield 1, "its last line is not `*Reads in N minutes, runs in N seconds on ... . Library stacks: ... .*`"


@_rule
def _script(view: View) -> Found:
    scripts = [place for place, cell in view.code if "script" in tags(cell)]
    story = view.story()
    if not story or scripts != [story[0][0]]:
        yield 0, "the first code cell in view is not the reader's script; one cell is tagged `script`, and it is"
    elif re.search(r"^\s*(from|import) failurelab", story[0][1].source, re.MULTILINE):
        yield scripts[0], "the reader's script imports from this course: it must be one that a reader could have"
    diffs = [place for place, cell in view.markdown if "diff" in tags(cell) and diff_of(cell.source)]
    if not view.name.startswith("00") and len(diffs) != 1:
        yield 0, f"{len(diffs)} cells are tagged `diff` and hold a ```diff block: one says what to change in the script"


@_rule
def _slides(view: View) -> Found:
    for place, cell in view.markdown:
        heading = re.search("^#+ ", re.sub("```.*?```", "", cell.source, flags=re.DOTALL), re.MULTILINE)
        if bool(heading) != (cell.metadata.get("slideshow", {}).get("slide_type") == "slide"):
            yield place, "a cell with a heading begins a slide, and no other does (slideshow.slide_type)"


@_rule
def _folded(view: View) -> Found:
    if len(view.story()) > STORY:
        yield 0, f"{len(view.story())} code cells are in view, at most {STORY}: the rest goes"
    for place, cell in view.story():
        if match := BOOKKEEPING.search(cell.source):
            yield place, f"`{match.group()}...)` in view is bookkeeping: fold the cell (jupyter.source_hidden)"
    for place, cell in view.code:
        if re.search(r"predict\.answer(_number)?\(", cell.source) and not cell.metadata.get("jupyter", {}).get(
            "outputs_hidden"
        ):
            yield place, "a stored answer in view: who reads on meets it before the question (jupyter.outputs_hidden)"


@_rule
def _questions(view: View) -> Found:
    calls = [(place, *call) for place, cell in view.code for call in ASKED.findall(cell.source)]
    asked = {key: place for place, call, key in calls if call == "ask"}
    answered = {key: place for place, call, key in calls if call == "answer"}
    for key in asked.keys() | answered.keys():
        if not asked.get(key, len(view.notebook.cells)) < answered.get(key, 0):
            yield asked.get(key, 0), f"the question {key!r} is asked in one cell and answered in a later one"
    if len(calls) != len(asked) + len(answered) or any(key[:3] != f"{view.name[:2]}-" for key in asked):
        yield 0, "the key of a question is used twice, or does not begin with the notebook's number"
    if len(asked) < 2:
        yield 0, f"{len(asked)} questions are asked, at least 2 should be: predict.ask before a run"


@_rule
def _nbval(view: View) -> Found:
    checked = [(place, cell) for place, cell in view.code if CHECKED in tags(cell)]
    if not any("verdict_table(" in cell.source for _, cell in checked):
        yield 0, f"no verdict table: a cell tagged {CHECKED} that calls notebook.verdict_table"
    for place, cell in checked:
        if not cell.outputs:
            yield place, f"tagged {CHECKED}, but no output is stored: nothing is compared"
        for text in (text for output in cell.outputs for text in output_texts(output)):
            if match := re.search(r"\b\d+\.\d{3,}|\b\d(\.\d+)?e[-+]?\d", text):
                yield place, f"{match.group()} is compared, and such digits vary by processor: compare a verdict"
    for place, cell in view.code:
        if {"raises-exception", "nbval-raises-exception"} & set(tags(cell)):
            yield place, "nbval takes any failure here for a pass, papermill none: use expect.expect_failure"
        if ("skip-execution" in tags(cell)) != ("nbval-skip" in tags(cell)):
            yield place, "skipped by one tool only: papermill heeds skip-execution, nbval nbval-skip; set both"


def main(names: list[str]) -> int:
    """Check the named notebooks, all without a name; return 1 if a rule is broken."""
    broken = [f"{each.name}: {line}" for each in course.find(names) for line in check(each.name, each.content)]
    print("\n".join(broken or ["the notebooks hold to their rules"]))
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
