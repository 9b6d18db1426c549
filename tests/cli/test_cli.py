"""The command line: exit statuses, and one clear line for what is wrong."""

import subprocess
import sys

import pytest

from failurelab import doctor, eras, registry


def failurelab(*arguments, **options):
    return subprocess.run([sys.executable, "-m", "failurelab", *arguments], capture_output=True, text=True, **options)


def test_unknown_era_is_one_line():
    """No traceback for a typing error, the known ones listed, exit status 1."""
    done = failurelab("eras", "create", "trl-0.13")
    assert done.returncode == 1
    assert done.stderr.startswith("ERROR unknown era 'trl-0.13': the eras are today, trl-0.14")
    assert len(done.stderr.splitlines()) == 1


def test_unknown_notebook_is_one_line():
    """The known notebooks are listed."""
    done = failurelab("run", "99")
    assert done.returncode == 1
    assert "00_start_here" in done.stderr
    assert "Traceback" not in done.stderr


def test_unknown_lab_is_one_line():
    """The known labs are listed."""
    done = failurelab("verify", "99")
    assert done.returncode == 1
    assert "01_" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_missing_ledger_is_one_line(tmp_path):
    """What is missing, and the command that makes it."""
    done = failurelab("evidence", "show", str(tmp_path / "none.json"))
    assert done.returncode == 1
    assert "failurelab evidence record" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_wrong_call_is_exit_status_2():
    """A usage error is told from a failure."""
    assert failurelab("no-such-command").returncode == 2


def test_doctor_passes_here():
    """On a machine that is set up, nothing fails, and what cannot run is NOT RUN."""
    done = failurelab("doctor")
    assert done.returncode == 0, done.stdout
    assert "PASS     Era trl-0.14" in done.stdout


def test_doctor_of_another_python_names_its_failures():
    """The old stack is told which failures its versions have, and the exit status says so."""
    old = eras.find("trl-0.14")
    done = failurelab("doctor", "--python", str(old.python))
    assert done.returncode == 1
    assert "trl 0.14.0" in done.stdout
    for failure in ("F1", "F7"):
        assert f"FAIL     {failure}" in done.stdout
        assert registry.get(failure).title in done.stdout
    assert "Next:" in done.stdout


def test_doctor_of_something_that_is_no_python(tmp_path):
    """A path that is no interpreter is one line with what to give instead."""
    done = failurelab("doctor", "--python", str(tmp_path))
    assert done.returncode == 1
    assert "which python" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("status", [doctor.PASS, doctor.FAIL, doctor.NOT_RUN])
def test_only_a_failed_check_fails_the_doctor(status):
    """What is not there to be run, such as a GPU, is no failure, and is not called a pass."""
    checks = [doctor.Check("Python", doctor.PASS, "3.11"), doctor.Check("GPU", status, "none", "buy one")]
    assert doctor.exit_status(checks) == int(status == doctor.FAIL)
    assert doctor.text(checks).splitlines()[-2:] == ["Next:", "  - buy one"]
