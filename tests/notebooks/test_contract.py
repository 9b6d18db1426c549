"""The notebook contract: a good notebook is clean, and each rule fires on a notebook planted to break it alone."""

import copy

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from failurelab_course.runs import lint as contract
from failurelab_course.runs import stored

OPENING = """# Nothing breaks

Your run is as it should be.

*Reads in 5 minutes, runs in 40 seconds on two CPU cores with 4 GB of memory. Library stacks: trl-0.14, today.*"""
SCRIPT = """%%era trl-0.14 -i steps,model_path
args = GRPOConfig(max_steps=steps)
trainer = GRPOTrainer(model=model_path, args=args)
trainer.train()"""
DIFF = """## The diff

```diff
--- train.py
+++ train.py
@@ -1,1 +1,1 @@
-args = GRPOConfig(max_steps=steps)
+args = GRPOConfig(max_steps=steps, learning_rate=1e-5)
```"""
FOLDED = {"jupyter": {"source_hidden": True}}
ANSWERED = {"jupyter": {"source_hidden": True, "outputs_hidden": True}}
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNk+A8AAQUBAScY42YAAAAASUVORK5CYII="
TABLE = "measured    verdict\n----------  ---------\ntrainable   ✓ healthy"

ASK = """predict.ask("{}", "Will it learn?", [
    "yes", "no"])"""
ANSWER = """predict.answer("{}", {{
    "yes": reward > 5, "no": reward <= 5}})"""


def good(number="01"):
    """Return a notebook that holds to the contract, if its name begins with this number."""
    image = {"image/png": {"alt": "Reward rises over the steps"}}
    cells = [
        new_markdown_cell(OPENING),
        new_code_cell('device = "cpu"\nmodel = "tiny"\nseed = 0', metadata={"tags": ["parameters"], **FOLDED}),
        new_code_cell("from failurelab_course import notebook\n\nnotebook.setup(seed=seed)", metadata=FOLDED),
        new_markdown_cell("## Predict\n\nWill it learn?"),
        new_code_cell(SCRIPT, metadata={"tags": ["script"]}),
        new_code_cell(
            "steps = 20\nprint('after', steps, 'steps')",
            outputs=[new_output("stream", name="stdout", text="after 20 steps, on CPU/GPU, see https://a.org/b/c\n")],
        ),
        new_code_cell(
            'figure = draw(steps)\nnotebook.show(figure, alt="Reward rises over the steps")',
            outputs=[new_output("display_data", data={"image/png": PNG, "text/plain": "x"}, metadata=image)],
        ),
        new_code_cell(
            'notebook.verdict_table(\n    [["trainable", True]], columns=["measured", "verdict"]\n)',
            outputs=[new_output("display_data", data={"text/plain": TABLE, "text/html": "<td>yes</td>"}, metadata={})],
            metadata={"tags": ["nbval-check-output"]},
        ),
        new_code_cell("%%era trl-0.14 -i steps -o reward\n\nreward = steps / 2"),
        new_code_cell(ASK.format(f"{number}-learns"), metadata=FOLDED),
        new_code_cell(ASK.format(f"{number}-again"), metadata=FOLDED),
        new_code_cell(ANSWER.format(f"{number}-learns"), metadata=ANSWERED),
        new_code_cell(ANSWER.format(f"{number}-again"), metadata=ANSWERED),
        new_markdown_cell(DIFF, metadata={"tags": ["diff"]}),
    ]
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
        if cell.cell_type == "code":
            cell.execution_count = 1
    return stored.normalise(new_notebook(cells=cells))


def tag(*names):
    def plant(notebook):
        notebook.cells[5].metadata["tags"] = list(names)

    return plant


def source(text, cell=5):
    def plant(notebook):
        notebook.cells[cell].source = text

    return plant


def output(text, kind="stdout"):
    def plant(notebook):
        if kind in ("stdout", "stderr"):
            made = new_output("stream", name=kind, text=text)
        else:
            made = new_output("display_data", data={kind: text}, metadata={})
        notebook.cells[5].outputs = [made]

    return plant


def era_cell(body):
    return source(f"%%era trl-0.14\n\n{body}", cell=8)


def more(notebook, text, number=12):
    """Append more cells with this code, run in order; return them."""
    made = [copy.deepcopy(notebook.cells[5]) for _ in range(number)]
    for number, cell in enumerate(made):
        cell.update(id=f"more-{number}", source=text)
    notebook.cells += made
    for place, cell in enumerate([cell for cell in notebook.cells if cell.cell_type == "code"], 1):
        cell.execution_count = place
    return made


def swap(cells, one, other, *parts):
    """Exchange the sources of two cells, or other parts of them."""
    for part in parts or ("source",):
        cells[one][part], cells[other][part] = cells[other][part], cells[one][part]


def skipped_by_papermill_alone(notebook):
    tag("skip-execution")(notebook)
    notebook.cells[5].update(execution_count=None, outputs=[])
    notebook.cells = stored.normalise(notebook).cells


PLANTED = {
    "kernel": [lambda nb: nb.metadata.kernelspec.update(name="my-env")],
    "syntax": [source("print('a'\nx = 1"), era_cell("if x\n    pass")],
    "parameters": [
        lambda nb: nb.cells[1].update(source='device = "cpu"\nseed = 0'),
        lambda nb: nb.cells[1].update(source='device = "cuda"\nmodel = "tiny"\nseed = 0'),
        lambda nb: nb.cells[1].update(source='device = "cpu"\nmodel = "tiny"\nseed = False'),
        tag("parameters"),
    ],
    "setup": [
        source("from failurelab_course import notebook\n\nnotebook.setup(seed=0)", cell=2),
        source("from failurelab_course import notebook\n# notebook.setup(seed=seed)", cell=2),
    ],
    "unseeded": [
        source("rng = numpy.random.default_rng()\nrng"),
        source("torch.seed()\nseed"),
        era_cell("import random\nrandom.seed()"),
    ],
    "raises-exception": [tag("raises-exception"), source("# NBVAL_RAISES_EXCEPTION\n1 / 0")],
    "rich-traceback": [
        source("import rich.traceback as t\nt.install()"),
        source("from rich import print, traceback\ntraceback.install()"),
    ],
    "shell": [
        source("!pip install trl\nx = 1"),
        source("names = !ls\nnames"),
        source("%%bash\nls -la"),
        source("x = 1\n%pip install trl"),
        source("import os\nos.system('ls')"),
        era_cell("!nvidia-smi"),
    ],
    "skip-tags": [skipped_by_papermill_alone, tag("nbval-skip"), source("# NBVAL_SKIP\nx = 1")],
    "display-id": [source("display(1, display_id='a')\nx"), source("%matplotlib widget\nx = 1")],
    "outputs": [
        lambda nb: nb.cells[5].update(execution_count=None, outputs=[]),
        lambda nb: nb.cells[5].update(execution_count=9),
    ],
    "error-output": [
        lambda nb: nb.cells[5].update(outputs=[new_output("error", ename="ValueError", evalue="", traceback=[])])
    ],
    "stderr": [output("a notice\n", "stderr")],
    "timing": [
        output("done in 12.3 s\n"),
        output("3 minutes left\n"),
        output("{'train_runtime': 3}\n"),
        output("<td>4 ms</td>", "text/html"),
        output("at 12:30:01\n"),
        output("'train_steps_per_second': 4\n"),
    ],
    "path": [
        output("saved to /home/ann/out/model\n"),
        output("see ~/models\n"),
        output("File lib/site-packages/trl\n"),
        output("(/tmp/ipykernel_12/33.py)\n"),
    ],
    "address": [output("<object at 0x7f3a2b4c5d60>\n")],
    "progress-bar": [output(" 40%|####      | 4/10\n"), output("a\rb\n"), output("Loading ━━━━━━━━\n")],
    "widget": [output("{}", "application/vnd.jupyter.widget-view+json"), output("x", "application/javascript")],
    "metadata": [
        lambda nb: nb.metadata.update(papermill={"duration": 3}),
        lambda nb: nb.metadata.language_info.update(version="3.11.7"),
        lambda nb: nb.cells[5].metadata.update(execution={"iopub.status.busy": "now"}),
        lambda nb: nb.cells[6].outputs[0].metadata.update(needs_background="light"),
        lambda nb: nb.cells.insert(2, new_markdown_cell("x", metadata={"tags": ["papermill-error-cell-tag"]})),
    ],
    "line-length": [source("x = '" + "a" * 75 + "'\nx")],
    "cell-length": [lambda nb: more(nb, "x = 1\nx") and nb.cells[5].update(source="x = 1\n" * 41)],
    "cell-lengths": [
        lambda nb: [each.update(source="x = 1\n" * 30) for each in nb.cells[5:7]],
        lambda nb: more(nb, "x"),
    ],
    "image": [
        lambda nb: nb.cells[6].outputs[0].update(metadata={}),
        lambda nb: nb.cells[6].outputs[0].metadata["image/png"].update(alt="plot"),
        lambda nb: nb.cells[6].outputs[0].data.update({"image/png": "A" * 300_000}),
        output("<svg></svg>", "image/svg+xml"),
    ],
    "opening": [
        source("Some text", cell=0),
        source(OPENING.replace("Reads in 5 minutes", "Short"), cell=0),
        source(OPENING.replace("Library stacks: trl-0.14, today.", ""), cell=0),
    ],
    "script": [
        lambda nb: nb.cells[4].metadata.pop("tags"),
        lambda nb: swap(nb.cells, 4, 5, "source", "metadata"),
        source(SCRIPT.replace("args =", "from failurelab import guards\nargs ="), cell=4),
    ],
    "bookkeeping": [
        source("print('after', steps)\nobserve.record('F1', 'broken', {})"),
        lambda nb: nb.cells[9].metadata.clear(),
    ],
    "diff": [source("## The end\n\nNo diff.", cell=13), lambda nb: nb.cells.pop()],
    "answers": [lambda nb: nb.cells[11].metadata.update(FOLDED)],
    "length": [lambda nb: more(nb, "x = 1\nx", 36)],
    "prediction": [
        source("## A look\n\nThe prediction comes never.", cell=3),
        lambda nb: nb.cells.append(nb.cells.pop(3)),
    ],
    "announced": [source("## Predict\n\nWill it learn? We measure it:\n\n## 2. The repair\n\nIt heals.", cell=3)],
    "questions": [
        lambda nb: swap(nb.cells, 9, 11, "source", "metadata"),  # answered before it is asked
        source(ASK.format("01-learns") + "\n" + ANSWER.format("01-learns"), cell=11),  # in one cell, no run between
        source("x = 1\nx", cell=11),  # never answered
        source(ANSWER.format("01-other"), cell=11),
        source(ASK.format("01-learns"), cell=10),  # a key twice
        source(ASK.format("02-again"), cell=10),  # another notebook's key
        source(ASK.format("01-again").replace('"no"', "NO"), cell=10),  # not to be read without running it
        source('predict.answer("01-again", "yes")\nx = 1', cell=12),  # typed, not measured
        source(ANSWER.format("01-again").replace('"no"', '"maybe"'), cell=12),
        source(f'{ANSWER.format("01-again")}\npredict.say("01-learns", "yes")', cell=12),
        source("%%era trl-0.14\n" + ANSWER.format("01-again"), cell=12),
        lambda nb: [each.update(source="x = 1\nx") for each in (nb.cells[10], nb.cells[12])],  # only one
        output("Answer: You said “yes”: right."),
    ],
    "checked": [lambda nb: nb.cells[7].update(outputs=[])],
    "verdict": [source("print(report.learns)\nreport", cell=7)],
    "checked-floats": [
        lambda nb: nb.cells[7].outputs[0].data.update({"text/plain": "loss 0.6931"}),
        lambda nb: nb.cells[7].outputs[0].data.update({"text/plain": "error 3e-05"}),
    ],
}


def broken_rules(notebook, path):
    path.write_text(stored.text(notebook), encoding="utf-8")
    return contract.check(path)


def test_a_good_notebook_is_clean(tmp_path):
    """What the contract allows must pass: an era's cell, a link, a count of steps, CPU/GPU."""
    assert broken_rules(good(), tmp_path / "01_good.ipynb") == []


@pytest.mark.parametrize(
    ("rule", "plant"), [pytest.param(r, p, id=f"{r}-{n}") for r in PLANTED for n, p in enumerate(PLANTED[r], 1)]
)
def test_each_rule_fires_alone(tmp_path, rule, plant):
    """A planted breach is found by its own rule, and by no other, with a message that says more than its name."""
    notebook = good()
    plant(notebook)
    found = broken_rules(notebook, tmp_path / "01_bad.ipynb")
    assert {violation.rule for violation in found} == {rule}, [str(each) for each in found]
    assert all(len(each.message) > 20 and "\n" not in str(each) for each in found)


def test_the_form_is_measured(tmp_path):
    """What `failurelab contract` prints, of a notebook whose cells can be counted by hand."""
    path = tmp_path / "01_good.ipynb"
    path.write_text(stored.text(good()), encoding="utf-8")
    assert contract.form(path) == {
        "code cells in view": 5,
        "folded": 6,
        "words": len(OPENING.split()) + len("## Predict Will it learn? ## The diff".split()),
        "bookkeeping in view": 0,
        "script in code cell": 1,
        "compared cells": 1,
        "ends in a diff": "yes",
    }


def test_every_rule_has_a_planted_notebook():
    """A rule that nobody has seen fire may be one that cannot."""
    assert set(PLANTED) == set(contract.RULES)


def test_nothing_is_checked_without_a_marked_cell(tmp_path):
    """Without a marked cell `--nbval-lax` compares nothing and passes; two rules say so."""
    notebook = good()
    notebook.cells[7].metadata.pop("tags")
    assert {each.rule for each in broken_rules(notebook, tmp_path / "01_bad.ipynb")} == {"checked", "verdict"}


def test_the_first_notebook_may_do_without_a_prediction(tmp_path):
    """Notebook 00 shows a healthy run."""
    for number, broken in (("00", []), ("02", ["prediction"])):
        notebook = good(number)
        notebook.cells.pop(3)
        assert [each.rule for each in broken_rules(notebook, tmp_path / f"{number}_good.ipynb")] == broken


@pytest.mark.parametrize("text", ["", "{", "[]", '{"cells": 3}'])
def test_a_file_that_is_no_notebook_is_a_violation(tmp_path, text):
    """A half-written file is told in a line, not with a traceback."""
    path = tmp_path / "01_bad.ipynb"
    path.write_text(text)
    assert [each.rule for each in contract.check(path)] == ["format"]


def test_a_pair_of_skip_tags_is_allowed(tmp_path):
    """A cell that neither tool runs has no outputs and no number, and that is in order."""
    notebook = good()
    tag("skip-execution", "nbval-skip")(notebook)
    notebook.cells[5].update(execution_count=None, outputs=[])
    assert broken_rules(stored.normalise(notebook), tmp_path / "01_good.ipynb") == []


def test_the_stored_form_is_a_fixed_point():
    """What papermill and JupyterLab add goes, what a reader needs stays, and doing it twice changes nothing more."""
    notebook = good()
    untidy = copy.deepcopy(notebook)
    untidy.metadata.update(papermill={"duration": 3.2}, widgets={})
    untidy.cells[5].metadata.update(papermill={"duration": 1}, collapsed=True)
    untidy.cells.insert(2, new_code_cell("seed = 5", metadata={"tags": ["injected-parameters"]}, execution_count=2))
    text = untidy.cells[6].outputs[0].text
    untidy.cells[6].outputs = [new_output("stream", name="stdout", text=part) for part in (text[:4], text[4:])]
    for number, cell in enumerate([cell for cell in untidy.cells if cell.cell_type == "code"], 7):
        cell.execution_count = number
    assert stored.text(stored.normalise(untidy)) == stored.text(notebook)
    assert stored.normalise(stored.normalise(untidy)) == stored.normalise(untidy)
    assert nbformat.reads(stored.text(notebook), as_version=4) == notebook
