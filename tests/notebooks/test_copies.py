"""The reader's copies: no answers in them, renewed with the course, and never written over once changed."""

import json

import pytest

from failurelab_course.notebook_runs import copies, stored
from failurelab_course.notebook_runs import notebooks as course


@pytest.fixture
def original(plant, tmp_path, monkeypatch):
    """A course of one notebook that has its outputs stored."""
    path = plant("01_one", "print('the answer')")
    content = json.loads(path.read_text())
    content["cells"][2] |= {
        "execution_count": 2,
        "outputs": [{"output_type": "stream", "name": "stdout", "text": ["the answer\n"]}],
        "metadata": {"jupyter": {"source_hidden": True, "outputs_hidden": True}},
    }
    path.write_text(json.dumps(content))
    monkeypatch.setattr(course, "notebooks", lambda folder=None: [course.Notebook(path)])
    return path


def edit(path, source):
    content = json.loads(path.read_text())
    content["cells"][2]["source"] = [source]
    path.write_text(json.dumps(content))


def test_a_copy_has_no_answers_and_shows_those_to_come(original, tmp_path):
    """Sources stay folded; an output that comes is no longer hidden."""
    assert copies.refresh(tmp_path / "mine") == []
    cell = stored.read(tmp_path / "mine" / original.name).cells[2]
    assert cell.outputs == [] and cell.execution_count is None
    assert cell.metadata.jupyter == {"source_hidden": True}


def test_a_copy_is_renewed_unless_its_reader_changed_it(original, tmp_path):
    copies.refresh(tmp_path / "mine")
    copy = tmp_path / "mine" / original.name
    edit(original, "print('a newer one')")
    assert copies.refresh(tmp_path / "mine") == []
    assert "a newer one" in copy.read_text()
    edit(copy, "print('my own')")
    assert copies.refresh(tmp_path / "mine") == []  # the course has nothing newer
    edit(original, "print('newest')")
    (line,) = copies.refresh(tmp_path / "mine")
    assert original.name in line and "yours and stays" in line
    assert "my own" in copy.read_text()


def test_a_lost_list_writes_over_nothing(original, tmp_path):
    """Without the list nobody knows what was changed, so all is kept."""
    copies.refresh(tmp_path / "mine")
    edit(tmp_path / "mine" / original.name, "print('my own')")
    (tmp_path / "mine" / ".copies.json").write_text("{")
    assert len(copies.refresh(tmp_path / "mine")) == 1
    assert "my own" in (tmp_path / "mine" / original.name).read_text()
