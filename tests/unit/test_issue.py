"""Reports for issues: what is found is told, and nothing that is private, wherever it stood."""

import getpass
import pathlib
import platform
import subprocess
import sys

import pytest

from failurelab import _issue
from failurelab.diagnose import command as diagnose
from failurelab.preflight.report import answer, issue

# Each is private by another rule: named by the environment or an option, or by what it looks like.
FORMS = {
    "token of the hub": "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",
    "another token": "sk-proj-9dK2mXq7TzR4vBn8LwYp3HsJ",
    "long hexadecimal": "9f86d081884c7d659a2feaa0c55ad015",
    "a password, by its name": "wandb_api_key=correct",
    "an address": "someone@ravenholm-labs.example",
    "a host": "db01.ravenholm.internal:5432",
    "its number": "10.23.7.91",
    "a URL": "https://ravenholm.example/private?x=1",
    "a path": "/srv/ravenholm/projects/train_rows.jsonl",
    "a path from home": "~/ravenholm/rows",
    "a relative path": "ravenholm/secret_model",
    "a path of Windows": r"C:\Users\ravenholm\rows",
    "a row of the data": "'ravenholm pays its debts in the third quarter'",
    "this machine": "ravenholm-box-7",
}


def told(secret):
    """Return an answer of preflight that has a secret in everything that comes from outside."""
    diff = f"""--- a/{secret}.py
+++ b/{secret}.py
@@ -1,3 +1,3 @@
 login("{secret}")  # {secret}
-config = GRPOConfig("{secret}", bf16=True)  # ask {secret}
+config = GRPOConfig("{secret}", bf16=False, loss_type="dapo")  # ask {secret}
+    {secret!r} + '''not closed {secret.strip("'")}
 other = '''{secret}'''
"""
    finding = {"failure": "F9", "evidence": f"0.4 % of the elements ({secret})", "repair": f"Load {secret} in float32.",
               "tried": f"98 % of {secret}", "diff": diff, "notebook": "09", "why": f"it read {secret}"}  # fmt: skip
    return answer.Told(
        f"work/{secret}/train.py",
        {"torch": "2.5.1+ravenholm.internal", "trl": "0.14.0"},
        findings=[finding],
        suspected=[finding | {"failure": "F15"}],
        not_checked=[{"failure": "F11", "why": f"the hub was not reached ({secret})"}],
        cut=[f"rows of {secret}"],
        error=f"line 3, ended in ValueError: {secret}",
        notes=[f"it writes {secret}"],
    )


@pytest.mark.parametrize("form", FORMS)
def test_nothing_private_is_in_a_report(form, monkeypatch):
    monkeypatch.setattr(platform, "node", lambda: FORMS["this machine"])
    text = issue.markdown(told(FORMS[form]), ["train.py"])
    assert FORMS[form].strip("'") not in text and "ravenholm" not in text
    for part in ("0.4 % of the elements", "98 %", "bf16=False", 'loss_type="dapo"', "| trl | 0.14.0 |", "F11", "F15"):
        assert part in text


def test_the_environment_and_the_options_are_private(monkeypatch):
    """Whatever they look like: a plain word too. Numbers stay, or no figure could be told."""
    monkeypatch.setenv("A_NAME_THAT_SAYS_NOTHING", "glimmerwick")
    monkeypatch.setenv("A_NUMBER", "0.400000")
    monkeypatch.setattr(getpass, "getuser", lambda: "quill")
    options = ["--report", "out.md", "train.py", "--run-name=thistledown", "--password", "opal", "--beta", "0.04"]
    for secret in ("glimmerwick", "thistledown", "opal", "quill"):
        assert secret not in issue.markdown(told(secret), options).lower()
    assert _issue.clean("0.400000 and 0.04 of it", _issue.private_words(options)) == "0.400000 and 0.04 of it"


def test_a_run_s_report_has_no_line_of_its_log(tmp_path, monkeypatch, capsys):
    """Diagnose: the error is named by its failure, with the line's number. FILE is new, or nothing is done."""
    monkeypatch.chdir(tmp_path)
    run = pathlib.Path("ravenholm-7")
    run.mkdir()
    error = "RuntimeError: element 0 of tensors does not require grad and does not have a grad_fn"
    (run / "ravenholm.log").write_text(f"started on ravenholm\nravenholm: {error}\n")
    (run / "requirements.txt").write_text("trl==0.14.0\ntransformers==4.48.3\n")
    assert diagnose.main(["--report", "issue.md", str(run)]) == 1
    text = pathlib.Path("issue.md").read_text()
    assert "ravenholm" not in text and "F2" in text and "line 2 of the log" in text and "| trl | 0.14.0 |" in text
    assert "trainer_state.json" in text  # what was not handed in
    capsys.readouterr()
    assert diagnose.main(["--report", "issue.md", str(run)]) == 2
    assert "issue.md is there already" in capsys.readouterr().err and pathlib.Path("issue.md").read_text() == text


def test_preflight_writes_a_new_file_and_no_other(tmp_path):
    """A script that is not there: the report says so, and not what the script is called."""
    command = [sys.executable, "-m", "failurelab.preflight", "--json", "out.json", "--report", "issue.md", "nowhere.py"]
    first, again = (subprocess.run(command, cwd=tmp_path, capture_output=True, text=True) for _ in range(2))
    text = (tmp_path / "issue.md").read_text()
    assert (first.returncode, again.returncode) == (3, 2) and "could not be judged" in text and "nowhere" not in text
    assert again.stderr.count("\n") == 1 and "issue.md is there already" in again.stderr
