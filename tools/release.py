"""Build both distributions, check them, and try the take-home wheel: `make release`. Nothing is uploaded.

1. A wheel and an sdist of each, built by uv from what git tracks, into dist/.
2. `twine check`, and the contents by an allow-list: code and data of the package, metadata, nothing else.
3. The take-home wheel alone, in an environment beside each era's torch and transformers: `failurelab preflight` judges
   a script there, and must find what the script has.
"""

import argparse
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile

from failurelab import __version__
from failurelab_course import eras

ROOT = eras.root()
DIST = ROOT / "dist"
UV = pathlib.Path(sys.executable).with_name("uv")
# Of each distribution: the folders of its sources, and what may lie in its package.
PACKAGES = {"grpo_failurelab": "failurelab(_preflight)?", "grpo_failurelab_course": "failurelab_course"}
FILES = {"grpo_failurelab": r".*\.(py|toml)", "grpo_failurelab_course": r".*\.(py|mplstyle|j2)"}
METADATA = re.compile(
    r"[\w.-]+\.(dist|egg)-info/|(PKG-INFO|README\.md|LICENSE|MANIFEST\.in|pyproject\.toml|setup\.cfg)$"
    r"|failurelab/__init__\.py$"  # where the version stands
)
SCRIPT = """
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

rows = Dataset.from_dict({"prompt": [f"{a}+{b}=" for a in range(9) for b in range(9)]})

def reward(completions, **kwargs):
    return [1.0 for _ in completions]

args = GRPOConfig(output_dir="out", max_steps=9, per_device_train_batch_size=4, num_generations=4, report_to=[])
GRPOTrainer(model=MODEL, reward_funcs=reward, args=args, train_dataset=rows).train()
"""


class ReleaseError(RuntimeError):
    """A distribution is not fit to be published; the message says why."""


def build() -> list[pathlib.Path]:
    """Build wheels and sdists from what git tracks; return them."""
    shutil.rmtree(DIST, ignore_errors=True)
    with tempfile.TemporaryDirectory() as name:
        archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True).stdout
        subprocess.run(["tar", "-x", "-C", name], input=archive, check=True)
        for source in ("helpers", "."):
            subprocess.run([UV, "build", "-q", "--out-dir", DIST, source], cwd=name, check=True)
    return sorted(path for path in DIST.iterdir() if path.suffix in (".whl", ".gz"))


def check_contents(path: pathlib.Path) -> int:
    """Return how many files a distribution holds.

    Raises:
        ReleaseError: it holds one that it should not, or is of another version.
    """
    distribution, version = path.name.split("-")[:2]
    if version.removesuffix(".tar.gz") != __version__:
        raise ReleaseError(f"{path.name} is not of version {__version__}. Next: commit, then make release again")
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            files = wheel.namelist()
    else:
        with tarfile.open(path) as sdist:
            members = [member.name for member in sdist.getmembers() if member.isfile()]
        files = [name.partition("/")[2].removeprefix("helpers/") for name in members]
    wanted = re.compile(rf"{PACKAGES[distribution]}/{FILES[distribution]}")
    strange = [file for file in files if not wanted.fullmatch(file) and not METADATA.match(file)]
    if strange or not any(file.endswith("LICENSE") for file in files):
        raise ReleaseError(f"{path.name} holds {strange[:3] or 'no LICENSE'}. Next: what pyproject.toml packs")
    return len(files)


def try_wheel(wheel: pathlib.Path, era: eras.Era) -> str:
    """Install a wheel alone beside an era's libraries, and let it judge a script; return what it found.

    Raises:
        ReleaseError: the answer is not what the script has.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        subprocess.run([UV, "venv", "-q", "--python", era.python, folder / "env"], check=True)
        python = folder / "env" / "bin" / "python"
        ask = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
        theirs, own = (subprocess.check_output([each, "-c", ask], text=True).strip() for each in (era.python, python))
        for path in pathlib.Path(theirs).iterdir():
            if not re.search(r"grpo.failurelab|\.pth$", path.name) and not pathlib.Path(own, path.name).exists():
                pathlib.Path(own, path.name).symlink_to(path)  # all but what is linked to this repository
        subprocess.run([UV, "pip", "install", "-q", "--no-deps", "--python", python, wheel], check=True)
        script = folder / "train.py"
        script.write_text(SCRIPT.replace("MODEL", repr(str(ROOT / "models" / "tiny-qwen2"))))
        command = [python.with_name("failurelab"), "preflight", "--json", folder / "answer.json", script]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        if done.returncode != 1 or not (folder / "answer.json").is_file():
            raise ReleaseError(f"preflight ended with {done.returncode} in {era.name}: {done.stdout}{done.stderr}")
        answer = json.loads((folder / "answer.json").read_text())
        found = [each["failure"] for each in (*answer["findings"], *answer["suspected"])]
        if "F10" not in found:
            raise ReleaseError(f"a constant reward was not found in {era.name}: {found}")
        return ", ".join(found)


def main() -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--eras", nargs="*", default=[era.name for era in eras.known()])
    options = parser.parse_args()
    try:
        built = build()
        for path in built:
            print(f"{path.name}: {path.stat().st_size / 1024:.0f} KiB, {check_contents(path)} files")
        subprocess.run([UV, "tool", "run", "-q", "twine", "check", "--strict", *built], check=True)
        (wheel,) = (path for path in built if path.name.startswith("grpo_failurelab-") and path.suffix == ".whl")
        for name in options.eras:
            print(f"{name}: preflight by the wheel alone finds {try_wheel(wheel, eras.find(name))}")
    except ReleaseError as error:
        print(f"ERROR {error}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(f"ERROR {error.cmd[0]} ended with status {error.returncode}, see above", file=sys.stderr)
        return 1
    print("dist/ is fit to be published: docs/release.md has the checklist")
    return 0


if __name__ == "__main__":
    sys.exit(main())
