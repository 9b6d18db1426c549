"""The files that a run left, found and read. What cannot be read is said in one line."""

import collections
import dataclasses
import hashlib
import itertools
import json
import math
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence

from failurelab.errors import FailureLabError
from failurelab.failures import names, symptoms
from failurelab.failures.predicates import Value
from failurelab_preflight.answer import Answer
from failurelab_preflight.diagnose import checkpoints, figures
from failurelab_preflight.diagnose.history import Entry, History, entries_of, read_history, rows_of

_BLOCK, _BEGINNING = 5000, 200  # lines that are read at once, and that tell what a file is
_TENSORS = (".safetensors", ".parquet", ".pt", ".bin", ".pth", ".pkl")


class RunError(FailureLabError):
    """A run cannot be judged at all; the message says why and the next step."""

    exit_status = 3


@dataclasses.dataclass(frozen=True)
class Proof:
    """What shows by itself that a run has a failure: an error's text, or what a guard or preflight measured.

    Attributes:
        failures: the run has one of these.
        says: what was seen.
        of_script: it was seen in the script, and not in the run itself.
    """

    failures: tuple[str, ...]
    says: str
    of_script: bool = False


@dataclasses.dataclass
class RunEvidence:
    """What is known of one run.

    Attributes:
        name: as it was given.
        figures: of the log and of two checkpoints, by name, as the rules ask for them.
        proofs: what names a cause by itself.
        hints: what else was said of the script or the run, and is no proof.
        history: what the trainer logged; None if nothing was read.
        read: what was read, a line each.
        not_read: what was not, and why.
        kinds: what kinds of file were read: `history`, `log`, `weights`, `guards`, `preflight`.
    """

    name: str
    figures: dict[str, Value] = dataclasses.field(default_factory=dict)
    proofs: list[Proof] = dataclasses.field(default_factory=list)
    hints: list[str] = dataclasses.field(default_factory=list)
    history: History | None = None
    read: list[str] = dataclasses.field(default_factory=list)
    not_read: list[str] = dataclasses.field(default_factory=list)
    kinds: set[str] = dataclasses.field(default_factory=set)


def collect(
    name: str,
    paths: Sequence[pathlib.Path],
    compared: Mapping[str, Value] | None = None,
) -> RunEvidence:
    """Read the folder or the files of one run.

    Args:
        name: of the run, for the answer.
        paths: its folder, or its files.
        compared: what `checkpoints.compare` said, where it was asked before.

    Raises:
        RunError: there is no such file, or nothing in them that can be read.
    """
    evidence = RunEvidence(name)
    folders = [path for path in paths if path.is_dir()]
    if len(folders) > 1 and not all(map(checkpoints.weights_in, folders)):
        raise RunError(f"{name}: {len(folders)} folders are several runs. Next: one of them, or two checkpoints of one")
    if compared:
        _take_comparison(compared, "two checkpoints", evidence)
    kinds: dict[str, list[pathlib.Path]] = collections.defaultdict(list)
    for path in paths:
        for file in _files(path):
            kinds[_kind(file, evidence)].append(file)
    for kind, read in (("history", _read_history), ("log", _read_log), ("guards", _read_guards)):
        for file in kinds[kind]:
            read(file, evidence)
    for file in kinds["preflight"]:
        _read_preflight(file, kinds["script"], evidence)
    _compare_checkpoints(kinds["weights"], evidence)
    if "preflight" not in evidence.kinds:
        evidence.not_read += [
            f"{file.name}: a script is not read; preflight.json is, of failurelab preflight --json preflight.json"
            for file in kinds["script"]
        ]
    if not evidence.read:
        why = "; ".join(evidence.not_read) or "it holds nothing that a run leaves"
        raise RunError(f"{name}: {why}. Next: trainer_state.json (a checkpoint has it), or the log")
    if evidence.history is not None:
        evidence.figures |= figures.measure(evidence.history) if evidence.history.grpo else {}
        evidence.not_read += evidence.history.notes
    return evidence


def _files(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yield the files of a run: of a folder those that a run leaves, of several checkpoints the newest's state."""
    if not path.exists():
        raise RunError(f"{path} is not there. Next: the run's folder, or its files")
    if not path.is_dir():
        yield path
        return
    below = [folder for folder in sorted(path.iterdir()) if folder.is_dir() and _is_run(folder)]
    if not _is_run(path) and len(below) == 1:  # the output folder, one step down
        path = below[0]
    files = sorted(file for file in path.iterdir() if file.is_file() and not file.name.startswith("."))
    folders = sorted((folder for folder in path.glob("checkpoint-*") if folder.is_dir()), key=_number)
    yield from files
    if not any(file.name == "trainer_state.json" for file in files):
        states = [folder / "trainer_state.json" for folder in folders if (folder / "trainer_state.json").is_file()]
        yield from states[-1:]
    final = any(file.suffix == ".safetensors" for file in files)  # the last save, which lies in the run's folder
    for folder in dict.fromkeys([folders[0], folders[-1]]) if len(folders) + final > 1 else ():
        yield from checkpoints.weights_in(folder)
    if (path / "logs").is_dir():
        yield from sorted(file for file in (path / "logs").iterdir() if file.is_file())


def _is_run(folder: pathlib.Path) -> bool:
    left = ("trainer_state.json", "checkpoint-*", "*.safetensors", "*.log", "log*.txt", "*.jsonl", "failurelab.json")
    return any(any(folder.glob(pattern)) for pattern in left)


def _number(folder: pathlib.Path) -> float:
    """Return the step in a checkpoint's name; infinity for the final save, whose folder is named otherwise."""
    digits = re.fullmatch(r"checkpoint-(\d+)", folder.name)
    return int(digits[1]) if digits else math.inf


def _kind(file: pathlib.Path, evidence: RunEvidence) -> str:
    """Return what a file is; empty for one that says nothing of a run."""
    name, suffix = file.name.lower(), file.suffix.lower()
    if suffix in _TENSORS:
        return "weights" if suffix == ".safetensors" else ""
    try:
        text = "".join(itertools.islice(symptoms.read_log(file), _BEGINNING))
    except symptoms.LogError as error:
        evidence.not_read.append(str(error).split(". Next")[0])
        return ""
    first = text.splitlines()[0]
    if suffix in (".py", ".ipy"):
        return "script"
    if suffix == ".json":
        if name == "failurelab.json":
            return "guards"
        if '"findings"' in text or '"schema"' in text:
            return "preflight"
        if "log_history" in text or "trainer_state" in name or '"loss"' in text or '"reward"' in text:
            return "history"
        return ""
    if suffix in (".csv", ".jsonl"):
        kind = "history" if suffix == ".csv" else "log"
        return "" if 'completion"' in first or not re.search(r"\b(?:reward|loss|grad_norm)\b", first) else kind
    is_log = suffix in (".txt", ".log", ".out", ".err", "") or re.search(r"\.(?:log|out|err)", name)
    return "log" if is_log and not re.search("require|version|freeze|pip", name) else ""


def _entries(file: pathlib.Path) -> Iterator[Entry]:
    lines = symptoms.read_log(file)
    if file.suffix.lower() == ".csv":
        return rows_of(lines)
    return entries_of(iter(lambda: "".join(itertools.islice(lines, _BLOCK)), ""))


def _read_history(file: pathlib.Path, evidence: RunEvidence) -> None:
    record = read_history(_entries(file))
    with file.open("rb") as stream:
        stream.seek(max(0, file.stat().st_size - 64))
        end = stream.read().rstrip()
    if file.suffix.lower() == ".json" and not end.endswith((b"}", b"]")):
        kept = f"its {len(record.entries)} whole entries are used" if record.entries else "no entry is whole"
        evidence.not_read.append(f"{file.name} ends in the middle: {kept}")
    if not record.entries:
        evidence.not_read.append(f"{file.name} holds no entry of training")
        return
    _take_history(record, file, evidence)


def _take_history(record: History, file: pathlib.Path, evidence: RunEvidence) -> None:
    """Take a history, if none that says more was read before."""
    if evidence.history is not None and len(evidence.history.entries) >= len(record.entries):
        return
    evidence.history = record
    evidence.kinds.add("history")
    what = "of GRPO" if record.grpo else "of another kind of training"
    last = f", up to step {record.entries[-1]['step']:g}" if record.numbered else ", without steps"
    evidence.read.append(f"{file.name}: {len(record.entries)} entries {what}{last}")


def _read_log(file: pathlib.Path, evidence: RunEvidence) -> None:
    """Take a log's figures, and the errors in it: of the registry, and of names that a release does not have."""
    evidence.kinds.add("log")
    read = symptoms.Log(symptoms.read_log(file))
    matches = symptoms.find_matches(read)
    owners: dict[int, str] = {}  # a line that is the error of two failures is the first one's
    for match in matches:
        said = f"line {match.number}: {match.line[:120]}"
        if match.notice or owners.setdefault(match.number, match.failure.id) != match.failure.id:
            evidence.hints.append(f"{match.failure.id}'s text, which other runs print too, {said}")
        else:
            evidence.proofs.append(Proof((match.failure.id,), f"its error, {said}"))
    for number, line in read.errors.items():
        if explained := names.explain(line):
            evidence.proofs.append(Proof(("release",), f"line {number}: {line[:160]}. {explained}"))
    if evidence.history is None or not evidence.history.grpo:
        record = read_history(_entries(file))
        if record.entries:
            _take_history(record, file, evidence)
            return
    evidence.read.append(f"{file.name}: looked up for the texts of errors and warnings")


def _read_guards(file: pathlib.Path, evidence: RunEvidence) -> None:
    """Take what the guards measured in the run itself: the file that they leave in the output folder."""
    try:
        notices = json.loads(file.read_text(encoding="utf-8"))["notices"]
        found = [notice for notice in notices if notice["kind"] == "found"]
        proofs = [Proof((*notice["failures"],), f"{notice['guard']}: {notice['message']}") for notice in found]
        held = sum(notice["kind"] == "held" for notice in notices)
    except (ValueError, KeyError, TypeError, OSError):
        evidence.not_read.append(f"{file.name} is no whole report of the guards")
        return
    evidence.proofs += [proof for proof in proofs if proof.failures]
    evidence.kinds.add("guards")
    evidence.read.append(f"{file.name}: what guards measured ({len(found)} found, {held} held)")


def _read_preflight(file: pathlib.Path, scripts: list[pathlib.Path], evidence: RunEvidence) -> None:
    """Take what `failurelab preflight --json` said of the script, if it is of this script.

    Read are what is named, suspected, held and not checked, of each its failure and its evidence, and
    the hash of the script.
    """
    try:
        answer = Answer.from_json(json.loads(file.read_text(encoding="utf-8")))
        named, suspected = (
            {finding.failure: finding.evidence or "measured" for finding in findings}
            for findings in (answer.named, answer.suspected)
        )
    except (ValueError, KeyError, TypeError, AttributeError, OSError):
        evidence.not_read.append(f"{file.name} is no whole answer of failurelab preflight --json")
        return
    if not (named or suspected or answer.held or answer.not_checked):
        evidence.not_read.append(f"{file.name}: preflight could not judge the script")
        return
    digest = answer.script_sha256
    if digest and scripts and digest not in {hashlib.sha256(script.read_bytes()).hexdigest() for script in scripts}:
        evidence.not_read.append(f"{file.name}: it is of another script than {scripts[0].name}, or of an earlier state")
        return
    evidence.proofs += [Proof((failure,), f"preflight: {said}", of_script=True) for failure, said in named.items()]
    evidence.hints += [f"preflight suspects {failure}: {said}" for failure, said in suspected.items()]
    if suspected:
        evidence.figures["preflight_suspects"] = ", ".join(suspected)
    evidence.kinds.add("preflight")
    said = ", ".join(named) or "nothing"
    held = len(answer.held)
    evidence.read.append(f"{file.name}: what preflight saw ({said} named, {len(suspected)} suspected, {held} held)")


def _compare_checkpoints(files: list[pathlib.Path], evidence: RunEvidence) -> None:
    """Compare the earliest weights with the latest: by their folders' numbers, and what has none was saved last."""
    folders = sorted({file.parent for file in files}, key=_number)
    ends = folders if len(folders) > 1 else files
    if len(folders) == 1 and len(files) != 2:
        evidence.not_read.append(f"{files[0].name}: one checkpoint; two are needed to see what training changed")
        return
    if not ends:
        return
    try:
        _take_comparison(checkpoints.compare(ends[0], ends[-1]), f"{ends[0].name} and {ends[-1].name}", evidence)
    except checkpoints.CheckpointError as error:
        evidence.not_read.append(str(error))


def _take_comparison(found: Mapping[str, Value], what: str, evidence: RunEvidence) -> None:
    if not found["tensors_changed"]:
        evidence.not_read.append(f"{what} hold the same weights: saved at one step, or nothing was trained (F23)")
        return
    evidence.figures |= found
    evidence.kinds.add("weights")
    evidence.read.append(f"{what}: {found['tensors']} tensors compared")
