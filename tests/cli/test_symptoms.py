"""From a line in a log to the failure: every literal text of the course is found, in the page and by the command."""

import re

import tomllib

from failurelab import failures as registry
from failurelab.failures import symptoms
from failurelab_course import eras, symptoms_page


def test_the_pages_are_not_stale():
    """They are written from the registry and the labs by `failurelab symptoms --write`, and by nothing else."""
    docs = eras.root() / "docs"
    assert (eras.root() / symptoms.PAGE).read_text(encoding="utf-8") == symptoms_page.page()
    assert (docs / "zh/symptoms.md").read_text(encoding="utf-8") == symptoms_page.chinese_page()


CODE = re.compile(r"[A-Za-z_][\w.]{5,}|\d+(?:\.\d+)+")  # names and versions, in prose of either language


def test_the_chinese_texts_have_no_name_that_english_lacks():
    files = (eras.root() / symptoms_page.FILES[3:]).glob("F*.toml")
    known = " ".join(path.read_text(encoding="utf-8") for path in files)
    texts = tomllib.loads((eras.root() / symptoms_page.CHINESE).read_text(encoding="utf-8"))
    for failure, entry in texts.items():
        whole = " ".join(text if isinstance(text, str) else " ".join(text) for text in entry.values())
        missing = [name for name in CODE.findall(whole) if name not in known]
        assert not missing, (failure, missing)


def test_the_command_reads_a_log_and_its_input(failurelab, tmp_path):
    text = registry.get("F1").symptoms[0]
    log = tmp_path / "train.log"
    log.write_text(f"UserWarning: {text}\n")
    for done in (failurelab("symptoms", str(log)), failurelab("symptoms", stdin=log.read_text())):
        assert done.returncode == 0
        assert "F1: " in done.stdout and "notebooks/01_requires_grad_warning.ipynb" in done.stdout
    unknown = failurelab("symptoms", stdin="all is well")
    assert len(unknown.stdout.splitlines()) == 2 and unknown.returncode == 1
    assert failurelab("symptoms", str(tmp_path / "none.log")).returncode == 2
