"""The lint of notebooks and the form they are stored in: a good notebook is clean, each rule fires on a planted one."""

import copy
import types

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from tools import notebook_lint, store_outputs

from failurelab_course.notebook_runs import notebooks as course

OPENING = """# Nothing breaks

*Reads in 5 minutes, runs in 40 seconds on two CPU cores with 4 GB of memory. Library stacks: trl-0.14, today.*"""
SCRIPT = """%%era trl-0.14 -i steps,model_path
trainer = GRPOTrainer(model=model_path)
trainer.train()"""
DIFF = """```diff
--- train.py
+++ train.py
@@ -1,1 +1,1 @@
-trainer.train()
+trainer.train(True)
```"""
FOLDED, ANSWER = {"source_hidden": True}, {"source_hidden": True, "outputs_hidden": True}
SLIDE = {"slideshow": {"slide_type": "slide"}}


def code(source, *outputs, tags=(), jupyter=None):
    cell = new_code_cell(source, outputs=list(outputs), execution_count=1)
    cell.metadata = nbformat.from_dict({"tags": list(tags)} | ({"jupyter": jupyter} if jupyter else {}))
    return cell


def text(said, name="stdout"):
    return new_output("stream", name=name, text=said)


def shown(**data):
    data = {kind.replace("_", "/"): value for kind, value in data.items()}
    return new_output("display_data", data=data, metadata={"image/png": {"alt": "Reward rises over the steps"}})


def good():
    """Return a notebook that holds to the rules, if its name begins with 01; cell 6 is where others are planted."""
    cells = [
        new_markdown_cell(OPENING, metadata=SLIDE),
        code('device = "cpu"\nmodel = "tiny"\nseed = 0', tags=["parameters"], jupyter=FOLDED),
        code("from failurelab_course import notebook\n\nnotebook.setup(seed=seed)", jupyter=FOLDED),
        code(SCRIPT, tags=["script"]),
        code('predict.ask("01-learns", "Will it?", ["yes", "no"])', jupyter=FOLDED),
        code('predict.ask(\n    "01-again", "And again?", ["yes", "no"])', jupyter=FOLDED),
        code("print('after', steps)", text("after 20 steps, on CPU/GPU, see https://a.org/b/c\n")),
        code("notebook.show(figure)", shown(image_png="iVBORw0KGgo", text_plain="x")),
        code("notebook.verdict_table(rows)", shown(text_plain="trainable  ✓ healthy"), tags=["nbval-check-output"]),
        code('predict.answer("01-learns", {"yes": up, "no": not up})', jupyter=ANSWER),
        code('predict.answer("01-again", {"yes": up, "no": not up})', jupyter=ANSWER),
        new_markdown_cell(DIFF, metadata={"tags": ["diff"]}),
    ]
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    return store_outputs.normalise(new_notebook(cells=cells))


def source(content, cell=6):
    return lambda notebook: notebook.cells[cell].update(source=content)


def output(*made):
    return lambda notebook: notebook.cells[6].update(outputs=list(made))


def tag(*names, cell=6):
    return lambda notebook: notebook.cells[cell].metadata.update(tags=list(names))


PLANTED = {
    "stored": [
        lambda nb: nb.metadata.kernelspec.update(name="my-env"),
        lambda nb: nb.cells[6].metadata.update(execution={"iopub.status.busy": "now"}),
        lambda nb: nb.cells[6].update(execution_count=9),
        lambda nb: nb.cells[10].update(execution_count=None),
    ],
    "parameters": [
        source('device = "cuda"\nmodel = "tiny"\nseed = 0', cell=1),
        source('device = "cpu"\nmodel = "tiny"\nseed = False', cell=1),
        source("# notebook.setup(seed=seed)", cell=2),
        tag("parameters"),
    ],
    "error": [output(new_output("error", ename="ValueError", evalue="", traceback=[])), output(text("a\n", "stderr"))],
    "differs": [
        *map(output, map(text, ("done in 12.3 s\n", "{'train_runtime': 3}\n", "at 12:30:01\n", "see ~/models\n"))),
        *map(output, map(text, ("saved to /home/ann/out\n", "<object at 0x7f3a2b4c5d60>\n", " 40%|####  | 4/10\n"))),
        output(shown(text_html="<td>4 ms</td>")),
    ],
    "shown": [
        output(shown(**{"application/vnd.jupyter.widget-view+json": "{}"})),
        lambda nb: nb.cells[7].outputs[0].metadata["image/png"].update(alt="plot"),
        lambda nb: nb.cells[7].outputs[0].data.update({"image/png": "A" * 300_000}),
    ],
    "source": [source("x = '" + "a" * 75 + "'"), source("x = 1\n" * 41), source("!pip install trl"), source("%pip a")],
    "opening": [source("# Some text", cell=0), source(OPENING.replace("Reads in 5 minutes", "Short"), cell=0)],
    "script": [
        tag("other", cell=3),
        source(SCRIPT.replace("trainer =", "from failurelab import guards\ntrainer ="), cell=3),
        source("No diff.", cell=11),
    ],
    "slides": [source("## A heading\n\n" + DIFF, cell=11), lambda nb: nb.cells[0].metadata.clear()],
    "folded": [
        source("observe.record('F1', 'broken', {})"),
        lambda nb: nb.cells[9].metadata.jupyter.pop("outputs_hidden"),
    ],
    "questions": [
        source("x = 1", cell=10),  # never answered
        source('predict.ask("01-learns", "Will it?", ["yes", "no"])', cell=5),  # a key twice
        source('predict.ask("02-again", "Will it?", ["yes", "no"])\npredict.answer("02-again", "yes")', cell=10),
    ],
    "nbval": [
        lambda nb: nb.cells[8].update(outputs=[]),
        lambda nb: nb.cells[8].outputs[0].data.update({"text/plain": "loss 0.6931"}),
        tag("other", cell=8),
        tag("raises-exception"),
        tag("skip-execution"),
    ],
}


def test_a_good_notebook_is_clean():
    """What is allowed must pass: an era's cell, a link, a count of steps, CPU/GPU."""
    assert notebook_lint.check("01_good", good()) == []


@pytest.mark.parametrize(("rule", "number"), [(rule, n) for rule in PLANTED for n in range(len(PLANTED[rule]))])
def test_each_rule_fires_alone(rule, number):
    notebook = good()
    PLANTED[rule][number](notebook)
    found = notebook_lint.check("01_bad", notebook)
    assert {line.partition(":")[0] for line in found} == {rule}, found


def test_every_rule_has_a_planted_notebook():
    """A rule that nobody has seen fire may be one that cannot."""
    assert set(PLANTED) == set(notebook_lint.RULES)


def test_the_course_s_notebooks_hold():
    """Next, where one does not: make outputs NAME=..., or what the line says."""
    assert [line for each in course.notebooks() for line in notebook_lint.check(each.name, each.content)] == []


def test_the_stored_form_is_a_fixed_point():
    """What papermill and JupyterLab add goes, what a reader needs stays, and doing it twice changes nothing more."""
    notebook = good()
    untidy = copy.deepcopy(notebook)
    untidy.metadata.update(papermill={"duration": 3.2}, widgets={})
    untidy.cells[6].metadata.update(papermill={"duration": 1}, collapsed=True)
    untidy.cells.insert(2, new_code_cell("seed = 5", metadata={"tags": ["injected-parameters"]}, execution_count=2))
    untidy.cells[7].outputs = [text("after 20 steps, on CPU/GPU, "), text("see https://a.org/b/c\n")]
    for number, cell in enumerate([cell for cell in untidy.cells if cell.cell_type == "code"], 7):
        cell.execution_count = number
    assert store_outputs.normalise(untidy) == notebook
    assert store_outputs.normalise(notebook) == notebook


def test_outputs_are_stored_by_a_run_that_passes(plant, tmp_path, monkeypatch):
    """Made again, the file is the same; a run that fails, or a file that was edited meanwhile, is left as it is."""
    path, broken, edited = (plant(name, "print('seed', seed)") for name in ("00_one", "01_two", "02_edited"))
    before = broken.read_bytes()

    def run(names, **_):
        """Execute as papermill would: a stream in two pieces, counts, and what is of this run alone."""
        edited.write_text(edited.read_text() + " ")
        for name in names:
            executed = nbformat.read(plant.folder / f"{name}.ipynb", as_version=4)
            executed.metadata.papermill = {"duration": 3.2}
            for count, cell in enumerate(executed.cells[1:], 7):
                cell.update(execution_count=count, outputs=[text("seed "), text("0\n")] if count == 8 else [])
            nbformat.write(executed, tmp_path / name)
            status = "FAIL" if name == "01_two" else "PASS"
            yield types.SimpleNamespace(name=name, status=status, reason="why", copy=tmp_path / name)

    monkeypatch.setattr(store_outputs.runs, "run", run)
    problems = store_outputs.store(folder=plant.folder)
    assert problems["00_one"] == "" and problems["01_two"] == "FAIL: why"
    assert "changed while it ran" in problems["02_edited"] and edited.read_text().endswith("}\n ")
    assert broken.read_bytes() == before
    cells = nbformat.read(path, as_version=4).cells
    assert [cell.execution_count for cell in cells[1:]] == [1, 2]
    assert [output.text for output in cells[2].outputs] == ["seed 0\n"] and not cells[2].metadata
    first = path.read_bytes()
    assert store_outputs.store(["00"], folder=plant.folder) == {"00_one": ""}
    assert path.read_bytes() == first


@pytest.mark.parametrize(("took", "said"), [(40.0, 40), (40.1, 45), (0.2, 5)])
def test_the_seconds_of_a_run_are_rounded_up_and_nothing_else_changes(took, said):
    opening = (
        "# A title\n\nIt takes 3 seconds.\n\n*Reads in 5 minutes, runs in 40 seconds on two. Library stacks: today.*"
    )
    assert store_outputs.write_seconds(opening, took) == opening.replace("runs in 40", f"runs in {said}")
