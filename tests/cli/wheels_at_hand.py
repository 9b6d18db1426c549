"""Wheels of a few bytes, whole by the standard, and a course with small eras: what tests of offline set-ups use."""

import base64
import hashlib
import pathlib
import zipfile

from failurelab_course import eras

ROOT = eras.root()
STUDIED = {"trl": "1.0", "transformers": "2.0", "peft": "3.0", "accelerate": "4.0", "packaging": "26.0"}


def make(folder: pathlib.Path, name: str, version: str, requires=(), tag: str = "py3-none-any") -> pathlib.Path:
    """Write one wheel, with a module of its name; return its path."""
    folder.mkdir(exist_ok=True, parents=True)
    spelled = name.replace("-", "_")
    info = f"{spelled}-{version}.dist-info"
    metadata = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}"]
    metadata += [f"Requires-Dist: {line}" for line in requires]
    files = {
        f"{spelled}/__init__.py": f"__version__ = {version!r}\n",
        f"{info}/METADATA": "\n".join(metadata) + "\n",
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: {tag}\n",
    }
    record = []
    path = folder / f"{spelled}-{version}-{tag}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in files.items():
            archive.writestr(file, text)
            digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
            record.append(f"{file},sha256={digest},{len(text)}")
        archive.writestr(f"{info}/RECORD", "\n".join([*record, f"{info}/RECORD,,"]) + "\n")
    return path


def install(site: pathlib.Path, name: str, version: str, requires=()) -> None:
    """Unpack such a wheel into a folder, as the packages of a machine's own Python are."""
    with zipfile.ZipFile(make(site.parent / "unpacked", name, version, requires)) as archive:
        archive.extractall(site)


def course(top: pathlib.Path) -> pathlib.Path:
    """Make a course's repository with `today` and one era, `old`, of the libraries under study and one more."""
    (top / "eras").mkdir(parents=True)
    (top / ".venv").mkdir()  # or the environment that runs the tests would be taken for the course's own
    (top / "helpers").symlink_to(ROOT / "helpers")
    (top / "eras" / "torch.txt").write_text("torch==2.13.0\n")
    lines = [f"{name}=={version}" for name, version in STUDIED.items()]
    (top / "eras" / "old.in").write_text("# title: old times\ntrl==1.0\nplots\n")
    (top / "eras" / "old.txt").write_text("\n".join([*lines, "small==5.0", "plots==6.0", "else==1 ; os_name == 'nt'"]))
    (top / "eras" / "today.in").write_text("# title: today\ntrl==1.0\n")
    (top / "eras" / "today.txt").write_text("\n".join(lines))
    return top
