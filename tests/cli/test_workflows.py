"""The workflow files are YAML that does what the README says, and no more."""

import pytest
import yaml

from failurelab import eras

WORKFLOWS = sorted((eras.root() / ".github" / "workflows").glob("*.yml"))


def test_there_are_workflows():
    assert {path.stem for path in WORKFLOWS} >= {"site", "test"}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_has_what_it_needs(path):
    """A trigger, a time limit for each job, a checkout before all else, and only make targets that exist."""
    content = yaml.safe_load(path.read_text())
    # YAML 1.1 reads the key `on` as a boolean
    assert content.get("on", content.get(True))
    targets = (eras.root() / "Makefile").read_text()
    for job in content["jobs"].values():
        assert job["timeout-minutes"] <= 90
        steps = job["steps"]
        if any("run" in step for step in steps):
            assert steps[0]["uses"].startswith("actions/checkout@")
        for step in steps:
            for line in step.get("run", "").splitlines():
                if line.strip().startswith("make "):
                    assert f"\n{line.split()[1]}:" in targets, line


def test_the_test_workflow_runs_the_readme_s_command_within_its_time():
    content = yaml.safe_load((eras.root() / ".github" / "workflows" / "test.yml").read_text())
    steps = content["jobs"]["test"]["steps"]
    assert any(step.get("run", "").startswith("make test") for step in steps)
    assert content["jobs"]["test"]["strategy"]["matrix"]["python"] == ["3.11", "3.12"]
