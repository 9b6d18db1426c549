"""No figure of a GPU, or of a simulation, is shown or recorded as the CPU's: what notebooks' code must say for that."""

import re

import pytest

from failurelab_course.notebook_runs import notebooks as course


@pytest.mark.parametrize("notebook", course.notebooks(), ids=lambda each: each.name)
def test_a_notebook_knows_where_it_measures(notebook):
    """Set-up says what `auto` means, no tier is typed, and a record without a device would count as the CPU's."""
    code = "\n".join(cell.source for cell in notebook.code)
    assert re.search(r"^device = notebook\.setup\(", code, re.MULTILINE)
    assert not re.search(r"tier: (cpu|gpu)", code)
    shared = re.findall(r"^(\w+) = \{[^}]*(?:\"device\": device|\"tier\": \"simulated\")[^}]*\}", code, re.MULTILINE)
    for call in re.findall(r"observe\.record\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)", code):
        assert "device=device" in call or "tier=" in call or any(f"**{name}" in call for name in shared), call
