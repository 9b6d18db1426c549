"""The script, run as it is in the Python that trains, up to the end of a cut training; what was found goes into a file.

What is changed for that time stands in `intercept`: models are built small (`small`), training arguments are cut
(`cuts`), the script's own code sees the rank that the launch gives it, and GPUs that are not here are the CPU
(`ranks`), no other process trains (`processes`), saving and uploading do nothing, and `train()` of every Trainer judges
and ends the process (`trainers`).
"""

import contextlib
import dataclasses
import inspect
import json
import os
import pathlib
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from failurelab.preflight.answers import Answer, Finding, Held, NotApplicable, NotChecked, Suspected
from failurelab.preflight.inputs import Source
from failurelab.preflight.intercept import own_code, processes
from failurelab.preflight.script_error import describe_error


def main(spec: dict[str, Any]) -> None:
    """Run the script that `spec` names; ends this process."""
    path = pathlib.Path(spec["script"])
    report = Report(pathlib.Path(spec["report"]), pathlib.Path(spec["progress"]))
    try:
        text = path.read_text(encoding="utf-8-sig")
        compile(text, str(path), "exec")
    except (SyntaxError, ValueError) as error:
        line, problem = getattr(error, "lineno", "?"), getattr(error, "msg", error)
        report.end(error=f"{path}, line {line}: {type(error).__name__}: {problem}")
    report.say("importing torch and transformers")
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        report.end(error=describe_error(error, path))
    run = Run(spec, Source(str(path), text), report)
    sys.argv = [str(path), *spec["arguments"]]
    with run.watching():
        report.say(f"running {path.name}")
        try:
            runpy.run_path(str(path), run_name="__main__")
        except BaseException as error:
            report.traceback(error)
            run.ended(describe_error(error, path, spec["stderr"]))
        run.ended(f"{path.name} ended without training: it never called train() of a transformers Trainer")


_DATASETS = ("train_dataset", "eval_dataset")


class Report:
    """What the parent is told: stages while it runs, and answers at the end."""

    def __init__(self, path: pathlib.Path, progress: pathlib.Path):
        self._path, self._progress = path, progress
        self.answers: list[Answer] = []
        self.notes: list[str] = []

    def say(self, stage: str) -> None:
        """Tell what is done now."""
        with self._progress.open("a") as file:
            file.write(stage + "\n")

    def traceback(self, error: BaseException) -> None:
        """Print the script's error where its other output goes."""
        traceback.print_exception(type(error), error, error.__traceback__)

    def end(self, error: str = "", cut: list[str] | None = None, trained: bool = False) -> None:
        """Write the answers, and end the process: nothing of the script runs after that."""
        kinds = {
            Finding: "findings",
            Suspected: "suspected",
            Held: "held",
            NotApplicable: "not_applicable",
            NotChecked: "not_checked",
        }
        answers: dict[str, list] = {kind: [] for kind in kinds.values()}
        for answer in self.answers:
            kept = [field.name for field in dataclasses.fields(answer) if field.name != "undo"]
            answers[kinds[type(answer)]].append({name: getattr(answer, name) for name in kept})
        told = {**answers, "error": error, "cut": cut or [], "notes": self.notes, "trained": trained}
        whole = self._path.with_suffix(".part")
        whole.write_text(json.dumps(told))
        whole.rename(self._path)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


class Run:
    """One script, watched until its first training ends."""

    def __init__(self, spec: dict[str, Any], source: Source, report: Report):
        from failurelab.preflight.intercept import cuts, ranks

        self.spec, self.source, self.report = spec, source, report
        self.loads: list[Any] = []
        self.adapters: list[Any] = []
        self.launched = ranks.Launched(spec["world_size"])
        self.arguments = cuts.Arguments(spec["steps"], spec["output"])
        self.given: dict[int, dict[str, Any]] = {}  # of each trainer, by its id
        self.datasets: dict[int, Any] = {}
        self.making = 0
        self.training = self.evaluated = False
        self.real = spec["real_model"]

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, the script's models, arguments and trainers are watched."""
        from failurelab.preflight.intercept import small, trainers

        own = own_code.OwnCode(self.source.path)
        with contextlib.ExitStack() as stack:
            stack.enter_context(processes.no_other_processes(own))
            stack.enter_context(self.launched.seen(own))
            stack.enter_context(self.arguments.cut())
            stack.enter_context(
                small.built_small(
                    self.loads,
                    self.adapters,
                    lambda: self.making > 0,
                    self.real,
                    self.launched.too_early,
                    self.launched.mapped,
                )
            )
            stack.enter_context(trainers.watched(self))
            yield

    def initialize(self, original: Callable[..., None], trainer: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        """Make a trainer: note what it is given, and give it the first rows of its dataset."""
        from failurelab.preflight.intercept import cuts

        parameters = list(inspect.signature(original).parameters.values())[1 : len(args) + 1]
        names = [each.name if each.kind is each.POSITIONAL_OR_KEYWORD else "" for each in parameters]
        names += [""] * (len(args) - len(names))  # of a subclass that passes *args on
        given = dict(zip(names, args)) | kwargs  # by name; also by an old name, which a decorator translates
        given.pop("", None)
        self.given[id(trainer)] = {**given, **self.given.get(id(trainer), {})}
        if given.get("train_dataset") is not None:
            self.datasets.setdefault(id(trainer), given["train_dataset"])
        args = tuple(cuts.cut_rows(value) if name in _DATASETS else value for name, value in zip(names, args))
        kwargs = {name: cuts.cut_rows(value) if name in _DATASETS else value for name, value in kwargs.items()}
        if not self.making:
            self.report.say(f"making {type(trainer).__name__}")
        self.making += 1
        try:
            original(trainer, *args, **kwargs)
        finally:
            self.making -= 1

    def train(self, original: Callable[..., Any], trainer: Any) -> None:
        """Judge a trainer before its training, train for a few steps, and judge again; ends the process."""
        from failurelab.preflight.inputs import Seen
        from failurelab.preflight.intercept import cuts, ranks, watched
        from failurelab.preflight.judges import order
        from failurelab.preflight.judges.textbook import StepJudge
        from failurelab.preflight.launcher_line import zero_stage

        asked = self.arguments.asked(trainer.args)
        given = self.given.get(id(trainer), {})
        seen = Seen(
            trainer=trainer,
            asked=asked,
            dataset=self.datasets.get(id(trainer), trainer.train_dataset),
            loads=self.loads,
            world_size=self.spec["world_size"],
            memory=self.spec["memory"],
            small=any(load.small for load in self.loads),
            given=given,
            gpus=ranks.visible_gpus(),
            device=self.launched.rank.device.index,
            zero_stage=max(self.spec["zero_stage"], zero_stage(asked.get("deepspeed"))),
            evaluated=self.evaluated,
            source=dataclasses.replace(self.source, line=_line(self.source.path)),
        )
        self._note_other_trainings(seen.source)
        self.report.say("judging lengths, rewards and arguments")
        self._ask(order.BEFORE, seen)
        trainer.train_dataset = cuts.choose_short(trainer.train_dataset, 4 * cuts.PROMPTS)
        watch = watched.Watch(seen, self.adapters)
        step = StepJudge(seen, watch.explains_gradient)
        trainer.data_collator = cuts.cut_batches(trainer.data_collator)
        self.report.say(f"training {self.spec['steps']} steps")
        error = ""
        with watch.listening(), step.listening():
            try:
                original(trainer)
                watch.finished = True
            except BaseException as problem:
                self.report.traceback(problem)
                error = describe_error(problem, self.source.path, line=seen.source.line)
        seen.log = list(trainer.state.log_history)
        self._ask((lambda _: watch.answers(), *order.AFTER), seen)
        self.report.answers = step.outweigh(self.report.answers)
        if watch.reward_error is not None:
            self.report.traceback(watch.reward_error)
            error = error or describe_error(watch.reward_error, self.source.path, line=seen.source.line)
        self.report.end(error, self._cuts(trainer, seen), trained=True)

    def ended(self, error: str) -> None:
        """Tell of a script that ended before training, with what its loads alone say."""
        from failurelab.preflight.inputs import Seen
        from failurelab.preflight.intercept import ranks
        from failurelab.preflight.judges.four_bit_placement import judge_four_bit_placement

        if self.loads:
            seen = Seen(
                None,
                {},
                loads=self.loads,
                world_size=self.spec["world_size"],
                gpus=ranks.visible_gpus(),
                device=self.launched.rank.device.index,
            )
            self._ask((judge_four_bit_placement,), seen)
        self.report.end(error, self.launched.mapped.texts)

    def _ask(self, judges: Sequence[Callable[..., Any]], seen: Any) -> None:
        for judge in judges:
            try:
                self.report.answers.extend(judge(seen))
            except Exception as error:
                self.report.traceback(error)
                name = getattr(judge, "__module__", "").rpartition(".")[2]
                self.report.answers.append(
                    NotChecked(name, f"this check itself failed: {type(error).__name__}: {error}")
                )

    def _cuts(self, trainer: Any, seen: Any) -> list[str]:
        cut = self.arguments.cuts(trainer.args)
        names = dict.fromkeys(load.name for load in self.loads if load.small)
        built = [f"{name}: built small and random, with its vocabulary" for name in names]
        rows = len(seen.dataset) if hasattr(seen.dataset, "__len__") else 0
        picked = len(trainer.train_dataset) if hasattr(trainer.train_dataset, "__len__") else 0
        short = [f"{picked} short ones of {rows} rows"] if picked < rows else []
        return [*built, *cut, *self.launched.mapped.texts, *short]

    def _note_other_trainings(self, source: Source) -> None:
        others = [line for line in source.training_lines() if line != source.line]
        if source.line and others:
            self.report.notes.append(
                f"the script trains again in line {', '.join(map(str, others))}: the training of line {source.line}, "
                "which comes first, was judged"
            )


def _line(path: str) -> int:
    """Return the script's line that is being run now, or 0."""
    frame = sys._getframe(1)
    lines = []
    while frame is not None:
        if frame.f_code.co_filename == path:
            lines.append(frame.f_lineno)
        frame = frame.f_back
    return lines[0] if lines else 0
