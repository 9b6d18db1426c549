"""The script, run as it is in the Python that trains, up to the end of a cut training; what was found goes into a file.

What is changed for that time stands in `stage`: models are built small (`models`), training arguments are cut
(`cuts`), the script's own code sees the rank that the launch gives it, and GPUs that are not here are the CPU
(`ranks`), no other process trains (`processes`), saving and uploading do nothing, and `train()` of every Trainer judges
and ends the process (`trainers`). A repair that is tried is a `Change`: the text of the script's own files.
"""

import contextlib
import dataclasses
import importlib
import importlib.machinery
import inspect
import json
import linecache
import os
import pathlib
import re
import shlex
import sys
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

from failurelab.errors import raises_own
from failurelab_preflight import notebook, repairs
from failurelab_preflight.answer import COMMAND_LINE, KNOWN, SEED, Answer, Setting
from failurelab_preflight.finding import CUT, Change, Finding
from failurelab_preflight.judges import releases
from failurelab_preflight.launcher_line import missing_file, zero_stage
from failurelab_preflight.rewards import RewardTable
from failurelab_preflight.script_error import describe_error
from failurelab_preflight.script_text import Place, Text, find_called, own_frames, place_of, read_source
from failurelab_preflight.stage import own_code, processes
from failurelab_preflight.stage.effects import Effects
from failurelab_preflight.stage.releases import LeftOut
from failurelab_preflight.training import Source, Training


def main(spec: dict[str, Any]) -> None:
    """Run the script that `spec` names; ends this process."""
    path = pathlib.Path(spec["script"])
    report = Reporter(pathlib.Path(spec["report"]), pathlib.Path(spec["progress"]))
    files = OwnFiles(str(path), Change(spec["files"]))
    text = ""
    try:
        text = files.read(str(path))
        code = compile(text, str(path), "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        line, problem = getattr(error, "lineno", None), getattr(error, "msg", error)
        where = f", {Source(str(path), text).at(line)}" if line else ""
        report.end(error=f"{path}{where}: {type(error).__name__}: {problem}")
    if path.suffix == ".ipynb":
        report.notes += [f"left out, {line}" for line in notebook.as_script(path.read_text(encoding="utf-8"))[1]]
    report.say("importing torch and transformers")
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        report.end(error=describe_error(error, path))
    run = WatchedScript(spec, Source(str(path), text), report, files)
    sys.argv = [str(path), *files.arguments(spec["arguments"], pathlib.Path(spec["tmp"]))]
    sys.dont_write_bytecode = True
    Effects(pathlib.Path(spec["effects"]), files.own, [spec["session"]]).listen()
    with run.watching(), files.edited():
        report.say(f"running {path.name}")
        try:
            _run_as_main(code, path, spec.get("module", ""))
        except BaseException as error:
            report.traceback(error)
            report.demands_gpu = run.gpus.is_demanded(error) and not run.trainers
            report.refuses_cut = [] if run.training else run.refused_cut
            run.refused(error)
            said = run.read_error(error, run.arguments.last_uncut())
            run.ended(said + "; it had asked for a GPU, and none is here" * report.demands_gpu)
        run.ended(f"{path.name} ended without training: it never called train() of a transformers Trainer")


def _run_as_main(code: types.CodeType, path: pathlib.Path, name: str = "") -> None:
    """Run a script's code in the module `__main__`, as Python does that is given the script, or `-m NAME`."""
    module = types.ModuleType("__main__")
    vars(module).update(__file__=str(path), __builtins__=__builtins__)
    if name:
        package = name if path.name == "__main__.py" else name.rpartition(".")[0]
        if package:
            importlib.import_module(package)
        vars(module).update(__package__=package, __spec__=importlib.machinery.ModuleSpec(name, None, origin=str(path)))
    sys.modules["__main__"] = module
    from transformers import set_seed

    set_seed(SEED)  # what a script draws without a seed of its own is the same in each run, forked or not
    exec(code, vars(module))


class OwnFiles:
    """The files of the script at a path, as it was given: as they are, or as the change of this run has them."""

    def __init__(self, script: str, change: Change):
        self.own, self.change = own_code.OwnCode(script), change
        self._script, self._real = script, os.path.realpath(script)
        self._texts: dict[str, Text | None] = {}

    def real(self, file: str) -> str:
        """Return the path of a file of code; the script may have changed its folder since it was started."""
        return self._real if file == self._script else os.path.realpath(file)

    def read(self, file: str) -> str:
        """Return a file's text in this run.

        Raises:
            SyntaxError, UnicodeDecodeError: it is no text of Python's.
        """
        real = self.real(file)
        return self.change.files[real] if real in self.change.files else read_source(real)

    def text(self, file: str) -> Text | None:
        """Return the text and the tree of a file of the script's own; None of another one."""
        if not self.own.may_edit(file):
            return None
        real = self.real(file)
        if real not in self._texts:
            self._texts[real] = None
            with contextlib.suppress(OSError, SyntaxError, ValueError):
                self._texts[real] = Text(real, self.read(file))
        return self._texts[real]

    def places(self, making: type | None = None) -> list[Place]:
        """Return the places in the script's own code that are running now, the innermost first.

        With `making` of them the calls of that class alone.
        """
        places = []
        for frame in own_frames(self.own.holds):
            file = frame.f_code.co_filename
            place = dataclasses.replace(place_of(frame), file=self.real(file))
            text = self.text(file) if making else None
            call = text and text.call(place)
            if making is None or (call and find_called(frame, call) is making):
                places.append(place)
        return places

    def edited(self) -> contextlib.AbstractContextManager:
        """Inside, modules of the script's own are imported, and shown in tracebacks, as this run has them."""
        original = importlib.machinery.SourceFileLoader.get_code

        def get_code(loader: Any, name: str) -> Any:
            if self.real(loader.path) not in self.change.files:
                return original(loader, name)
            self._show(loader.path)
            return compile(self.read(loader.path), loader.path, "exec", dont_inherit=True)

        if self._real in self.change.files or self._real.endswith(".ipynb"):  # whose lines are those of its cells
            self._show(self._script)
        return mock.patch.object(importlib.machinery.SourceFileLoader, "get_code", get_code)

    def arguments(self, arguments: Sequence[str], folder: pathlib.Path) -> list[str]:
        """Return the script's command line, with YAML files as this run has them, which are written into a folder."""
        words = []
        for word in shlex.split(self.change.files.get(COMMAND_LINE, shlex.join(arguments))):
            option, equals, path = word.rpartition("=")
            if (real := os.path.realpath(path)) in self.change.files:
                copy = folder / os.path.basename(real)
                copy.write_text(self.change.files[real], newline="")
                word = f"{option}{equals}{copy}"
            words.append(word)
        return words

    def _show(self, file: str) -> None:
        lines = self.read(file).splitlines(keepends=True)
        linecache.cache[file] = (sum(map(len, lines)), None, lines, file)


_DATASETS = ("train_dataset", "eval_dataset")


class Reporter:
    """What the parent is told: stages while it runs, and answers at the end."""

    def __init__(self, path: pathlib.Path, progress: pathlib.Path):
        self._path, self._progress = path, progress
        self.answers: list[Finding] = []
        self.notes: list[str] = []
        self.rewards: RewardTable | None = None
        self.in_force: list[Setting] = []
        self.measured: dict[str, float] = {}
        self.script: repairs.EditableScript | None = None
        self.demands_gpu = False
        self.refuses_cut: list[str] = []

    def say(self, stage: str) -> None:
        """Tell what is done now."""
        if self.answers:
            self._write(KNOWN, "", ())
        with self._progress.open("a") as file:
            file.write(stage + "\n")

    def traceback(self, error: BaseException) -> None:
        """Print the script's error where its other output goes; one that ended by itself has said why."""
        if not isinstance(error, SystemExit):
            traceback.print_exception(error)

    def end(self, error: str = "", cut: Sequence[str] = ()) -> None:
        """Write the answers, and end the process: nothing of the script runs after that."""
        self._write("", error, cut)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    def _write(self, suffix: str, error: str, cut: Sequence[str]) -> None:
        """Write the answers into the report, or beside it by another suffix."""
        findings = [self._with_changes(finding) if finding.undo else finding for finding in self.answers]
        answer = Answer(findings=findings, error=error, cut=list(cut), notes=self.notes, rewards=self.rewards)
        answer.demands_gpu, answer.refuses_cut = self.demands_gpu, self.refuses_cut
        answer.in_force, answer.measured = self.in_force, self.measured
        whole = self._path.with_suffix(".part")
        whole.write_text(json.dumps(answer.to_json()))
        whole.rename(self._path.with_suffix(suffix))

    def _with_changes(self, finding: Finding) -> Finding:
        """Return a finding with what runs with its repairs do otherwise, on top of this one's change, and where."""
        changes: list[Change] = []
        place = finding.place
        for undo in finding.undo if isinstance(finding.undo, tuple) else (finding.undo,):
            try:
                edits = undo.edit(self.script) if undo and self.script else []
                if edits and self.script:
                    change, at = self.script.edited(edits)
                    changes.append(change)
                    place = place or at
            except Exception as error:  # a text that was not thought of: then the repair is not tried
                if raises_own(error):
                    raise
                self.traceback(error)
        return dataclasses.replace(finding, changes=tuple(changes), place=place)


class WatchedScript:
    """One script, watched until its first training ends."""

    def __init__(self, spec: dict[str, Any], source: Source, report: Reporter, files: OwnFiles):
        from failurelab_preflight.stage import cuts, gpus, ranks

        self.spec, self.source, self.report, self.files = spec, source, report, files
        self.places: dict[str, list[list[Place]]] = {}  # of the calls that repairs speak of
        self.trainers: list[Any] = []  # as they were made
        report.script = repairs.EditableScript(files.text, self.places, files.change)
        self.loads: list[Any] = []
        self.adapters: list[Any] = []
        self.launched = ranks.Launched(*(spec[name] for name in ("rank", "ranks", "together", "visible", "patience")))
        sizes = cuts.Processes(spec["world_size"], spec["ranks"])
        self.whole = spec.get("whole", False)
        self.arguments = cuts.CutArguments(
            spec["steps"], spec["output"], self._note_arguments, sizes, lambda: self.making > 0, self.whole
        )
        self.refused_cut: list[str] = []  # numbers with which a trainer's making ended in an error
        self.keywords: dict[int, dict[str, Any]] = {}  # of each trainer, by its id
        self.datasets: dict[int, Any] = {}
        self.left_out = LeftOut()
        self.making = 0
        self.training = False
        self.skipped: Any = None  # the trainer whose training in this line was left out for a later one
        self.skipped_line = 0
        self.real = spec["real_model"]
        self.gpus = gpus.Told(files.own, spec.get("gpus", 0))

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, the script's models, arguments and trainers are watched."""
        from failurelab_preflight.stage import models, saving, trainers

        own, rank = self.files.own, self.launched
        launch = rank.too_early, rank.mapped
        replaced = (  # in this order: what comes later is called first
            processes.no_other_processes(own),
            rank.as_launched(own),
            self.gpus.answering(),
            self.arguments.cut(),
            self.left_out.arguments(),
            saving.elsewhere(self.spec["output"], self.loads, self.real),
            # a load is cut here, and finds by `saving` what the script has saved: so `saving` comes before
            models.built_small(self.loads, self.adapters, lambda: self.making > 0, self.real, *launch, self._note),
            trainers.watched(self),
        )
        with contextlib.ExitStack() as stack:
            for replacement in replaced:
                stack.enter_context(replacement)
            yield

    def _note(self, kind: str, known: bool = True) -> None:
        """Note the places of a call that is under way; none where the script's own code is not what made it."""
        self.places.setdefault(kind, []).append(self.files.places() if known else [])

    def _note_arguments(self, arguments: Any) -> None:
        self.places.setdefault("arguments", []).append(self.files.places(making=type(arguments)))

    def initialize(self, original: Callable[..., None], trainer: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        """Make a trainer: note what it is given, and give it the first rows of its dataset."""
        from failurelab_preflight.stage import cuts

        parameters = list(inspect.signature(original).parameters.values())[1 : len(args) + 1]
        names = [
            parameter.name if parameter.kind is parameter.POSITIONAL_OR_KEYWORD else "" for parameter in parameters
        ]
        names += [""] * (len(args) - len(names))  # of a subclass that passes *args on
        keywords = dict(zip(names, args)) | kwargs  # by name; also by an old name, which a decorator translates
        keywords.pop("", None)
        self.keywords[id(trainer)] = {**keywords, **self.keywords.get(id(trainer), {})}
        if keywords.get("train_dataset") is not None:
            self.datasets.setdefault(id(trainer), keywords["train_dataset"])
        args = tuple(cuts.cut_rows(value) if name in _DATASETS else value for name, value in zip(names, args))
        kwargs = {name: cuts.cut_rows(value) if name in _DATASETS else value for name, value in kwargs.items()}
        if not self.making:
            self.report.say(f"making {type(trainer).__name__}")
            self.trainers.append(trainer)
            self._note("trainer")
            self.arguments.settle(self.keywords[id(trainer)].get("args"))
        self.making += 1
        try:
            self.left_out.call("trainer", original, trainer, args, kwargs)
        except Exception:
            made = self.arguments.made
            self.refused_cut = self.arguments.cut_numbers(made[-1]) if made else []
            raise
        finally:
            self.making -= 1

    def train(self, original: Callable[..., Any], trainer: Any) -> Any:
        """Judge a trainer before its training, train for a few steps, and judge again; ends the process.

        A training of another kind that comes before one with rewards is not run: the later one is judged.
        """
        from failurelab_preflight import in_force
        from failurelab_preflight.judges import order
        from failurelab_preflight.judges.batch import judge_batch
        from failurelab_preflight.judges.four_bit_placement import judge_four_bit_placement
        from failurelab_preflight.judges.gradients import GradientJudge
        from failurelab_preflight.judges.reference import judge_reference
        from failurelab_preflight.judges.rewards import judge_rewards
        from failurelab_preflight.judges.textbook import StepJudge
        from failurelab_preflight.stage import callbacks, cuts, rewards

        line = _line(self.source.path)
        if self._is_first_stage(trainer, line):
            return self._skip(trainer, line)
        self._note("train")
        self.report.answers += releases.of_keywords(self.left_out, went_on=True)
        self.report.answers += releases.of_files(self.left_out)
        judged = {"trainer": (self.trainers, trainer), "arguments": (self.arguments.made, trainer.args)}
        for kind, (calls, its) in judged.items():
            self.places[kind] = [at for call, at in zip(calls, self.places.get(kind, ())) if call is its]
        line = line or (self.skipped_line if self.skipped is trainer else 0)
        arguments = self.arguments.uncut(trainer.args)
        source = dataclasses.replace(self.source, line=line)
        config = arguments.get("deepspeed") or self.spec.get("zero_config")
        training = Training(
            trainer=trainer,
            arguments=arguments,
            dataset=self.datasets.get(id(trainer), trainer.train_dataset),
            **self._launch(),
            small=any(load.small for load in self.loads),
            keywords=self.keywords.get(id(trainer), {}),
            zero_stage=max(self.spec["zero_stage"], zero_stage(config)),
            lacks=missing_file(config),
            source=source,
            own=self.files.own.holds,
        )
        self.launched.has_engine = bool(training.zero_stage)
        self._note_skipped(source)
        if self.launched.rank.launched:
            self.report.say("waiting for the other ranks")
        self.launched.meet()
        leads = self.launched.rank.number == 0  # another rank judges its devices alone, and waits
        self.report.say("judging lengths, rewards and arguments" if leads else "waiting for rank 0, which judges")
        self._ask(order.BEFORE if leads else (judge_four_bit_placement,), training)
        self.launched.follow()
        rows = 4 * cuts.PROMPTS
        if self.whole:  # each step takes as many prompts as the script asks for
            rows = max(rows, trainer.args.train_batch_size * trainer.args.gradient_accumulation_steps * 4)
        trainer.train_dataset = cuts.choose_short(trainer.train_dataset, rows)
        listening = [judge(training) for judge in order.DURING]
        gradients = next(judge for judge in listening if isinstance(judge, GradientJudge))
        step = StepJudge(training, gradients.misses_gradients)
        trainer.data_collator = cuts.cut_batches(trainer.data_collator)
        self.report.say(f"training {self.spec['steps']} steps")
        error = ""
        at_first = order.BEGINNING if leads else (judge_reference,)  # a rank has a reference of its own
        beginning = callbacks.Beginning(lambda: self._ask(at_first, training))
        trainer.add_callback(beginning)
        with contextlib.ExitStack() as stack:
            for judge in listening:
                stack.enter_context(judge.listening())
            stack.enter_context(rewards.differing_rewards(training))
            own_draws = stack.enter_context(cuts.cut_generation(self.files.own))
            stack.enter_context(step.listening())  # the innermost: what others generate is no completion of its own
            raised: list[Finding] = []
            given = training.keywords.get("callbacks") or ()
            if not self.launched.rank.launched:  # of several ranks the others would wait for the one that goes on
                asked = callbacks.errors_noted(trainer, self.files.own, given, training.arguments)
                raised = stack.enter_context(asked)
            try:
                original(trainer)
                self.launched.meet()
                training.finished = True
            except BaseException as problem:
                self.report.traceback(problem)
                error = self.read_error(problem, arguments, source.line)
        beginning.ask()
        if not leads:
            self.report.say("judging what was seen")
            self._ask((judge_batch, judge_rewards), training)  # which may be otherwise than on rank 0
            self.report.end(error, self.launched.mapped.texts)
        try:
            self.report.in_force, self.report.measured = [*in_force.read_settings(training)], in_force.measure(training)
        except Exception as problem:  # of a trainer that was not thought of
            if raises_own(problem):
                raise
            self.report.traceback(problem)
        self.report.answers += raised
        self.report.say("judging what was seen")
        self._ask(listening, training)
        if step.tells_rows:  # the whole gradient tells for which tokens the scores are
            self.report.answers = [answer for answer in self.report.answers if answer.failure != "F3b"]
        self._ask((*order.AFTER, step), training)
        self.report.notes += training.notes
        self.report.rewards = training.rewards
        self.report.end(error, [*self._cuts(trainer, training), *dict.fromkeys(own_draws)])

    def _launch(self) -> dict[str, Any]:
        """Return what the judges are told of the launch, also where no trainer was made."""
        size, device = self.spec["world_size"], self.launched.rank.device.index
        told = {"loads": self.loads, "adapters": self.adapters, "world_size": size, "device": device}
        return told | {"asks_for_gpus": self.gpus.asked and not self.gpus.count}

    def _is_first_stage(self, trainer: Any, line: int) -> bool:
        """Whether another training comes later in the script, of a trainer that draws completions, and this one not."""
        from failurelab_preflight.judges.rows import generates

        later = any(other > line for other in self.source.training_lines())
        generating = re.search(r"\b(?:GRPO|RLOO|OnlineDPO)\w*Trainer\s*\(", self.source.text)
        return bool(not self.skipped_line and line and later and generating and not generates(trainer))

    def _skip(self, trainer: Any, line: int) -> Any:
        """Let the script go on as if a training had ended."""
        from transformers.trainer_utils import TrainOutput

        self.report.say(f"leaving out the training of {self.source.at(line)}, for a later one")
        self.skipped, self.skipped_line, self.training = trainer, line, False
        return TrainOutput(0, 0.0, {})

    def refused(self, error: BaseException) -> None:
        """Tell F22, where trl has refused the batch that the script asks for: these numbers were not cut."""
        from failurelab_preflight.judges import batch
        from failurelab_preflight.stage import cuts

        finding, arguments = batch.refused(error), self.arguments.last_uncut()
        if finding is None or not arguments.get("num_generations"):
            self.report.answers += releases.refused(error)
            return
        values = cuts.make_divide(arguments, self.spec["world_size"])
        self.places["arguments"] = self.places["arguments"][-1:]
        repair = f"Set {', '.join(f'{name}={value}' for name, value in values.items())}, or other numbers that divide."
        evidence, size = finding.evidence, self.spec["world_size"]
        if size > self.spec["ranks"]:  # the same refusal, by numbers that fewer processes have
            evidence += f" (in {self.spec['ranks']} processes that have the batch of the launch's {size})"
        undo = repairs.Arguments(values)
        self.report.answers.append(dataclasses.replace(finding, evidence=evidence, repair=repair, undo=undo))

    def read_error(self, error: BaseException, arguments: dict[str, Any], line: int = 0) -> str:
        """Return the script's error in words; empty where the cut may have made it, which is told as not checked."""
        from failurelab_preflight.stage import cuts

        said = describe_error(error, self.source.path, self.spec["log"], line)
        if option := cuts.made_error(error, arguments):
            why = f"{said}, and {option} is cut away: whether the script ends so where it is there is not known"
            self.report.answers.append(Finding.not_checked("cut", why, ends=True, origin=CUT))
            return ""
        self.report.answers += releases.of_error(error, self.files.own.holds)
        return said

    def ended(self, error: str) -> None:
        """Tell of a script that ended before training, with what its loads alone say."""
        if self.skipped_line and not self.training:
            self.report.notes.append(
                f"the training of {self.source.at(self.skipped_line)} was judged, for the script did not get to the "
                f"one after it: {error}"
            )
            self.skipped.train()
        from failurelab_preflight.judges.four_bit_placement import judge_four_bit_placement

        if not self.training:
            self.report.answers += releases.of_keywords(self.left_out, went_on=False)
        if self.loads:
            self._ask((judge_four_bit_placement,), Training(None, {}, **self._launch()))
        self.report.end(error, self.launched.mapped.texts)

    def _ask(self, judges: Sequence[Any], training: Any) -> None:
        for judge in judges:
            try:
                self.report.answers.extend(judge(training) if callable(judge) else judge.answers())
            except Exception as error:
                if raises_own(error):
                    raise
                self.report.traceback(error)
                why = f"this check itself failed: {type(error).__name__}: {error}"
                self.report.answers.append(Finding.not_checked(judge.__module__.rpartition(".")[2], why))

    def _cuts(self, trainer: Any, training: Any) -> list[str]:
        cut = self.arguments.cuts(trainer.args)
        names = dict.fromkeys(load.name for load in self.loads if load.small)
        built = [f"{name}: built small and random, with its vocabulary" for name in names]
        rows = len(training.dataset) if hasattr(training.dataset, "__len__") else 0
        picked = len(trainer.train_dataset) if hasattr(trainer.train_dataset, "__len__") else 0
        short = [f"{picked} short ones of {rows} rows"] if picked < rows else []
        engine = ["DeepSpeed's engine: none, each process trains the whole model"] * bool(training.zero_stage)
        kept = ["evaluation, saving, and what comes after train(): not run"]
        return [*built, *cut, *engine, *self.launched.mapped.texts, *short, *kept]

    def _note_skipped(self, source: Source) -> None:
        if self.skipped is not None and source.line not in (0, self.skipped_line):
            first, judged = type(self.skipped).__name__, f"that of {source.at(source.line)} was judged"
            self.report.notes.append(f"the training of {source.at(self.skipped_line)} ({first}) was not run: {judged}")


def _line(path: str) -> int:
    """Return the script's line that is being run now, or 0."""
    return next((frame.f_lineno for frame in own_frames(lambda file: file == path)), 0)
