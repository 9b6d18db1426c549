"""An offline bundle: what it holds, what its installer refuses, and the smallest folder of wheels. No network is used.

The whole way, with real wheels and the network cut, is `make pack-test`: it takes minutes and gigabytes.
"""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile

import pytest

from failurelab_course import eras
from failurelab_course.eras.offline import bundle_installer, pack, wheels
from failurelab_course.eras.offline import fetch as pack_wheels

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import wheels_at_hand as at_hand

PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
PLATFORM = "manylinux_2_17_x86_64"
INDEX = at_hand.STUDIED | {"small": "5.0", "plots": "6.0"}


@pytest.fixture
def course(tmp_path, monkeypatch):
    """A committed course, and a stand-in for pip, which finds on its index what the locks name."""
    top = at_hand.course(tmp_path / "course")
    monkeypatch.setenv("FAILURELAB_ROOT", str(top))
    monkeypatch.setattr(pack_wheels, "SOURCE_ONLY", ())
    for name, value in (("GIT_CONFIG_GLOBAL", "/dev/null"), ("PIP_FIND_LINKS", "")):
        monkeypatch.setenv(name, value)
    (top / "helpers").unlink()
    shutil.copytree(at_hand.ROOT / "helpers", top / "helpers", ignore=shutil.ignore_patterns("__pycache__", "*.egg*"))
    (top / "lesson.md").write_text("as committed\n")
    for command in (
        ["init", "-q"],
        ["add", "."],
        ["-c", "user.name=a", "-c", "user.email=a@b.c", "commit", "-qm", "x"],
    ):
        subprocess.run(["git", "-C", str(top), *command], check=True)
    return top


@pytest.fixture
def index(monkeypatch):
    """What pip is asked for, and a wheel of each."""
    asked = []

    def download(arguments, what, folder):
        for line in (each for each in arguments[arguments.index("-d") + 2 :] if not each.startswith("pip")):
            asked.append(line)
            name, _, version = line.partition("==")
            at_hand.make(folder, name, f"{version}+cpu" if name == "torch" else version, REQUIRES.get(name, ()))

    monkeypatch.setattr(pack_wheels, "_pip", download)
    return asked


REQUIRES = {"trl": ["small>=5", "torch", "accelerate"], "plots": ["small"]}


def order(**changes):
    return pack.Order(**{"python": PYTHON, "platform": PLATFORM, "torch_index": "http://127.0.0.1:9/"} | changes)


@pytest.fixture
def bundle(course, index, tmp_path):
    pack.pack(tmp_path / "bundle", order(), say=lambda text: None)
    return tmp_path / "bundle"


def install(bundle, folder, **variables):
    """Run the installer by a Python that holds nothing of the course; uv is on the path."""
    base = pathlib.Path(sys.base_prefix) / "bin" / "python3"
    path = f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {key: value for key, value in os.environ.items() if key != "FAILURELAB_ROOT"}
    environment |= {"PATH": path} | variables
    return subprocess.run(
        [str(base), str(bundle / "install.py"), str(folder)], capture_output=True, text=True, env=environment
    )


def test_a_bundle_holds_the_course_as_committed_and_each_wheel_once(course, index, tmp_path):
    """What is not committed stays behind, and that is said; the manifest names every file."""
    (course / "lesson.md").write_text("being written\n")
    said = []
    made = pack.pack(tmp_path / "bundle", order(), say=said.append)
    assert (tmp_path / "bundle/course/lesson.md").read_text() == "as committed\n"
    assert any("1 files have changes that are not committed (lesson.md first)" in line for line in said)
    names = sorted(path.name.split("-")[0] for path in (tmp_path / "bundle/wheels").iterdir())
    assert names == sorted([*INDEX, "torch"])
    assert made == json.loads((tmp_path / "bundle/manifest.json").read_text())
    assert made["torch"] == "2.13.0+cpu" and set(made["eras"]) == {"today", "old"} and len(made["commit"]) == 40
    held = {path for path in (tmp_path / "bundle").rglob("*") if path.is_file()}
    assert {str(path.relative_to(tmp_path / "bundle")) for path in held} == {*made["files"], "manifest.json"}
    assert made["bytes"] == sum(path.stat().st_size for path in held if path.name != "manifest.json")
    assert said[-1].startswith(f"{tmp_path / 'bundle'}: {len(made['files'])} files, ")


def test_a_tar_holds_the_same(course, index, tmp_path):
    pack.pack(tmp_path / "lab.tar", order(eras=("old",)), say=lambda text: None)
    with tarfile.open(tmp_path / "lab.tar") as tar:
        tar.extractall(tmp_path, filter="data")
    assert json.loads((tmp_path / "lab/manifest.json").read_text())["eras"].keys() == {"old"}
    assert (tmp_path / "lab/install.py").is_file()
    assert not list(tmp_path.glob(".*"))


def test_what_was_fetched_is_not_fetched_again(course, index, tmp_path, monkeypatch):
    """A try that broke off leaves its wheels; the next one asks for the rest alone."""
    good = pack_wheels._pip

    def fails(arguments, what, folder):
        if what.startswith("torch"):
            raise eras.EraError("the network went")
        good(arguments, what, folder)

    monkeypatch.setattr(pack_wheels, "_pip", fails)
    with pytest.raises(eras.EraError, match="the network went"):
        pack.pack(tmp_path / "bundle", order(), say=lambda text: None)
    assert not (tmp_path / "bundle").exists()
    index.clear()
    monkeypatch.setattr(pack_wheels, "_pip", good)
    pack.pack(tmp_path / "bundle", order(), say=lambda text: None)
    assert index == ["torch==2.13.0"]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"python": "3.13"}, r"Python 3.13: the locks are for 3.11 and 3.12"),
        ({"platform": "macosx_14_0_arm64"}, "unknown platform 'macosx_14_0_arm64'"),
        ({"eras": ("odl",)}, "unknown era 'odl': the eras are today, old"),
        ({"torch": False}, "--without torch goes with --wheels-only"),
        ({"have": pathlib.Path(__file__)}, "names no package as NAME==VERSION"),
        ({"have": pathlib.Path("not-there")}, "not-there cannot be read"),
        ({"torch_index": ""}, r"no build of torch 2.13.0 for CPUs is at hand. Next: --torch-index"),
    ],
    ids=["python", "platform", "era", "torch", "have", "have missing", "no torch"],
)
def test_what_cannot_be_packed_is_told(course, index, tmp_path, changes, told):
    with pytest.raises(eras.EraError, match=told):
        pack.pack(tmp_path / "bundle", order(**changes), say=lambda text: None)
    assert not (tmp_path / "bundle").exists()


def test_a_folder_that_is_there_is_not_touched(course, index, tmp_path, monkeypatch):
    (tmp_path / "bundle").mkdir()
    with pytest.raises(eras.EraError, match="is there already: nothing in it is touched"):
        pack.pack(tmp_path / "bundle", order(), say=lambda text: None)
    with pytest.raises(eras.EraError, match=r"nowhere is no folder. Next: make it"):
        pack.pack(tmp_path / "nowhere/bundle", order(), say=lambda text: None)
    monkeypatch.setattr(pack, "ROOM", 10**18)
    with pytest.raises(eras.EraError, match=r"GB of disk are free .* packing needs about"):
        pack.pack(tmp_path / "other", order(), say=lambda text: None)
    assert index == []


def test_outside_of_a_clone_there_is_nothing_to_pack(course, index, tmp_path):
    shutil.rmtree(course / ".git")
    with pytest.raises(eras.EraError, match=r"git tells no files of .*Next: run this in a clone"):
        pack.pack(tmp_path / "bundle", order(), say=lambda text: None)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("WARNING: Retrying after connection broken by 'NewConnectionError(...)'", "package index was not reached"),
        ("ERROR: No matching distribution found for small==5.0", "no wheel of small==5.0 serves this Python"),
        ("OSError: [Errno 28] No space left on device", "no space is left on the disk"),
        ("ERROR: it broke in a new way", "could not be fetched: ERROR: it broke in a new way"),
    ],
)
def test_an_index_that_fails_is_one_line(tmp_path, monkeypatch, said, told):
    failed = subprocess.CompletedProcess([], 1, "", said)
    monkeypatch.setattr(subprocess, "run", lambda *arguments, **options: failed)
    with pytest.raises(eras.EraError, match=told) as caught:
        pack_wheels._pip(["download"], "3 wheels", tmp_path)
    assert "\n" not in str(caught.value) and f"kept in {tmp_path}. Next: " in str(caught.value)


def test_a_wheel_built_for_this_python_alone_is_refused(tmp_path, monkeypatch):
    """DeepSpeed built with its operations would load on no other machine."""
    monkeypatch.setattr(
        pack_wheels,
        "_pip",
        lambda arguments, what, folder: at_hand.make(folder, "deep", "1.0", tag="cp311-cp311-linux"),
    )
    with pytest.raises(eras.EraError, match="serves this Python alone"):
        pack_wheels._build(tmp_path, "deep==1.0", wheels.Target("3.12", PLATFORM))
    assert not list(tmp_path.iterdir())


def test_the_smallest_folder_holds_what_a_machine_lacks(course, index, tmp_path):
    """Libraries under study unless of the same version, what does not fit, and nothing that only notebooks need."""

    def packed(*have):
        (tmp_path / "have.txt").write_text("\n".join(["torch==2.11.0", "pip==24.0", "packaging==24.0", *have]))
        out = tmp_path / f"wheels{len(list(tmp_path.glob('wheels*')))}"
        wanted = order(eras=("old",), wheels_only=True, torch=False, have=tmp_path / "have.txt")
        pack.pack(out, wanted, say=lambda text: None)
        return {path.name.split("-")[0] for path in out.iterdir()}

    assert packed("small==5.5", "trl==9.9") == {"trl", "transformers", "peft", "accelerate"}
    assert packed("small==4.0", "trl==1.0") == {"trl", "transformers", "peft", "accelerate", "small"}
    assert packed("small==5.5", "peft==3.0") == {"trl", "transformers", "accelerate"}


def test_an_install_that_is_not_begun_leaves_nothing(bundle, tmp_path):
    """Each refusal is one line, before anything is written."""

    def refused(told, folder=tmp_path / "room"):
        done = install(bundle, folder)
        assert done.returncode == 1 and "Traceback" not in done.stderr
        assert told in done.stderr and "Next: " in done.stderr and done.stderr.count("\n") == 1
        assert not (tmp_path / "room").exists()

    wheel = next((bundle / "wheels").glob("trl-*"))
    content = wheel.read_bytes()
    wheel.write_bytes(content[:-7])
    refused(f"wheels/{wheel.name} has {len(content) - 7} bytes of {len(content)}: the copy was cut short")
    wheel.write_bytes(content[:-1] + b"x")
    refused(f"wheels/{wheel.name} is not what was packed: its checksum differs")
    wheel.unlink()
    refused(f"wheels/{wheel.name} is missing from the bundle")
    wheel.write_bytes(content)
    whole = (bundle / "manifest.json").read_text()
    for change, told in (
        ({"python": "3.10"}, "the bundle's wheels are for Python 3.10, and this is 3."),
        ({"platform": "manylinux_2_99_x86_64"}, "and this machine has glibc 2."),
        ({"platform": "win_amd64"}, "the bundle is for win_amd64, and this is Linux x86_64"),
        ({"installed_bytes": 10**18}, "GB of disk are free"),
    ):
        (bundle / "manifest.json").write_text(json.dumps(json.loads(whole) | change))
        refused(told)
    (bundle / "manifest.json").write_text(whole[:100])
    refused("manifest.json is cut short")
    (bundle / "manifest.json").unlink()
    refused("manifest.json is not in")
    (bundle / "manifest.json").write_text(whole)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    refused("is not empty, and no bundle was installed there: nothing in it is touched", tmp_path / "mine")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.txt"]
    (tmp_path / "mine" / bundle_installer.MINE).write_text('{"commit": "another"}')
    refused("holds the course of commit another", tmp_path / "mine")


def test_an_install_goes_on_where_it_broke_off_and_keeps_your_work(bundle, tmp_path, monkeypatch):
    """The environments fail here, for their wheels are empty; the course's files are copied, and kept when changed."""
    folder = tmp_path / "room"
    made = bundle_installer.manifest.__globals__
    monkeypatch.setitem(made, "BUNDLE", bundle)
    manifest = bundle_installer.manifest()
    assert bundle_installer.copy(folder, manifest) == 0
    (folder / "lesson.md").write_text("my notes\n")
    (folder / "eras" / "old.txt").unlink()
    assert bundle_installer.copy(folder, manifest) == 1
    assert (folder / "lesson.md").read_text() == "my notes\n" and (folder / "eras" / "old.txt").is_file()
    bundle_installer.check_folder(folder, manifest)


def test_an_installer_s_environments_need_no_network(bundle, tmp_path):
    """From checksums to environments that hold the wheels, with no index to ask; the course itself is not there."""
    done = install(bundle, tmp_path / "room", UV_INDEX_URL="http://127.0.0.1:9/", PIP_INDEX_URL="http://127.0.0.1:9/")
    room = tmp_path / "room"
    assert "era old: ready" in done.stdout and f"Next: cd {room}" in done.stdout
    print_version = "import trl, torch; print(trl.__version__, torch.__version__)"
    for python in (room / ".venv/bin/python", room / ".eras/old/bin/python"):
        printed = subprocess.run([str(python), "-c", print_version], capture_output=True, text=True, check=True).stdout
        assert printed.split() == ["1.0", "2.13.0+cpu"]
    assert done.returncode != 0  # the small wheels are no course: its doctor cannot start
