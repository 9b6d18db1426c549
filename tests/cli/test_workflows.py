"""The workflows, and the commands that pages show, are what there is; and a workflow does no more than it says."""

import re
import shlex

import pytest
import typer.main
import yaml

from failurelab_course import cli, eras

ROOT = eras.root()
FILES = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
WORKFLOWS = {path.stem: yaml.safe_load(path.read_text()) for path in FILES}
PAGES = [*FILES, ROOT / "README.md", ROOT / "labs" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def triggers(content):
    """Return what starts a workflow: YAML 1.1 reads the key `on` as a boolean."""
    return content.get("on", content.get(True))


def steps_of(name):
    return [step for job in WORKFLOWS[name]["jobs"].values() for step in job["steps"]]


def commands(text):
    """Return the calls of failurelab in a text, as words, one for each line that is one."""
    found = []
    for line in text.splitlines():
        words = shlex.split(line, comments=True) if "failurelab" in line and not line.startswith("|") else []
        while words and (words[0] in ("-", "run:", "if", "then") or words[0].endswith("=")):
            words.pop(0)
        if words and words[0] in ("failurelab", ".venv/bin/failurelab"):
            found.append(words[1:])
    return found


def accepted(words):
    """Have the command line's own parser read a call, down to the last option, without running it."""
    command, rest = typer.main.get_command(cli.app), cli._leave_to_verbs(list(words))
    while hasattr(command, "commands"):
        name = rest.pop(0)
        assert name in command.commands, f"failurelab {' '.join(words)}: there is no command {name!r}"
        command = command.commands[name]
    try:
        with command.make_context(command.name, rest):
            pass
    except Exception as error:  # typer brings a click of its own
        if not hasattr(error, "format_message"):
            raise
        raise AssertionError(f"failurelab {' '.join(words)}: {error.format_message()}") from error


def test_every_test_is_run_by_a_workflow():
    run = [line.strip() for name in WORKFLOWS for step in steps_of(name) for line in step.get("run", "").splitlines()]
    asked = {re.sub(r"^sudo \S+ ", "", line).split()[1] for line in run if re.match(r"(sudo \S+ )?make ", line)}
    assert asked >= {"test", "nightly", "faults", "drift"}
    rules = (ROOT / "Makefile").read_text()
    assert [target for target in asked if f"\n{target}:" not in rules] == []
    assert triggers(WORKFLOWS["nightly"])["schedule"] and triggers(WORKFLOWS["drift"])["schedule"]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_commands_are_those_that_there_are(path):
    """A command or an option that was renamed would be found by someone else's pipeline, a week later."""
    text = path.read_text()
    if path.suffix == ".md":
        text = "\n".join(re.findall(r"^```(?!text).*?\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    for words in commands(text):
        accepted(words)
