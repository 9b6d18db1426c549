"""The notebook contract: what every notebook of the course holds to, checked without running it.

A notebook in git must tell its whole story on the web, run the same under papermill and nbval, and give the same file
when its outputs are made again. Each rule here stands against something that was seen to break one of these: nbval
takes a cell tagged `raises-exception` or a crash under rich's traceback for a pass, papermill runs a `!` line that
fails, a path or a duration in an output differs on the next machine. `check` returns what is violated.
"""

import ast
import dataclasses
import itertools
import pathlib
import re
import statistics
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from failurelab_course.notebook import predict
from failurelab_course.runs.stored import (
    CHECKED,
    KERNELSPEC,
    checked_cells,
    declared_parameters,
    is_folded,
    normalise,
    output_texts,
    read,
    tags,
)

# The fast CPU tier: only papermill injects other values, so these defaults are what a reader runs.
DEFAULTS = {"device": "cpu", "model": "tiny", "seed": 0}
LINE, CELL, USUAL_CELL, MEDIAN = 79, 40, 24, (2, 8)
IMAGE_BYTES = 200_000
STORY = 35
# The last line of the first cell: what a reader needs to choose a notebook. docs/site_pages.py reads it too.
OPENING = re.compile(
    r"^\*Reads in \d+ minutes, runs in \d+ (?:seconds|minutes?) on [^.]+\. Library stacks: .+?\.(?: .*)?\*$"
)
# What is no part of the story: who reads it in a cell has to ask whether it matters.
BOOKKEEPING = re.compile(r"\b(predict|observe)\.\w+\(|\bnotebook\.(setup|model_path)\(|\brecord\(")


@dataclasses.dataclass(frozen=True)
class Violation:
    """One breach: the rule's name, the cell's place in the notebook (from 1; 0 is the notebook itself), and why."""

    rule: str
    cell: int
    message: str

    def __str__(self) -> str:
        return f"{self.rule}: {f'cell {self.cell}: ' if self.cell else ''}{self.message}"


class _View:
    """A notebook as the rules look at it: `code` and `markdown` are pairs of a cell's place and the cell."""

    def __init__(self, path: pathlib.Path, notebook: Any):
        self.name, self.notebook = path.stem, notebook
        self.cells = list(enumerate(notebook.cells, 1))
        self.code = [(n, cell) for n, cell in self.cells if cell.cell_type == "code" and cell.source.strip()]
        self.markdown = [(n, cell) for n, cell in self.cells if cell.cell_type == "markdown"]

    def outputs(self) -> Iterator[tuple[int, Any]]:
        """Yield every stored output, with the place of its cell."""
        yield from ((number, output) for number, cell in self.code for output in cell.outputs)

    def texts(self) -> Iterator[tuple[int, str]]:
        """Yield every text in the stored outputs; HTML without its tags."""
        yield from ((number, text) for number, output in self.outputs() for text in output_texts(output))

    def python(self) -> Iterator[tuple[int, str]]:
        """Yield each cell's code as Python: magics and `!` become calls; the body of a cell magic comes by itself."""
        from IPython.core.inputtransformer2 import TransformerManager

        for number, cell in self.code:
            source = cell.source
            if source.startswith("%%"):
                head, _, source = source.partition("\n")
                yield number, TransformerManager().transform_cell(head + "\n")
            yield number, TransformerManager().transform_cell(source)


Found = Iterator[tuple[int, str]]
RULES: dict[str, Callable[[_View], Found]] = {}


def _rule(function: Callable[[_View], Found]) -> Callable[[_View], Found]:
    RULES[function.__name__.strip("_").replace("_", "-")] = function
    return function


def check(path: pathlib.Path | str) -> list[Violation]:
    """Return every violation of the contract in the notebook at `path`; an unreadable file is one."""
    path = pathlib.Path(path)
    try:
        notebook = read(path)
    except ValueError as error:
        return [Violation("format", 0, str(error))]
    view = _View(path, notebook)
    return [Violation(name, cell, text) for name, rule in RULES.items() for cell, text in rule(view)]


def form(path: pathlib.Path) -> dict[str, Any]:
    """Return what the form of a notebook is measured by: its length, and where the reader's script and diff stand.

    Raises:
        ValueError: the file is no notebook.
    """
    view = _View(path, read(path))
    story = _story(view)
    script = [place for place, (_, cell) in enumerate(story, 1) if "script" in tags(cell)]
    prose = re.sub(
        r"^```.*?^```$", "", "\n".join(cell.source for _, cell in view.markdown), flags=re.DOTALL | re.MULTILINE
    )
    return {
        "code cells in view": len(story),
        "folded": len(view.code) - len(story),
        "words": len(prose.split()),
        "bookkeeping in view": sum(bool(BOOKKEEPING.search(cell.source)) for _, cell in story),
        "script in code cell": script[0] if script else "-",
        "compared cells": len(checked_cells(view.notebook)),
        "ends in a diff": "yes" if any("diff" in tags(cell) for _, cell in view.markdown[-6:]) else "no",
    }


def diff_of(source: str) -> str:
    """Return the unified diff in a markdown cell, as `git apply` takes it; empty if there is none."""
    match = re.search(r"^```diff\n(.*?^)```$", source, re.MULTILINE | re.DOTALL)
    return match[1] if match else ""


def _calls(source: str) -> Iterator[ast.Call]:
    try:
        yield from (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    except SyntaxError:
        return  # the rule `syntax` tells


# How it runs


@_rule
def _kernel(view: _View) -> Found:
    name = view.notebook.metadata.get("kernelspec", {}).get("name")
    if name != KERNELSPEC["name"]:
        yield 0, f"the kernel is {name!r}, which only its author's machine has; commit python3"


@_rule
def _syntax(view: _View) -> Found:
    for number, source in view.python():
        try:
            ast.parse(source)
        except SyntaxError as error:
            yield number, f"this is no Python: {error.msg}"


@_rule
def _parameters(view: _View) -> Found:
    tagged = [(number, cell) for number, cell in view.code if "parameters" in tags(cell)]
    if len(tagged) != 1:
        yield 0, f"{len(tagged)} cells are tagged `parameters`, papermill needs exactly one"
        return
    number, cell = tagged[0]
    try:
        declared = declared_parameters(cell.source)
    except SyntaxError:
        return  # the rule `syntax` tells
    for name, value in DEFAULTS.items():
        if name not in declared:
            yield number, f"parameter {name} is not declared; it is {name} = {value!r}"
        elif declared[name] != value or type(declared[name]) is not type(value):
            yield number, f"{name} = {declared[name]!r}, but a reader runs the fast CPU tier: {name} = {value!r}"


@_rule
def _setup(view: _View) -> Found:
    after = itertools.dropwhile(lambda pair: "parameters" not in tags(pair[1]), view.code)
    number, cell = next(itertools.islice(after, 1, None), (0, None))
    calls = [call for call in _calls(cell.source) if ast.unparse(call.func) == "notebook.setup"] if cell else []
    if not any(k.arg == "seed" and ast.unparse(k.value) == "seed" for call in calls for k in call.keywords):
        yield number, "the first cell after the parameters does not call notebook.setup(seed=seed)"


@_rule
def _unseeded(view: _View) -> Found:
    sources = ("default_rng", "Random", "RandomState", "SystemRandom", "seed", "urandom")
    for number, source in view.python():
        for call in _calls(source):
            name = ast.unparse(call.func).rpartition(".")[2]
            if name in sources and (name == "urandom" or not (call.args or call.keywords)):
                yield number, f"`{ast.unparse(call)}` takes its seed from the machine: every run differs"


@_rule
def _raises_exception(view: _View) -> Found:
    for number, cell in view.code:
        tagged = {"raises-exception", "nbval-raises-exception"} & set(tags(cell))
        if tagged or re.search(r"^\s*#\s*NBVAL_RAISES_EXCEPTION", cell.source, re.MULTILINE):
            yield number, "nbval takes any failure here for a pass, papermill none: use expect.expect_failure"


@_rule
def _rich_traceback(view: _View) -> Found:
    for number, cell in view.code:
        if re.search(r"rich\.traceback|from\s+rich\s+import\s+.*\btraceback", cell.source):
            yield number, "under rich's traceback nbval takes a crashed cell for a pass"


@_rule
def _shell(view: _View) -> Found:
    magics = ("pip", "conda", "mamba", "uv", "bash", "sh", "script", "system", "sx", "cmd", "perl", "ruby")
    for number, source in view.python():
        for call in _calls(source):
            text = ast.unparse(call.func)
            magic = call.args[0].value if call.args and isinstance(call.args[0], ast.Constant) else None
            if text in ("get_ipython().system", "get_ipython().getoutput", "os.system"):
                yield number, "a shell line that fails passes unseen; use subprocess.run(..., check=True)"
            elif text.startswith("get_ipython().run_") and magic in magics:
                yield number, f"the magic {magic} changes the machine, or hides a failure; eras hold the libraries"


@_rule
def _skip_tags(view: _View) -> Found:
    for number, cell in view.code:
        comment = re.search(r"^\s*#\s*NBVAL_SKIP\s*$", cell.source, re.MULTILINE)
        if ("skip-execution" in tags(cell)) != ("nbval-skip" in tags(cell) or bool(comment)):
            yield number, "skipped by one tool only: papermill heeds skip-execution, nbval nbval-skip; set both"


@_rule
def _display_id(view: _View) -> Found:
    for number, cell in view.code:
        if re.search(r"display_id\s*=|update_display\(|clear_output\(|%matplotlib\s+(widget|notebook)", cell.source):
            yield number, "an output that changes after it was shown cannot be compared"


# What is stored


@_rule
def _outputs(view: _View) -> Found:
    expected = 1
    for number, cell in view.code:
        if "skip-execution" in tags(cell):
            continue
        if cell.execution_count is None:
            yield number, "it was not run: a reader on the web sees no outcome. Next: failurelab outputs"
            return
        if cell.execution_count != expected:
            yield number, f"it ran as In [{cell.execution_count}], in its place comes {expected}: run out of order"
            return
        expected += 1


@_rule
def _error_output(view: _View) -> Found:
    for number, output in view.outputs():
        if output.output_type == "error":
            yield number, f"a stored {output.ename}: an expected failure ends in expect.expect_failure"


@_rule
def _stderr(view: _View) -> Found:
    for number in dict.fromkeys(number for number, output in view.outputs() if output.get("name") == "stderr"):
        yield number, "notices on stderr differ by machine; where a warning is the subject, count and print it"


def _no(pattern: str, why: str) -> Callable[[_View], Found]:
    compiled = re.compile(pattern, re.IGNORECASE)

    def rule(view: _View) -> Found:
        for number, text in view.texts():
            if match := compiled.search(text):
                yield number, f"{match.group().strip()!r} {why}"

    return rule


_UNITS = r"s|secs?|seconds?|ms|milliseconds?|µs|us|ns|min|mins|minutes?|h|hours?"
RULES["timing"] = _no(
    rf"\b\d+(\.\d+)?\s?({_UNITS})\b|\b[sh]/it\b|runtime\b|_per_second|\b(wall|cpu) times?\b|\b\d\d?:\d\d:\d\d\b",
    "is a duration or a time of day: it differs on every run",
)
RULES["path"] = _no(
    r"(?<![\w.:/<)])/[\w.+-]+(/[\w.+@-]+)+|(?<!\w)~/\w|\b[A-Z]:\\\w|site-packages|\.venv/|ipykernel_\d+",
    "is a path of one machine",
)
RULES["address"] = _no(r"\b0x[0-9a-f]{6,}\b", "is an address in memory: it differs on every run")
RULES["progress-bar"] = _no(r"\r|\d+%\|| it/s\b|[█▏▎▍▌▋▊▉━]{3}", "is a progress bar: it cannot be compared")


@_rule
def _widget(view: _View) -> Found:
    for number, output in view.outputs():
        if any("widget" in kind or kind == "application/javascript" for kind in output.get("data", {})):
            yield number, "a widget is empty on the web, and its model id is random"


@_rule
def _metadata(view: _View) -> Found:
    tidy = normalise(view.notebook)
    if len(tidy.cells) != len(view.notebook.cells):
        yield 0, "a cell that papermill injected is stored. Next: failurelab outputs"
        return
    stored = view.notebook.metadata
    if set(tidy.metadata) != set(stored) or tidy.metadata.language_info != stored.language_info:
        yield 0, "the notebook's metadata are not those stored by failurelab outputs"
        return
    for (number, cell), kept in zip(view.cells, tidy.cells):
        metadata = [output.get("metadata") for output in cell.get("outputs", [])]
        tidied = [output.get("metadata") for output in kept.get("outputs", [])]
        # Where pieces of a stream were joined, the outputs cannot be compared one by one.
        if cell.metadata != kept.metadata or (len(tidied) == len(metadata) and tidied != metadata):
            yield (
                number,
                "it has metadata beside tags, slide types, folds, alt texts (timings?). Next: failurelab outputs",
            )


# What a reader sees


@_rule
def _line_length(view: _View) -> Found:
    for number, cell in view.code:
        longest = max(cell.source.splitlines(), key=len)
        if len(longest) > LINE:
            yield number, f"a line of {len(longest)} characters scrolls sideways; at most {LINE}"


def _lines(cell: Any) -> int:
    return sum(bool(line.strip()) for line in cell.source.splitlines())


@_rule
def _cell_length(view: _View) -> Found:
    for number, cell in view.code:
        if _lines(cell) > CELL:
            yield number, f"{_lines(cell)} lines of code; one idea a cell, at most {CELL}"


@_rule
def _cell_lengths(view: _View) -> Found:
    lengths = [_lines(cell) for _, cell in view.code] or [0]
    usual = sum(length <= USUAL_CELL for length in lengths)
    if usual < 0.9 * len(lengths):
        yield 0, f"{usual} of {len(lengths)} code cells have at most {USUAL_CELL} lines; 9 of 10 should"
    if not MEDIAN[0] <= statistics.median(lengths) <= MEDIAN[1]:
        yield 0, f"the median code cell has {statistics.median(lengths):g} lines; {MEDIAN[0]} to {MEDIAN[1]} read well"


@_rule
def _image(view: _View) -> Found:
    for number, output in view.outputs():
        for kind, data in output.get("data", {}).items():
            if not kind.startswith("image/"):
                continue
            alt = output.metadata.get(kind, {}).get("alt", "")
            if len(alt.split()) < 3:
                yield number, "a picture without a text that says what it shows: notebook.show(figure, alt=...)"
            if len(data) > IMAGE_BYTES:
                yield number, f"a picture of {len(data)} bytes, at most {IMAGE_BYTES}: fewer points, or smaller"


@_rule
def _opening(view: _View) -> Found:
    first = view.notebook.cells[0] if view.notebook.cells else None
    if first is None or first.cell_type != "markdown" or not first.source.startswith("# "):
        yield 1, "the first cell is no opening: a title (`# ...`), the reader's situation, and what it takes to read it"
    elif not OPENING.search(first.source.splitlines()[-1]):
        yield 1, "its last line is not `*Reads in N minutes, runs in N seconds on ... . Library stacks: ... .*`"


def _story(view: _View) -> list[tuple[int, Any]]:
    """Return the code cells in view, in order."""
    return [(number, cell) for number, cell in view.code if not is_folded(cell)]


@_rule
def _script(view: _View) -> Found:
    scripts = [number for number, cell in view.code if "script" in tags(cell)]
    story = _story(view)
    if len(scripts) != 1 or not story or scripts[0] != story[0][0]:
        yield 0, "the first code cell in view is not the reader's script; one cell is tagged `script`, and it is"
    elif re.search(r"^\s*(from|import) failurelab", story[0][1].source, re.MULTILINE):
        yield scripts[0], "the reader's script imports from this course: it must be one that a reader could have"


@_rule
def _bookkeeping(view: _View) -> Found:
    for number, cell in _story(view):
        if match := BOOKKEEPING.search(cell.source):
            yield number, f"`{match.group()}...)` in view is bookkeeping: fold the cell (jupyter.source_hidden)"


@_rule
def _answers(view: _View) -> Found:
    for number, cell in view.code:
        if predict.find_calls(cell.source, "answer") and not cell.metadata.get("jupyter", {}).get("outputs_hidden"):
            yield number, "a stored answer in view: who reads on meets it before the question (jupyter.outputs_hidden)"


@_rule
def _diff(view: _View) -> Found:
    diffs = [number for number, cell in view.markdown if "diff" in tags(cell) and diff_of(cell.source)]
    if not view.name.startswith("00") and len(diffs) != 1:
        yield 0, f"{len(diffs)} cells are tagged `diff` and hold a ```diff block: one says what to change in the script"


@_rule
def _length(view: _View) -> Found:
    if len(_story(view)) > STORY:
        yield 0, f"{len(_story(view))} code cells are in view, at most {STORY}: the rest belongs to docs/appendix"


@_rule
def _prediction(view: _View) -> Found:
    places = [n for n, cell in view.markdown if re.search(r"^[\W_]*predict", cell.source, re.MULTILINE | re.IGNORECASE)]
    if not view.name.startswith("00") and not any(place < number for place in places for number, _ in view.code):
        yield 0, "no prediction is asked before a run: a markdown line that starts with Predict"


@_rule
def _announced(view: _View) -> Found:
    for number, cell in view.markdown:
        if match := re.search(r"^([^|`\n]*:)\s*\n\n#+ ", cell.source, re.MULTILINE):
            yield number, f"{match[1][-40:]!r} announces something, and a heading follows: its cell is missing"


def _find_slips(name: str, cells: Iterable[tuple[int, str]]) -> Found:
    """Yield what is wrong with a notebook's questions: a cell's place (0 for the notebook), and why.

    Args:
        name: the notebook's; its number begins the key of each of its questions, so no two notebooks share one.
        cells: the place and the source of each code cell, in order.
    """
    open_questions: dict[str, tuple[int, predict.Question]] = {}
    seen: set[str] = set()
    for place, source in cells:
        if source.startswith("%%"):
            if "predict." in source:
                yield place, "a question in an era's kernel: the learner's buttons are in the course's own"
            continue
        if predict.find_calls(source, "say") or predict.find_calls(source, "forget"):
            yield place, "predict.say and predict.forget are the learner's: no notebook says what is predicted"
        for call in predict.find_calls(source, "answer"):
            key = call.args[0].value if call.args and isinstance(call.args[0], ast.Constant) else None
            if key not in open_questions or open_questions[key][0] == place:
                yield place, f"predict.answer({key!r}): no cell above asks it, or it was answered already"
                continue
            yield from ((place, why) for why in _wrong_answer(call, open_questions.pop(key)[1]))
        questions_here = predict.find_questions(source)
        if len(questions_here) != len(predict.find_calls(source, "ask")):
            yield place, "predict.ask takes a key, a text and a list of choices, all literal: the summary reads them"
        for question in questions_here:
            if not question.key.startswith(f"{name.partition('_')[0]}-") or question.key in seen:
                yield place, f"the key {question.key!r} does not begin with the notebook's number, or is used twice"
            seen.add(question.key)
            open_questions[question.key] = (place, question)
    for place, question in open_questions.values():
        yield place, f"predict.ask({question.key!r}) is never answered in a cell below"
    if len(seen) < 2:
        yield (
            0,
            f"{len(seen)} questions are asked, at least 2 should be: predict.ask before a run, predict.answer after",
        )


def _wrong_answer(call: ast.Call, question: predict.Question) -> Iterator[str]:
    holds = call.args[1] if len(call.args) > 1 else None
    if holds is None or isinstance(holds, ast.Constant):
        yield f"the answer to {question.key!r} is typed: it must come from the run's figures, or it outlives them"
    elif isinstance(holds, ast.Dict):
        listed = [key.value for key in holds.keys if isinstance(key, ast.Constant)]
        if sorted(listed) != sorted(question.choices):
            yield f"the answer to {question.key!r} judges {listed}, and the choices are {list(question.choices)}"


@_rule
def _questions(view: _View) -> Found:
    yield from _find_slips(view.name, ((number, cell.source) for number, cell in view.code))
    for number, text in view.texts():
        if "You said “" in text:
            yield number, "what a learner predicted is stored. Next: failurelab outputs"


@_rule
def _checked(view: _View) -> Found:
    cells = checked_cells(view.notebook)
    if not cells:
        yield 0, f"nbval would compare nothing: no cell has the tag {CHECKED}"
    for number, cell in cells:
        if not cell.outputs:
            yield number, f"tagged {CHECKED}, but no output is stored: nothing is compared"


@_rule
def _verdict(view: _View) -> Found:
    if not any("verdict_table(" in cell.source for _, cell in checked_cells(view.notebook)):
        yield 0, f"no verdict table: a cell tagged {CHECKED} that calls notebook.verdict_table"


@_rule
def _checked_floats(view: _View) -> Found:
    for number, cell in checked_cells(view.notebook):
        for text in itertools.chain.from_iterable(map(output_texts, cell.outputs)):
            if match := re.search(r"\b\d+\.\d{3,}|\b\d(\.\d+)?e[-+]?\d", text):
                yield number, f"{match.group()} is compared, and such digits vary by processor: compare a verdict"
