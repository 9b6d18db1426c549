"""The files that a run left, found, read and turned into figures. What cannot be read is said in one line."""

import collections
import contextlib
import dataclasses
import hashlib
import itertools
import json
import math
import pathlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

from packaging.version import InvalidVersion, Version

from failurelab import failures
from failurelab.diagnose import checkpoints, completions, figures
from failurelab.diagnose.history import History, entries_of, read_history
from failurelab.errors import FailureLabError
from failurelab.failures import symptoms
from failurelab.failures.loader import PACKAGES
from failurelab.failures.predicates import Value
from failurelab.preflight.answer import Answer

_BLOCK = 1 << 20  # characters
_PINNED = re.compile(r"(?im)^\s*[-*]?\s*\"?(trl|transformers|torch|pytorch|peft|accelerate|deepspeed|bitsandbytes)\"?"
                     r"\s*(?:==|===|:|=|@)\s*\"?v?(\d+(?:\.\w+)*(?:\+[\w.]+)?)")  # fmt: skip
_ENOUGH = 1 << 26  # characters of a log that are looked at for the texts of errors, from its end
_PROBES = {"elements_changed", "tensors_changed"}


class RunError(FailureLabError):
    """A run cannot be judged at all; the message says why and the next step."""

    exit_status = 3


@dataclasses.dataclass
class Evidence:
    """What is known of one run.

    Attributes:
        name: as it was given.
        figures: by name, as the rules ask for them.
        history: what the trainer logged; None if nothing was read.
        versions: package to version.
        read: what was read, a line each.
        not_read: what was not, and why.
        kinds: what kinds of file were read: `history`, `log`, `rows`, `weights`, `versions`, `guards`, `preflight`.
    """

    name: str
    figures: dict[str, Value] = dataclasses.field(default_factory=dict)
    history: History | None = None
    versions: dict[str, str] = dataclasses.field(default_factory=dict)
    read: list[str] = dataclasses.field(default_factory=list)
    not_read: list[str] = dataclasses.field(default_factory=list)
    kinds: set[str] = dataclasses.field(default_factory=set)


def collect(name: str, paths: Sequence[pathlib.Path], versions: dict[str, str] | None = None) -> Evidence:
    """Read the folder or the files of one run; `versions` are of the libraries, where they are known otherwise.

    Raises:
        RunError: there is no such file, or nothing in them that can be read.
    """
    evidence = Evidence(name, versions=dict(versions or {}))
    kinds: dict[str, list[pathlib.Path]] = collections.defaultdict(list)
    for path in paths:
        for file in _files(path):
            kinds[_kind(file, evidence)].append(file)
    for file in kinds["versions"]:
        _versions(file, evidence)
    for file in kinds["history"]:
        _history(file, evidence)
    matches = [match for file in kinds["log"] for match in _log(file, evidence)]
    _rows(kinds["rows"], evidence)
    for file in kinds["probes"]:
        with contextlib.suppress(ValueError, OSError):
            evidence.figures |= _weights(json.loads(file.read_text(encoding="utf-8")))
            evidence.read.append(f"{file.name}: what two checkpoints showed")
            evidence.kinds.add("weights")
    for file in kinds["guards"]:
        _guards(file, evidence)
    scripts = kinds["script"]
    for file in kinds["preflight"]:
        _preflight(file, scripts, evidence)
    _checkpoints(kinds["weights"], evidence)
    if "preflight" not in evidence.kinds:
        evidence.not_read += [
            f"{file.name}: a script is not read, but run, if it is named on the command line or with --preflight"
            for file in scripts
        ]
    if not evidence.read:
        why = "; ".join(evidence.not_read) or "it holds nothing that a run leaves"
        raise RunError(f"{name}: {why}. Next: trainer_state.json (a checkpoint has it), or the log")
    if evidence.history is not None:
        evidence.figures |= figures.measure(evidence.history) if not evidence.history.trainer else {}
        evidence.figures["grpo"] = not evidence.history.trainer
        evidence.not_read += evidence.history.notes
    if evidence.versions:
        evidence.kinds.add("versions")
        for failure in failures.all():
            hit = failures.affected(failure, evidence.versions)
            evidence.figures[f"affected_{failure.id}"] = bool(hit)
            evidence.figures[f"own_code_{failure.id}"] = hit.own_code
    owners: dict[int, str] = {}  # a line that is the error of two failures is the first one's
    for match in matches:
        owner = owners.setdefault(match.number, match.failure.id)
        kind = "notice" if match.notice or owner != match.failure.id else "error"
        evidence.figures[f"{kind}_{match.failure.id}"] = f"line {match.number}: {match.line[:120]}"
    _derived(evidence.figures)
    return evidence


def _derived(known: dict[str, Value]) -> None:
    """Figures that need two sources, and what is assumed where a figure was not logged."""
    known["clipped_or_unknown"] = known.get("clipped_start", 0.0)
    known["versions_read"] = "affected_F1" in known
    known.setdefault("preflight_read", False)
    for name, above, below in (
        ("gap_grows", "gap_end", "gap_start"),
        ("gap_worst_of_mean", "gap_max", "gap_end"),
        ("characters_for_token", "mean_characters", "length_mean"),
    ):
        over, under = known.get(above), known.get(below)
        if isinstance(over, int | float) and isinstance(under, int | float) and over and under:
            known[name] = over / under


def _files(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yield the files of a run: of a folder those that a run leaves, of several checkpoints the newest's state."""
    if not path.exists():
        raise RunError(f"{path} is not there. Next: the run's folder, or its files")
    if not path.is_dir():
        yield path
        return
    files = sorted(file for file in path.iterdir() if file.is_file() and not file.name.startswith("."))
    folders = sorted((folder for folder in path.glob("checkpoint-*") if folder.is_dir()), key=_number)
    yield from files
    if not any(file.name == "trainer_state.json" for file in files):
        states = [folder / "trainer_state.json" for folder in folders if (folder / "trainer_state.json").is_file()]
        yield from states[-1:]
    final = any(file.suffix == ".safetensors" for file in files)  # the last save, which lies in the run's folder
    for folder in dict.fromkeys([folders[0], folders[-1]]) if len(folders) + final > 1 else ():
        yield from checkpoints.weights_in(folder)
    for name in ("completions", "logs"):
        if (path / name).is_dir():
            yield from sorted(file for file in (path / name).iterdir() if file.is_file())


def _number(path: pathlib.Path) -> int:
    digits = re.findall(r"\d+", path.name)
    return int(digits[-1]) if digits else 0


def _kind(file: pathlib.Path, evidence: Evidence) -> str:
    """Return what a file is; empty for one that says nothing of a run."""
    name, suffix = file.name.lower(), file.suffix.lower()
    if suffix == ".safetensors":
        return "weights"
    if suffix == ".parquet":
        return "rows"
    try:
        with file.open("rb") as stream:
            start = stream.read(4096)
    except OSError as error:
        evidence.not_read.append(f"{file.name} cannot be read ({error.strerror})")
        return ""
    if not start.strip():
        evidence.not_read.append(f"{file.name} is empty")
        return ""
    if b"\0" in start and not start.startswith((b"\xff\xfe", b"\xfe\xff")):
        if name.startswith("events.out.tfevents"):
            evidence.not_read.append(f"{file.name}: TensorBoard's files are not read; trainer_state.json has the same")
        elif suffix not in (".pt", ".bin", ".pth", ".pkl"):
            evidence.not_read.append(f"{file.name} is binary and no safetensors or parquet file")
        return ""
    text = start.decode("utf-8", errors="replace")
    if suffix in (".py", ".ipy"):
        return "script"
    if suffix == ".json":
        if name == "failurelab.json":
            return "guards"
        if '"findings"' in text and ('"held"' in text or '"not_checked"' in text or '"repair"' in text):
            return "preflight"
        if "log_history" in text or "trainer_state" in name or '"loss"' in text or '"reward"' in text:
            return "history"
        if any(f'"{probe}"' in text for probe in _PROBES):
            return "probes"
        return "versions" if re.search(r'"trl"\s*:|"transformers"\s*:', text) and "config" not in name else ""
    if suffix == ".csv":
        return "rows" if "completion" in text.splitlines()[0] else ""
    if suffix == ".jsonl":
        return "rows" if '"completion"' in text.splitlines()[0] else "log"
    if name == "readme.md" or suffix in (".lock", ".yml", ".yaml") or re.search("require|version|freeze|pip", name):
        return "versions"
    if suffix in (".txt", ".log", ".out", ".err", "") or re.search(r"\.(?:log|out|err)", name):
        return "versions" if len(_PINNED.findall(text)) > 1 and "==" in text and "Traceback" not in text else "log"
    return ""


def _blocks(file: pathlib.Path) -> Iterator[str]:
    with file.open("rb") as stream:
        start = stream.read(2)
    wide = start in (b"\xff\xfe", b"\xfe\xff")
    with file.open(encoding="utf-16" if wide else "utf-8", errors="replace") as stream:
        while block := stream.read(_BLOCK):
            yield block


def _versions(file: pathlib.Path, evidence: Evidence) -> None:
    text = file.read_text(encoding="utf-8", errors="replace")[: 1 << 20]
    found: dict[str, str] = {}
    for package, version in _PINNED.findall(text):
        package = {"pytorch": "torch"}.get(package.lower(), package.lower())
        with contextlib.suppress(InvalidVersion):
            found.setdefault(package, str(Version(version)))
    found = {name: version for name, version in found.items() if name in PACKAGES}
    if found:
        evidence.versions = found | evidence.versions
        evidence.read.append(f"{file.name}: " + ", ".join(f"{name} {version}" for name, version in found.items()))
    elif file.name.lower() != "readme.md":
        evidence.not_read.append(f"{file.name} names no version of trl or transformers (name==version)")


def _history(file: pathlib.Path, evidence: Evidence) -> None:
    record = read_history(entries_of(_blocks(file)))
    with file.open("rb") as stream:
        stream.seek(max(0, file.stat().st_size - 64))
        end = stream.read().rstrip()
    if not end.endswith((b"}", b"]")):
        kept = f"its {record.entries} whole entries are used" if record.entries else "no entry is whole"
        evidence.not_read.append(f"{file.name} ends in the middle: {kept}")
    if not record.entries:
        evidence.not_read.append(f"{file.name} holds no entry of training")
        return
    _keep(record, file, evidence)


def _keep(record: History, file: pathlib.Path, evidence: Evidence) -> None:
    """Take a history, if none that says more was read before."""
    if evidence.history is not None and evidence.history.entries >= record.entries:
        return
    evidence.history = record
    evidence.kinds.add("history")
    what = f"of {record.trainer} training" if record.trainer else "of GRPO"
    last = f", up to step {record.steps[-1]:g}" if record.numbered else ", without steps"
    evidence.read.append(f"{file.name}: {record.entries} entries {what}{last}")


def _log(file: pathlib.Path, evidence: Evidence) -> list[symptoms.Match]:
    """Take a log's figures; return where it has the registry's texts."""
    evidence.kinds.add("log")
    size = file.stat().st_size

    def lines() -> Iterator[str]:
        try:
            yield from symptoms.read_log(file)
        except symptoms.LogError as error:
            evidence.not_read.append(str(error).split(". Next")[0])

    if size <= _ENOUGH:
        matches = symptoms.find_matches(lines())
    else:
        evidence.not_read.append(
            f"{file.name}: {size >> 20} MiB, errors are looked up in its first and last 1000 lines"
        )
        with file.open(encoding="utf-8", errors="replace") as stream:
            head = list(itertools.islice(stream, 1000))
        with file.open("rb") as raw:
            raw.seek(max(0, size - (1 << 20)))
            tail = raw.read().decode("utf-8", errors="replace").splitlines()[-1000:]
        matches = symptoms.find_matches(head + tail)
    if evidence.history is None or evidence.history.trainer:
        record = read_history(entries_of(_blocks(file)))
        if record.entries:
            _keep(record, file, evidence)
            return matches
    evidence.read.append(f"{file.name}: looked up for the texts of errors and warnings")
    return matches


def _rows(files: list[pathlib.Path], evidence: Evidence) -> None:
    rows: list[dict[str, Any]] = []
    for file in files[-8:]:
        try:
            rows += completions.read_rows(file)
        except (completions.CompletionsError, OSError) as error:
            evidence.not_read.append(f"{file.name}: {error}")
    if rows:
        found = completions.measure(rows)
        evidence.figures |= found
        if found["completions"]:
            evidence.kinds.add("rows")
            evidence.read.append(f"{found['completions']} logged completions")
        else:
            evidence.not_read.append(f"{files[0].name} has no column 'completion'")


def _guards(file: pathlib.Path, evidence: Evidence) -> None:
    """Take what the guards measured in the run itself: the file that they leave in the output folder."""
    try:
        notices = json.loads(file.read_text(encoding="utf-8"))["notices"]
        found = [(notice["guard"], notice["failures"], notice["message"]) for notice in notices
                 if notice["kind"] == "found"]  # fmt: skip
        held = sum(notice["kind"] == "held" for notice in notices)
    except (ValueError, KeyError, TypeError, OSError):
        evidence.not_read.append(f"{file.name} is no whole report of the guards")
        return
    for guard, failures_found, message in found:
        if len(failures_found) == 1:
            evidence.figures[f"guard_found_{failures_found[0]}"] = f"{guard}: {message}"
    if found:
        evidence.figures["guards_found"] = "; ".join(
            f"{' or '.join(failures_found)} ({guard})" for guard, failures_found, _ in found
        )
    evidence.kinds.add("guards")
    evidence.read.append(f"{file.name}: what guards measured ({len(found)} found, {held} held)")


def _preflight(file: pathlib.Path, scripts: list[pathlib.Path], evidence: Evidence) -> None:
    """Take what `failurelab preflight --json` said of the script, if it is of this script."""
    try:
        answer = Answer.from_json(json.loads(file.read_text(encoding="utf-8")))
        named, suspected, held = (
            {finding.failure: finding.evidence for finding in findings}
            for findings in (answer.named, answer.suspected, answer.held)
        )
    except (ValueError, KeyError, TypeError, AttributeError, OSError):
        evidence.not_read.append(f"{file.name} is no whole answer of failurelab preflight --json")
        return
    if not (named or suspected or held or answer.not_checked):
        evidence.not_read.append(f"{file.name}: preflight could not judge the script")
        return
    digest = answer.script_sha256
    if digest and scripts and digest not in {hashlib.sha256(script.read_bytes()).hexdigest() for script in scripts}:
        evidence.not_read.append(f"{file.name}: it is of another script than {scripts[0].name}, or of an earlier state")
        return
    for kind, answers in (("found", named), ("suspected", suspected), ("held", held)):
        evidence.figures |= {f"preflight_{kind}_{failure}": said for failure, said in answers.items()}
    harmful = [failure for failure in (*named, *suspected) if failure != "F3a"]  # which costs memory alone
    if harmful:
        evidence.figures["preflight_found"] = ", ".join(harmful)
    evidence.figures["preflight_read"] = True
    evidence.kinds.add("preflight")
    said = ", ".join(named) or "nothing"
    evidence.read.append(
        f"{file.name}: what preflight saw ({said} named, {len(suspected)} suspected, {len(held)} held)"
    )


def _checkpoints(files: list[pathlib.Path], evidence: Evidence) -> None:
    """Compare the earliest weights with the latest, by the steps at which they were saved."""
    folders = {file.parent for file in files}
    if len(folders) > 1:
        planned = filter(None, (_state(folder, "max_steps") for folder in folders))
        last = max(planned, default=math.inf)  # the final save has no state of its own
        steps = {folder: _step(folder, last) for folder in folders}
        ordered = sorted(folders, key=lambda folder: (steps[folder], str(folder)))
        before, after = ordered[0], ordered[-1]
        if steps[before] == steps[after]:
            evidence.not_read.append(
                f"{before.name} and {after.name} were saved at the same step, {steps[before]:g}; two checkpoints of "
                "different steps are needed to see what training changed"
            )
            return
    elif len(files) == 2:
        before, after = files[0], files[1]
    else:
        if files:
            evidence.not_read.append(f"{files[0].name}: one checkpoint; two are needed to see what training changed")
        return
    try:
        found = checkpoints.compare(before, after)
    except checkpoints.CheckpointError as error:
        evidence.not_read.append(str(error))
        return
    evidence.figures |= _weights(found)
    evidence.kinds.add("weights")
    evidence.read.append(f"{before.name} and {after.name}: {found['tensors']} tensors compared")


def _step(folder: pathlib.Path, last: float) -> float:
    """Return the step at which weights were saved, by their state or their folder's name; `last` for the final save."""
    step = _state(folder, "global_step")
    if step is not None:
        return step
    return float(_number(folder)) if folder.name.startswith("checkpoint") else last


def _state(folder: pathlib.Path, name: str) -> float | None:
    """Return a number of the trainer's state in a folder; None where there is none."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return float(json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))[name])
    return None


def _weights(found: dict[str, Any]) -> dict[str, Value]:
    """Figures of two checkpoints, as predicates can be asked of them."""
    result: dict[str, Value] = {key: value for key, value in found.items() if isinstance(value, int | float | bool)}
    if isinstance(found.get("dtypes"), list):
        result["weights_dtype"] = ", ".join(found["dtypes"])
    tensors = found.get("tensors")
    if tensors:
        result["tensors_share"] = found["tensors_changed"] / tensors
    if "finite" in result:
        result["weights_finite"] = result.pop("finite")
    if found.get("adapter_elements_changed") is not None:  # what is frozen under an adapter does not count
        result["elements_changed"] = found["adapter_elements_changed"]
        result.pop("tensors_share", None)
        result["adapter"] = True
    return result
