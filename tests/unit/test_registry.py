"""The registry: every file is whole, finds its failure by what a learner pastes, and knows whom it concerns."""

import re
import shutil

import pytest
from packaging.version import Version

from failurelab import failures as registry
from failurelab.failures import loader as files

FOLDER = registry._FOLDER


def test_every_failure_is_whole_and_every_id_was_given_once():
    """An id stands in a file of its own, or among the retired: never in both."""
    failures = registry.all()
    listed = [each.id for each in failures]
    assert listed == sorted(listed, key=lambda id: (int(re.findall(r"\d+", id)[0]), id))
    given = [*listed, *files.retired_ids(FOLDER)]
    assert len(given) == len(set(given)) and {"F1", "F2", "F3a", "F3b", "F4", "F5", "F6", "F7"} <= set(given)
    for failure in failures:
        assert failure.mechanisms and (failure.symptoms or failure.seen_as) and failure.threads and failure.fix


@pytest.mark.parametrize(
    ("id", "trl", "transformers", "expected"),
    [
        ("F1", "0.14.0", "4.48.3", True),
        ("F1", "0.25.1", "4.57.6", True),
        ("F1", "0.27.0", "4.57.6", False),
        ("F1", "0.22.2", "5.0.0", False),
        ("F3b", "0.14.0", "4.52.4", True),
        ("F7", "0.14.0", "4.49.0", False),
        ("F7", "0.21.0", "5.23.0", True),
        ("F7", "0.9.0", "4.9.0", False),  # 4.9 is older than 4.49, and 0.9 than 0.14: no comparison of strings
        ("F9", "0.26.2", "5.0.0", True),  # a name: trl passes no dtype on, and transformers takes the checkpoint's
        ("F9", "1.16.0", "5.24.0", False),  # a name is float32; a model of one's own is what it was loaded as
    ],
)
def test_affected_versions(id, trl, transformers, expected):
    hit = registry.affected(id, {"trl": trl, "transformers": transformers})
    assert bool(hit) is expected
    assert f"transformers {transformers}" in hit.reason


@pytest.mark.parametrize("bound", ["0.15", "0.15.0", "1.0.0"])
@pytest.mark.parametrize("suffix", ["", ".dev0", "a0+git1", "rc1", ".post1", "+cpu"])
def test_every_version_is_on_one_side_of_a_bound(bound, suffix):
    """0.15.0.dev0, installed from the repository after 0.14, was in neither `<0.15` nor `>=0.15`: no failure at all."""
    below, above = (registry.Stack("", {"trl": f"{sign}{bound}"}) for sign in ("<", ">="))
    installed = {"trl": f"{Version(bound)}{suffix}"}
    assert above.holds(installed) and not below.holds(installed)
    assert below.holds({"trl": f"0.14.2{suffix}"}) and not above.holds({"trl": f"0.14.2{suffix}"})


@pytest.mark.parametrize(("transformers", "model"), [("5.23.0", "by themselves"), ("5.24.0", "GPT-2")])
def test_a_failure_of_ones_own_loop_is_no_hit_but_is_said(transformers, model):
    """Trainers of trl switch checkpointing off while they generate; transformers 5.24 healed generate() elsewhere."""
    hit = registry.affected("F7", {"trl": "1.16.0", "transformers": transformers})
    assert not hit
    assert "generate() of your own" in hit.reason and model in hit.reason


def test_missing_packages_and_unreadable_versions():
    hit = registry.affected("F1", {})
    assert not hit and "trl is not installed" in hit.reason
    with pytest.raises(registry.RegistryError, match="newest"):
        registry.affected("F1", {"trl": "newest", "transformers": "4.48.3"})


@pytest.fixture
def copy(tmp_path):
    """The registry in a folder of its own, to be spoilt."""
    folder = tmp_path / "registry"
    shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def test_unknown_and_retired_ids_are_told_apart(copy, monkeypatch):
    (copy / "ids.toml").write_text('[retired]\nF98 = "it was none"\n')
    monkeypatch.setattr(registry, "_FOLDER", copy)
    with pytest.raises(registry.RegistryError, match="unknown failure 'F99'"):
        registry.get("F99")
    with pytest.raises(registry.RegistryError, match="F98 is retired: it was none"):
        registry.get("F98")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('id = "F1"', 'id = "F9"', r"F1\.toml: id is 'F9'"),
        ("title =", "titel =", r"F1\.toml: title: it is missing"),
        ('title = "', 'subtitle = "x"\ntitle = "', r"F1\.toml: subtitle: no such key"),
        ('"tensors_without_gradient > 0"', '"no_such_figure > 0"', "is no figure"),
        (">=0.14.0,<0.16.0", "0.14 to 0.16", r"affected 1: versions: .*PEP 440"),
        ('trl = ">=0.14.0,<0.16.0"', 'tlr = ">=0.14.0"', r"affected 1: versions: 'tlr' is no package"),
        ("number = 19", 'number = "19"', r"claims 3: number: it is '19', a int is needed"),
        ("number = 19", "number = 20", r"claim 20 stands in F1\.toml already"),
        ('probes = ["F1 frozen, default", "F1 frozen, reentrant"]\n', "", r"affected 1: probes: name the set-ups"),
        ("[[affected]]", "[affected", r"F1\.toml is no TOML"),
    ],
)
def test_a_slip_in_a_file_is_named(copy, old, new, message):
    path = copy / "F1.toml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(registry.RegistryError, match=message):
        files.load(copy)


def test_an_id_is_never_used_again(copy):
    """A new failure under a retired id would take over the old one's evidence."""
    ids = copy / "ids.toml"
    ids.write_text(ids.read_text() + 'F8 = "was no failure"\n')
    (copy / "F8.toml").write_text((copy / "F7.toml").read_text().replace('id = "F7"', 'id = "F8"'))
    with pytest.raises(registry.RegistryError, match=r"F8\.toml: id F8 is retired.*never used again"):
        files.load(copy)
