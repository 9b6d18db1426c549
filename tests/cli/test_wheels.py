"""Eras from a folder of wheels: without a network, and with the machine's own torch; each refusal is one line."""

import importlib.metadata
import json
import pathlib
import subprocess
import sys

import pytest

from failurelab_course import eras
from failurelab_course.eras import install as era_install
from failurelab_course.eras import installers
from failurelab_course.eras.offline import links as era_links
from failurelab_course.eras.offline import machine_torch as own_torch
from failurelab_course.eras.offline import wheels

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import wheels_at_hand as at_hand


@pytest.fixture
def course(tmp_path, monkeypatch):
    top = at_hand.course(tmp_path / "course")
    monkeypatch.setenv("FAILURELAB_ROOT", str(top))
    # No network and no index of the machine's own: what is asked of one fails.
    monkeypatch.setenv("UV_INDEX_URL", "http://127.0.0.1:9/")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/")
    return top


@pytest.fixture
def folder(tmp_path):
    """All wheels of the era old, torch's with a build's own part in its version, as on an index of CPU builds."""
    for name, version in (at_hand.STUDIED | {"small": "5.0", "plots": "6.0"}).items():
        at_hand.make(tmp_path / "wheels", name, version, ["torch", "small>=5"] if name == "trl" else ())
    at_hand.make(tmp_path / "wheels", "torch", "2.13.0+cpu")
    return tmp_path / "wheels"


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A Python that has torch, of another version, and one package more than is needed."""
    site = tmp_path / "machine"
    site.mkdir()
    at_hand.install(site, "torch", "2.11.0+cu130", ["small<7", "not-there", "odd (>=1.0,)*"])
    at_hand.install(site, "unasked", "1.0")

    def installed():
        found = importlib.metadata.distributions(path=[str(site)])
        return {wheels.normal(each.metadata["Name"]): each for each in found}

    monkeypatch.setattr(era_links, "installed", installed)
    return site


def make(folder, **options):
    said = []
    eras.create_all(["old"], say=said.append, wheels=folder, **options)
    return eras.find("old"), said


def asked(era, code):
    return eras.run(era, ["-c", code], capture_output=True, text=True, check=True).stdout.split()


def only(folder, *names):
    for path in folder.glob("*.whl"):
        if path.name.split("-")[0] not in names:
            path.unlink()


@pytest.mark.parametrize("installer", ["uv", "pip"])
def test_an_era_is_made_from_wheels_alone(course, folder, installer, monkeypatch):
    """By uv, or by pip where there is none; scripts and cache of the making are not left behind."""
    if installer == "pip":
        monkeypatch.setattr(era_install, "uv", lambda required=True: "")
    era, said = make(folder)
    assert era.status == "ready" and said[-1] == "era old: ready"
    code = "import torch, trl, plots, importlib.metadata as m; print(torch.__version__, m.version('failurelab'))"
    assert asked(era, code) == ["2.13.0+cpu", "0.1.0"]
    assert sorted(path.name for path in (course / ".eras").iterdir()) == [".old.lock", "old"]
    for script in (era.folder / "bin").iterdir():
        assert script.is_symlink() or b".partial" not in script.read_bytes()
    (folder / "plots-6.0-py3-none-any.whl").unlink()
    assert make(folder)[1] == ["era old: ready"]


def test_it_works_before_anything_is_installed(course, folder):
    """The module runs as a script, with the standard library and pip's copy of packaging; its errors are one line."""
    (folder / "plots-6.0-py3-none-any.whl").unlink()
    done = subprocess.run(
        [sys.executable, "-m", "failurelab_course.eras", "create", "--wheels", str(folder), "old"],
        cwd=course,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("ERROR era old:") and "plots==6.0" in done.stderr and done.stderr.count("\n") == 1


def test_the_environment_that_runs_a_set_up_is_never_filled(course, folder, tmp_path, monkeypatch):
    """It may be another copy's, or a cluster's: today goes to the course's own .venv, which it makes."""
    (course / ".venv").rmdir()
    other = tmp_path / "other"
    (other / "lib/python3.11/site-packages/failurelab-0.1.0.dist-info").mkdir(parents=True)
    monkeypatch.setattr(sys, "prefix", str(other))
    monkeypatch.setattr(era_install, "uv", lambda required=True: "")
    assert eras.find(eras.TODAY, ready=False).folder == other
    eras.create_all([eras.TODAY], say=lambda text: None, wheels=folder)
    assert eras.find(eras.TODAY).folder == course / ".venv"
    assert [path.name for path in other.rglob("*")] == [
        "lib",
        "python3.11",
        "site-packages",
        "failurelab-0.1.0.dist-info",
    ]


def test_all_missing_wheels_are_told_before_anything_is_made(course, folder):
    only(folder, "torch", "trl", "plots")
    with pytest.raises(eras.EraError, match=r"no wheel for .* transformers==2.0, .*small==5.0.*Next: failurelab"):
        make(folder)
    assert not list((course / ".eras").glob("*old*/*"))


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda folder: only(folder, "none"), "holds no wheel"),
        (lambda folder: [path.unlink() for path in folder.iterdir()] and folder.rmdir(), "is no folder"),
        (lambda folder: (folder / "trl-1.0-py3-none-any.whl").write_bytes(b"PK\x03\x04 half"), "trl-1.0.* cut short"),
        (
            lambda folder: (only(folder, "none"), at_hand.make(folder, "trl", "1.0", tag="cp313-cp313-win_amd64")),
            "none of its 1 wheels serves Python",
        ),
    ],
    ids=["empty", "not there", "half a wheel", "another Python"],
)
def test_a_folder_that_cannot_serve_is_named(course, folder, spoil, told):
    spoil(folder)
    with pytest.raises(eras.EraError, match=f"{told}.*Next:"):
        make(folder)


def test_without_an_installer_pip_s_wheel_is_asked_for(course, folder, monkeypatch):
    monkeypatch.setattr(era_install, "uv", lambda required=True: "")
    monkeypatch.setattr(installers, "works", lambda command: False)
    with pytest.raises(eras.EraError, match=r"has no pip, no uv is found.*Next: put a wheel of pip"):
        make(folder)
    assert eras.find("old", ready=False).status == "missing"


def test_room_is_counted_from_the_wheels(course, folder, monkeypatch):
    monkeypatch.setattr(wheels.Wheel, "unpacked_bytes", lambda self: 10**18)
    with pytest.raises(eras.EraError, match=r"GB of disk are free .* needs about"):
        make(folder)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"wheels": None, "torch": "here", "also": ""}, "go with --wheels DIR"),
        ({"wheels": "x", "torch": "", "also": "deepspeed"}, "--with goes with --torch here"),
        ({"wheels": "x", "torch": "there", "also": ""}, "--torch there"),
    ],
)
def test_options_that_do_not_go_together(options, told):
    with pytest.raises(eras.EraError, match=told):
        eras.source_of(**options)


def test_the_machine_s_torch_is_seen_and_nothing_else_of_it(course, folder, machine):
    """What is needed is linked; another package of the machine stays hidden; what differs is said and kept."""
    only(folder, *at_hand.STUDIED, "small")
    era, said = make(folder, torch_here=True)
    assert asked(era, "import torch, trl; print(torch.__version__)") == ["2.11.0+cu130"]
    assert asked(era, "import importlib.util as u; print(u.find_spec('unasked'))") == ["None"]
    assert any("torch 2.11.0+cu130 (lock: 2.13.0)" in line for line in said)
    assert any("left out" in line and "plots" in line for line in said)
    marker = json.loads((era.folder / eras.MARKER).read_text())
    assert marker["machine"] == {"torch": "2.11.0+cu130"} and marker["left_out"] == ["plots"]
    (machine / "torch").rename(machine / "gone")
    assert era.status == "broken"


def test_a_package_of_the_machine_will_do_if_it_fits(course, folder, machine):
    """`small` is no library under study: the machine's is taken in another version, unless that does not fit."""
    only(folder, *at_hand.STUDIED)
    at_hand.install(machine, "small", "5.5")
    era, _ = make(folder, torch_here=True)
    assert era.marker["machine"] == {"small": "5.5", "torch": "2.11.0+cu130"}
    assert asked(era, "import small; print(small.__version__)") == ["5.5"]


def test_a_package_of_the_machine_that_does_not_fit_is_asked_for_as_a_wheel(course, folder, machine):
    only(folder, *at_hand.STUDIED)
    at_hand.install(machine, "small", "4.0")
    with pytest.raises(eras.EraError, match=r"small==5.0 \(trl 1.0 requires small>=5, and small 4.0 of this Python"):
        make(folder, torch_here=True)
    assert eras.find("old", ready=False).status == "missing"


@pytest.mark.parametrize("name", ["trl", "transformers", "peft", "accelerate"])
def test_a_library_under_study_is_never_the_machine_s_in_another_version(course, folder, machine, name):
    """A failure is told by these versions: with another one the era would show something else under its name."""
    (path,) = folder.glob(f"{name}-*")
    path.unlink()
    at_hand.install(machine, name, "9.9")
    version = at_hand.STUDIED[name]
    with pytest.raises(eras.EraError, match=rf"{name}=={version} \(a library under study .* this Python has 9.9"):
        make(folder, torch_here=True)
    at_hand.install(machine, name, version)
    for old in machine.glob(f"{name}-9.9*"):
        old.rename(machine / "other")
    assert make(folder, torch_here=True)[0].status == "ready"


def test_a_wheel_that_the_machine_s_torch_refuses_gives_way(course, folder, machine):
    """Its torch asks for small<7: the lock has 5.0 and a wheel of it, but a lock that pins 7.1 must not break torch."""
    lock = course / "eras" / "old.txt"
    lock.write_text(lock.read_text().replace("small==5.0", "small==7.1"))
    at_hand.make(folder, "small", "7.1")
    at_hand.install(machine, "small", "6.0")
    era, _ = make(folder, torch_here=True)
    assert asked(era, "import small; print(small.__version__)") == ["6.0"]


def test_what_is_asked_for_must_be_there(course, folder, machine):
    only(folder, *at_hand.STUDIED, "small")
    with pytest.raises(eras.EraError, match=r"plots==6.0 \(it must be there\)"):
        make(folder, torch_here=True, also=["plots"])
    with pytest.raises(eras.EraError, match="no era's lock names it"):
        make(folder, torch_here=True, also=["tensorflow"])


def test_a_python_without_torch_is_told(course, folder, monkeypatch):
    monkeypatch.setattr(era_links, "installed", dict)
    with pytest.raises(eras.EraError, match=r"has no torch.*Next: run this with the Python that holds torch"):
        make(folder, torch_here=True)


def test_an_era_that_does_not_import_is_not_left(course, folder, machine):
    """Versions can fit by their metadata and still not work together."""
    (machine / "torch" / "__init__.py").write_text("raise ImportError('libcudart.so.13: cannot open')")
    with pytest.raises(eras.EraError, match=r"does not import: ImportError: libcudart.*Next:"):
        make(folder, torch_here=True)
    assert eras.find("old", ready=False).status == "missing"


def test_markers_are_read_for_the_python_that_is_asked_for(tmp_path):
    """A bundle for another Python needs that one's lines; pip reads markers for the Python that runs it."""
    lock = tmp_path / "lock.txt"
    lock.write_text(
        "a==1 ; python_full_version < '3.12'\na==2 ; python_full_version >= '3.12'\nb==1 ; os_name == 'nt'\n"
    )
    assert wheels.lines(lock, wheels.Target("3.11", "manylinux_2_28_x86_64")) == {"a": "1"}
    assert wheels.lines(lock, wheels.Target("3.12", "manylinux_2_28_x86_64")) == {"a": "2"}


def test_the_groups_name_packages_of_the_locks():
    """A group that no lock knows could never be asked for."""
    every = {name for era in eras.known() for name in wheels.lines(era.lock)}
    assert set(own_torch.NOTEBOOKS) <= every and set(own_torch.COMMAND) <= every
