"""The workflow files are YAML that does what the README says, and no more."""

import re
import shlex

import pytest
import typer.main
import yaml

from failurelab_course import cli, eras

# Minutes: recording a card's evidence takes the longest.
LIMITS = {"gpu": 240}
WORKFLOWS = sorted((eras.root() / ".github" / "workflows").glob("*.yml"))


def triggers(content):
    """Return what starts a workflow: YAML 1.1 reads the key `on` as a boolean."""
    return content.get("on", content.get(True))


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
    command, rest = typer.main.get_command(cli.app), cli._papermill_parameters(list(words))
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


def test_there_are_workflows():
    assert {path.stem for path in WORKFLOWS} >= {"gpu", "nightly", "site", "test"}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_has_what_it_needs(path):
    """A trigger, a time limit for each job, a checkout before all else, and only make targets that exist."""
    content = yaml.safe_load(path.read_text())
    assert triggers(content)
    assert content["permissions"] == {"contents": "read"}
    targets = (eras.root() / "Makefile").read_text()
    for job in content["jobs"].values():
        assert job["timeout-minutes"] <= LIMITS.get(path.stem, 90)
        steps = job["steps"]
        if any("run" in step for step in steps):
            assert steps[0]["uses"].startswith("actions/checkout@")
            assert steps[0]["with"]["persist-credentials"] is False
        for step in steps:
            for line in step.get("run", "").splitlines():
                if line.strip().startswith("make "):
                    assert f"\n{line.split()[1]}:" in targets, line


def test_actions_are_pinned():
    """A tag can be moved to other code; a commit cannot. The comment says which release it is."""
    lines = [line.strip() for path in WORKFLOWS for line in path.read_text().splitlines() if "uses:" in line]
    assert len(lines) > 8
    assert [line for line in lines if not re.search(r"uses: [\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$", line)] == []


def test_the_test_workflow_runs_the_readme_s_command_within_its_time():
    content = yaml.safe_load((eras.root() / ".github" / "workflows" / "test.yml").read_text())
    steps = content["jobs"]["test"]["steps"]
    assert any(step.get("run", "").startswith("make test") for step in steps)
    assert content["jobs"]["test"]["strategy"]["matrix"]["python"] == ["3.11", "3.12"]


def test_what_make_test_leaves_to_the_night_is_run_by_a_schedule():
    """A test that nobody runs is none: what is marked `nightly` is run by a command, and that by hosted CI."""
    content = yaml.safe_load((eras.root() / ".github" / "workflows" / "nightly.yml").read_text())
    assert (
        triggers(content)["schedule"]
        and {"run": "make nightly"}.items() <= content["jobs"]["nightly"]["steps"][3].items()
    )
    commands = [step.get("run", "") for step in content["jobs"]["nightly"]["steps"]]
    assert [line for line in commands if re.fullmatch("sudo --preserve-env=[A-Z_,]+ make faults", line)]
    rules = (eras.root() / "Makefile").read_text()
    assert re.search(r"\nfaults: setup\n(?:\t.*\n)*\t.* tests/faults\n", rules)
    nightly = rules[rules.index("\nnightly:") : rules.index("\n\n", rules.index("\nnightly:"))]
    assert "-m nightly" in nightly and re.search(r"--nbval-lax.*\n.* notebooks$", nightly)


@pytest.mark.parametrize(
    "path",
    [*WORKFLOWS, eras.root() / "docs" / "ci.md", eras.root() / "labs" / "README.md"],
    ids=lambda path: path.name,
)
def test_commands_are_those_that_there_are(path):
    """A command or an option that was renamed would be found by someone else's pipeline, a week later."""
    text = path.read_text()
    if path.suffix == ".md":
        text = "\n".join(re.findall(r"^```.*?\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    found = commands(text)
    assert found or path.stem in ("nightly", "site", "test")
    for words in found:
        accepted(words)


@pytest.mark.parametrize(
    "words", [["evidence", "rekord"], ["evidence", "record"], ["verify", "--devices", "cuda"], ["run", "--jobs", "two"]]
)
def test_a_command_that_there_is_not_is_found(words):
    with pytest.raises(AssertionError, match=f"failurelab {words[0]}"):
        accepted(words)


def test_a_card_of_one_s_own_is_safe_and_not_shared():
    """No pull request runs there, runs wait for one another, and without a runner nothing waits for one."""
    content = yaml.safe_load((eras.root() / ".github" / "workflows" / "gpu.yml").read_text())
    assert set(triggers(content)) == {"workflow_dispatch", "schedule"}
    assert content["concurrency"] == {"group": "gpu", "cancel-in-progress": False}
    (job,) = content["jobs"].values()
    assert job["runs-on"] == ["self-hosted", "gpu"]
    assert "vars.GPU_RUNNER" in job["if"]
    asked = [" ".join(words[:2]) for step in job["steps"] for words in commands(step.get("run", ""))]
    assert asked == ["doctor", "evidence record", "verify --device", "evidence compare"]
    # what comes from outside reaches the shell as a variable, never as text of the script
    assert not any("${{" in step.get("run", "") for step in job["steps"])
