"""An edit of the user's, tried by `failurelab preflight --edit`, and a measurement beside another: whole runs."""

import difflib
import io
import json
import pathlib
import sys

import pytest
from tests.cli import one_session

from failurelab_preflight import cli
from failurelab_preflight.answer import Answer

pytestmark = pytest.mark.slow

OWN = """\
class Own(GRPOTrainer):
    def _compute_loss(self, model, inputs):
        return -super()._compute_loss(model, inputs)
"""
SCRIPT = one_session.script(OWN, kind="Own")
HEALTHY = ("return -super()", "return super()")


def patch(before, after):
    texts = (text.splitlines(keepends=True) for text in (SCRIPT, SCRIPT.replace(before, after)))
    return "".join(difflib.unified_diff(*texts, "a/train.py", "b/train.py"))


@pytest.fixture(scope="module")
def tried(tmp_path_factory):
    """Return a function that tries a patch of the script: all in one session, for the libraries' imports take long."""
    folder = tmp_path_factory.mktemp("edit")
    path = folder / "train.py"
    path.write_text("from trl import GRPOTrainer\n")
    session = one_session.session_of(path, folder / "session", sys.executable, {}, limit=3000)
    with session.open():

        def run(diff):
            path.write_text(SCRIPT)
            answer = Answer("train.py")
            cli._judge_edit(answer, session, path, None, cli.Beside("my.patch", diff))
            assert path.read_text() == SCRIPT and {each.name for each in folder.iterdir()} == {"session", "train.py"}
            return answer

        yield run


def test_an_edit_that_heals(tried):
    """The verdict behind it is HELD; the figure that the failure was seen by is told before and after."""
    answer = tried(patch(*HEALTHY))
    assert answer.compared.healed == ["F21"] and not answer.compared.came
    (cosine,) = (figure for figure in answer.compared.figures if figure.name == "step_cosine")
    assert cosine.before < -0.99 and cosine.after > 0.999 and answer.exit_status == 0


def test_an_edit_that_breaks_the_script(tried):
    """One line with its error; what was measured without it stands."""
    answer = tried(patch("return -super()", "return nothing.there()"))
    assert answer.compared.error.endswith("ended in NameError: name 'nothing' is not defined") and not answer.error
    assert [each.failure for each in answer.accused] == ["F21"] and answer.exit_status == 4


def test_a_script_beside_another_and_beside_what_was_measured_before(tmp_path, monkeypatch, capsys):
    """Options stand behind the script too; JSON on standard output stands alone there."""
    monkeypatch.chdir(tmp_path)
    pathlib.Path("train.py").write_text(SCRIPT.replace(*HEALTHY))
    pathlib.Path("old.py").write_text(SCRIPT)
    assert cli.main(["train.py", "--against", "old.py", "--json", "after.json"]) == 0
    assert "beside old.py: healed by this edit: F21" in capsys.readouterr().out
    assert cli.main(["--no-try", "old.py", "--against", "after.json", "--json", "-"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["compared"]["came"] == ["F21"] and told["failures"]["F21"]["verdict"] == "SUSPECTED"
    assert "step_cosine" in {figure["name"] for figure in told["compared"]["figures"]}
    assert str(tmp_path) not in json.dumps(told)


@pytest.mark.parametrize(
    ("option", "name", "contents", "said"),
    [
        ("--against", "saved.json", json.dumps(Answer().to_json() | {"schema": 99}), "wrote schema 99"),
        ("--against", "saved.json", "[]", "neither a script nor what --json wrote"),
        ("--edit", "my.patch", None, "No such file"),
    ],
)
def test_what_it_is_to_stand_beside_is_read_before_the_run(option, name, contents, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "ask", lambda *_, **__: pytest.fail("the script was run"))
    pathlib.Path("train.py").touch()
    if contents is not None:
        pathlib.Path(name).write_text(contents)
    assert cli.main(["train.py", option, name]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and said in told and name in told


def test_an_edit_on_standard_input(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("train.py").touch()
    asked = {}
    monkeypatch.setattr(cli, "ask", lambda line, **options: asked.update(options) or Answer(line.script))
    monkeypatch.setattr(sys, "stdin", io.StringIO("a patch"))
    assert cli.main(["--edit", "-", "train.py"]) == 0 and asked["beside"].patch == "a patch"
