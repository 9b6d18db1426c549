"""docs/gpu.md says what each notebook makes of `device` and `model`: its table is what the notebooks' code does."""

import re

import pytest

from failurelab_course import eras
from failurelab_course.runs import notebooks as course

PAGE = (eras.root() / "docs" / "gpu.md").read_text(encoding="utf-8")


def row(notebook):
    """Return the table's row for a notebook, from its code."""
    code = "\n".join(cell.source for cell in notebook.code)
    shape = re.search(r"shapes\.config\(model\b", code)
    chosen, instead = "notebook.model_path(" in code, "fall_back=True" in code
    trained = "tiers.learner(model)" in code or "model_choice.require_qwen2(model)" in code
    if not (chosen or trained or shape):
        random = other = "not used"
    else:
        random = "`tiny` is trained" + (", its shape is used" if shape else "")
        other = "itself"
        if chosen:
            other += ", `tiny` for the curves if it cannot learn" if instead else "; NOT RUN if it cannot learn"
    gpu = "simulated there too" if "one_gpu=False" in code else "all of it"
    if "budget.spend(" in code:
        gpu += ", out of memory for real"
    return f"| {notebook.name[:2]} | {random} | {other} | {gpu} |"


@pytest.mark.parametrize("notebook", course.notebooks(), ids=lambda each: each.name)
def test_the_table_says_what_the_code_does(notebook):
    """Next, where it does not: put this row into docs/gpu.md, or mend the notebook."""
    assert row(notebook) in PAGE.splitlines()


@pytest.mark.parametrize("notebook", course.notebooks(), ids=lambda each: each.name)
def test_no_tier_is_typed(notebook):
    """A figure of a GPU must not be printed as the CPU's."""
    for cell in notebook.code:
        assert not re.search(r"tier: (cpu|gpu)", cell.source), cell.id


@pytest.mark.parametrize("notebook", course.notebooks(), ids=lambda each: each.name)
def test_every_record_says_where_it_was_measured(notebook):
    """A record without a device counts as the CPU's."""
    code = "\n".join(cell.source for cell in notebook.code)
    shared = re.findall(r"^(\w+) = \{[^}]*(?:\"device\": device|\"tier\": \"simulated\")[^}]*\}", code, re.MULTILINE)
    for call in re.findall(r"observe\.record\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)", code):
        said = "device=device" in call or "tier=" in call or any(f"**{name}" in call for name in shared)
        assert said, call


def test_setup_resolves_the_device():
    """What `auto` means is known after the set-up; a cell that went on with `auto` would not know its tier."""
    for notebook in course.notebooks():
        code = "\n".join(cell.source for cell in notebook.code)
        assert re.search(r"^device = notebook\.setup\(", code, re.MULTILINE), notebook.name
