"""Models by hub name: a silent hub costs seconds and a line, and what lies in the cache is used."""

import os
import shutil
import subprocess
import sys

from failurelab_course.experiments import hub, models

CLOSED = "http://127.0.0.1:9"  # the port of `discard`: nothing listens there
CODE = """
from failurelab_course.experiments import hub, models, shapes
model, _ = models.load("Lab/Tiny-Qwen2")
print(model.num_parameters(), shapes.config("Lab/Tiny-Qwen2").vocab_size, hub.located("Lab/Tiny-Qwen2")[-8:])
for ask in (models.load, shapes.config):
    try:
        ask("Qwen/Qwen2-0.5B-Instruct")
    except models.ModelError as error:
        print(error)
"""


def test_names_are_told_from_folders(tmp_path, monkeypatch):
    """A folder `org/name` below the working directory is meant, where there is one."""
    monkeypatch.chdir(tmp_path)
    assert hub.is_name("Qwen/Qwen2-0.5B-Instruct")
    (tmp_path / "Qwen" / "Qwen2-0.5B-Instruct").mkdir(parents=True)
    assert not hub.is_name("Qwen/Qwen2-0.5B-Instruct")
    assert not any(map(hub.is_name, ("tiny", "/some/folder", "a/b/c", "")))


def test_a_hub_that_does_not_answer_is_asked_once_and_the_cache_is_used(tmp_path):
    """The old way tried six times for each file, half a minute for each call, the cached model's too."""
    entry = tmp_path / "hub" / "models--Lab--Tiny-Qwen2"
    shutil.copytree(models.path("tiny"), entry / "snapshots" / "0123abcd")
    (entry / "refs").mkdir()
    (entry / "refs" / "main").write_text("0123abcd")
    environment = os.environ | {"HF_HOME": str(tmp_path), "HF_ENDPOINT": CLOSED, "OMP_NUM_THREADS": "1"}
    for name in ("HF_HUB_CACHE", "HF_HUB_OFFLINE", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        environment.pop(name, None)
    done = subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found, *refused = done.stdout.strip().splitlines()
    assert found == "329216 259 0123abcd"
    assert len(refused) == 2
    for line in refused:
        assert line.startswith("Qwen/Qwen2-0.5B-Instruct is no folder here and could not be fetched from the hub: ")
        assert f"{CLOSED} does not answer" in line
        assert "Next: check the spelling and the network; without a network use a folder, tiny or random-0.5b" in line
    assert "Retrying" not in done.stderr
