"""The course in a Python that it was installed into, on a hosted runtime. With real wheels: `make hosted`."""

import os
import pathlib
import sys
import types

import numpy
import pytest
from tests.cli.test_eras import course  # noqa: F401, a fixture

from failurelab_course import eras
from failurelab_course.eras import hosted, install, lent

ENDED = types.SimpleNamespace(poll=lambda: 0)


def distribution(site, name, version, files, needs=()):
    """Write a distribution into a folder, as an installer does."""
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    lines = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}", *(f"Requires-Dist: {need}" for need in needs)]
    (info / "METADATA").write_text("\n".join(lines) + "\n")
    for file in files:
        (site / file).parent.mkdir(parents=True, exist_ok=True)
        (site / file).write_text(name)
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in [*files, f"{info.name}/METADATA", "../bin/tool"]))


@pytest.fixture
def runtime(tmp_path, monkeypatch):
    """A runtime's packages: torch, what it needs, and a library that has nothing to do with it."""
    site = tmp_path / "runtime"
    distribution(site, "torch", "2.9.1", ["torch/__init__.py", "torchgen/__init__.py"],
                 ["nvidia-one", "nvidia-two==2", "sympy>1", "absent", 'extra-thing; extra == "x"'])  # fmt: skip
    distribution(site, "nvidia-one", "1", ["nvidia/one/lib.so"])
    distribution(site, "nvidia-two", "2", ["nvidia/two/lib.so"], ["torch"])
    distribution(site, "sympy", "1.14", ["sympy/__init__.py"])
    distribution(site, "extra-thing", "1", ["extra_thing.py"])
    distribution(site, "transformers", "4.57", ["transformers/__init__.py"])
    monkeypatch.setattr(sys, "path", [str(site)])
    return site


@pytest.fixture
def python(tmp_path):
    (tmp_path / "era" / "lib" / "python3.11" / "site-packages").mkdir(parents=True)
    (tmp_path / "era" / "bin").mkdir()
    return tmp_path / "era" / "bin" / "python"


def test_a_stack_gets_the_runtimes_torch_and_nothing_that_its_lock_has(runtime, python):
    assert lent.link_torch(python, "sympy==1.13\n") == "2.9.1"
    (site,) = python.parent.parent.glob("lib/*/site-packages")
    assert {path.name for path in site.iterdir()} == {
        "torch", "torchgen", "torch-2.9.1.dist-info", "nvidia", "nvidia_one-1.dist-info", "nvidia_two-2.dist-info"
    }  # fmt: skip
    assert (site / "nvidia" / "one" / "lib.so").read_text() == "nvidia-one"
    assert (site / "nvidia" / "two" / "lib.so").read_text() == "nvidia-two"


@pytest.fixture
def here(course, monkeypatch):  # noqa: F811
    """A course that was unpacked on a runtime, whose uv is a stand-in; `today` is made by no installer."""
    (course / "notebooks").mkdir()
    monkeypatch.chdir(course)
    monkeypatch.setattr(hosted, "_has_uv", lambda: True)
    marked = course / "prefix"
    (marked / "bin").mkdir(parents=True)
    monkeypatch.setattr(sys, "prefix", str(marked))
    return course


def test_the_runtimes_python_becomes_todays_environment(here, monkeypatch):
    said = []
    hosted.prepare(said.append)
    today = eras.find("today", ready=False)
    assert (today.folder, today.python, today.status) == (here / "prefix", pathlib.Path(sys.executable), "ready")
    assert pathlib.Path.cwd() == here / "notebooks" and "installed in" in said[-1]
    asked = (here / "uv.log").read_text().splitlines()
    assert len(asked) == 2 and all("--break-system-packages" in line and "--no-deps" in line for line in asked)
    assert not any("torch==" in line for line in asked)
    os.chdir(here)
    hosted.prepare(said.append)
    assert len((here / "uv.log").read_text().splitlines()) == 2 and pathlib.Path.cwd() == here / "notebooks"


def test_a_historic_stack_is_made_behind_around_the_same_torch(here, monkeypatch):
    (here / eras.HOSTED).write_text(f"{here / 'prefix'}\n{sys.executable}\n")
    behind, linked = [], []
    monkeypatch.setattr(install, "create_behind", lambda made, say: behind.extend(era.name for era in made) or ENDED)
    hosted.make_behind(["old", "today"], print)
    assert behind == ["old", "today"]
    monkeypatch.setattr(lent, "link_torch", lambda python, lock: linked.append((python, lock)) or "2.9.1")
    (here / ".eras").mkdir(exist_ok=True)
    said = []
    install.create(["old"], said.append)
    ((_, lock),) = linked
    assert lock == "six==1.16.0\n" and "era old: torch 2.9.1, lent by this runtime" in said
    assert "torch==" not in (here / "uv.log").read_text() and eras.find("old").status == "ready"


def test_where_the_course_has_its_own_environment_nothing_is_hosted(here, monkeypatch):
    monkeypatch.setattr(install, "create_behind", lambda made, say: pytest.fail("made something"))
    hosted.make_behind(["old"])
    hosted.enter()
    assert pathlib.Path.cwd() == here and eras.find("today", ready=False).folder == here / ".venv"


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("torch", "this runtime has no torch"),
        ("disk", "0.0 GB of disk are free .* Next: "),
        ("imported", "numpy 1.0 was imported before .* Next: restart the runtime"),
        ("uv", "the package index was not reached"),
    ],
)
def test_what_a_runtime_lacks_is_told_in_a_line(here, monkeypatch, what, said):
    if what == "imported":
        monkeypatch.setitem(sys.modules, "numpy", types.SimpleNamespace(__version__="1.0"))
    if what == "torch":
        monkeypatch.setattr(lent, "installed", lambda name: "")
    elif what == "disk":
        monkeypatch.setattr(hosted.shutil, "disk_usage", lambda place: type("Usage", (), {"free": 10**7}))
    elif what == "uv":
        monkeypatch.setenv("FAKE_UV_FAILS_AT", "hosted.txt")
        monkeypatch.setenv("FAKE_UV_SAYS", "error: failed to fetch")
    with pytest.raises(eras.EraError, match=said) as raised:
        hosted.prepare(lambda line: None)
    assert "\n" not in str(raised.value)
    if what == "uv":  # cut off in the middle: the next run goes on
        monkeypatch.setenv("FAKE_UV_FAILS_AT", "nothing-fails")
        hosted.prepare(lambda line: None)
        assert eras.find("today", ready=False).status == "ready"


def test_what_the_kernel_runs_with_stays_as_it_is():
    """Of a host's kernel nothing is replaced, but for what the notebooks measure with."""
    lock = "pytest==1\nnumpy==1 ; python_version < '3.12'\nno-such-thing==1\n# a comment\n"
    assert sys.modules["numpy"] is numpy
    left = hosted._without_the_kernels_own(lock)
    assert left == "numpy==1 ; python_version < '3.12'\nno-such-thing==1\n# a comment\n"
