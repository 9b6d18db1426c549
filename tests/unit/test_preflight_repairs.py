"""Repairs as edits of a script's text, and the rounds in which they are tried; nothing here needs torch."""

import ast
import dataclasses
import json
import pathlib
import subprocess
import sys
import types

import pytest
from tests.cli.one_session import session_of

from failurelab.preflight import repairs, trials
from failurelab.preflight.answer import COMMAND_LINE, Answer, Change, Effect, Finding, Location, Quantity, Verdict
from failurelab.preflight.repairs import (
    AnyKeywords,
    Arguments,
    FirstLine,
    Keyword,
    Statement,
    Together,
    WithoutMethod,
)
from failurelab.preflight.script_text import (
    Place,
    Text,
    apply_edits,
    encode_source,
    locate,
    make_patch,
    place_of,
    read_source,
)
from failurelab.preflight.session import TimeIsOver, _with_folder

# A script as people write it; `@kind` marks the call that a repair speaks of.
SCRIPTS = {
    "plain": """
import torch
args = @arguments GRPOConfig(output_dir="out", temperature=0.9)
model = @load AutoModel.from_pretrained("Qwen", device_map={"": 0})
trainer = @trainer GRPOTrainer(model=model, args=args, train_dataset=rows, peft_config=LoraConfig(r=8))
@train trainer.train()
""",
    "in lines": """
def main():
    args = @arguments GRPOConfig(
        output_dir="out",
        temperature=(0.9),  # hot
    )
    model = @load AutoModel.from_pretrained(
        "Qwen",
        device_map={"": 0},
    )
    if True:
        trainer = @trainer GRPOTrainer(
            model=model,
            args=args,
            train_dataset=rows,
            peft_config=LoraConfig(
                r=8,
            ),  # the adapter
        )
    with torch.autograd.set_detect_anomaly(True): @train trainer.train()
""",
    "unpacked": """
config = {"temperature": 0.9}
args = @arguments GRPOConfig(**config)
model = @load AutoModel.from_pretrained("Qwen", **{"device_map": {"": 0}})
trainer = @trainer GRPOTrainer(model, args=args, train_dataset=rows, peft_config=None); @train trainer.train()
""",
}


def script(text):
    """Return the script that a marked text is, with the places of its calls."""
    places = {}
    while "@" in text:
        at = text.index("@")
        kind = text[at + 1 :].split()[0]
        text = text[:at] + text[at + len(kind) + 2 :]
        places[kind] = at
    tree = ast.parse(text)
    found = Text("train.py", text)
    made = {}
    for kind, at in places.items():
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and found.span(node)[0] == at]
        call = max(calls, key=lambda node: found.span(node)[1])
        made[kind] = [[Place("train.py", call.lineno, call.end_lineno, call.col_offset, call.end_col_offset)]]
    return repairs.EditableScript(lambda file: found, made)


EDITS = [
    (Statement("{trainer}.x = 1"), ["trainer.x = 1"], []),
    (Statement("{model}.y(1)", before="trainer"), ["model.y(1)"], []),
    (Arguments({"temperature": 1.0}), ["1.0"], []),
    (Keyword("load", "device_map", '{"": PartialState().device}', imports="from a import PartialState"),
     ["PartialState().device", "from a import PartialState"], []),
    (Keyword("trainer", "train_dataset", "{}.map(chat)"), ["train_dataset=rows.map(chat)"], []),
    (Keyword("trainer", "peft_config"), [], ["peft_config"]),
]  # fmt: skip


@pytest.mark.parametrize("kind", SCRIPTS)
@pytest.mark.parametrize(("repair", "there", "gone"), EDITS, ids=lambda value: type(value).__name__)
def test_an_edit_of_a_script(repair, there, gone, kind):
    """The text is Python still, what is not edited stays as it was, line ends too, and the edit is in its place."""
    newline = "\n" if kind == "unpacked" else "\r\n"
    given = script(SCRIPTS[kind].replace("\n", newline))
    change = repair.change(given)
    (text,) = change.files.values()
    tree = ast.parse(text)
    assert all(part in text for part in there) and not any(part in text for part in gone)
    assert ("\r\n" in text) == (newline == "\r\n") and "\n" not in text.replace(newline, "")
    before = ast.dump(ast.parse(given.texts("").text))
    assert ast.dump(tree) != before
    if isinstance(repair, Arguments):
        values = {"GRPOConfig": dict, "config": None}
        (call,) = (
            node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "GRPOConfig"
        )
        config = eval(ast.unparse(call), {"config": {"temperature": 0.9}, "GRPOConfig": values["GRPOConfig"]})
        assert config["temperature"] == 1.0


def test_a_python_without_columns_has_places_by_line():
    """3.10 knows no columns: no call is found at such a place, so that no repair is tried."""
    code = types.SimpleNamespace(co_filename="train.py")
    place = place_of(types.SimpleNamespace(f_code=code, f_lineno=2, f_lasti=0))
    assert (place.file, place.line) == ("train.py", 2)
    assert Text("train.py", "import trl\ntrl.GRPOTrainer()\n").call(place) is None


def test_a_method_of_a_call_of_several_lines_is_found():
    """Its frame begins at the method's name: `GRPOTrainer(` stood lines above `.train()`, and no call was found."""
    text = "def f():\n    return make(\n        1,\n    ).look()\n"
    places = []

    class Made:
        def look(self):
            places.append(place_of(sys._getframe(1)))

    names = {"make": lambda _: Made()}
    exec(compile(text, "train.py", "exec"), names)
    names["f"]()
    call = Text("train.py", text).call(places[0])
    assert ast.unparse(call) == "make(1).look()"


def test_statements_of_several_lines():
    """A function before the training, with the script's name of its trainer, in the indent of its place."""
    given = script("def main():\n    own = f()\n    @train own.train()\n")
    (text,) = Statement("def g():\n    return {{1: {trainer}}}\ng()").change(given).files.values()
    assert text == "def main():\n    own = f()\n    def g():\n        return {1: own}\n    g()\n    own.train()\n"


@pytest.mark.parametrize("first", ['"""What it is."""\n', "from __future__ import annotations\n", ""])
def test_an_import_stands_behind_what_must_be_first(first):
    """In a file that imports nothing else, it stood before `from __future__`, which is an error of syntax."""
    given = script(f"{first}trainer = f()\n@train trainer.train()\n")
    (text,) = Statement("copy.copy({trainer})", imports="import copy").change(given).files.values()
    assert text == f"{first}import copy\ntrainer = f()\ncopy.copy(trainer)\ntrainer.train()\n"
    compile(text, "train.py", "exec")


def test_what_has_no_place_in_the_script_s_files_has_no_repair():
    """A library's own script, a trainer that is made elsewhere: nothing else is run than what a reader can apply."""
    given = script("make(peft_config=1)\n")
    repairs_of = (Statement("{trainer}.x = 1"), Arguments({"temperature": 1.0}), Keyword("trainer", "peft_config"))
    assert [repair.change(given) for repair in repairs_of] == [None] * 3


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("@train make(m, a=1).train()\n", "trainer = make(m, a=1)\ntrainer.x = 1\ntrainer.train()\n"),
        ("trainer = 1\nout = @train make(\n    m,\n).train()\n",
         "trainer = 1\nthe_trainer = make(\n    m,\n)\nthe_trainer.x = 1\nout = the_trainer.train()\n"),
        ("def f():\n    return @train make().train()\n",
         "def f():\n    trainer = make()\n    trainer.x = 1\n    return trainer.train()\n"),
        ("print(log(), @train make().train())\n", None),
    ],
)  # fmt: skip
def test_a_trainer_without_a_name_gets_one(text, wanted):
    """`GRPOTrainer(...).train()`: the patch that was written healed nothing, for a live object was changed."""
    change = Statement("{trainer}.x = 1").change(script(text))
    assert (change and change.files["train.py"]) == wanted


YAML = "model: small\r\ntemperature: 0.9  # hot\r\noutput_dir: out\r\nkwargs:\r\n  a: 1\r\n"


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ({"temperature": 1.0}, YAML.replace("0.9  #", "1.0  #")),
        ({"beta": None, "more": {"a": False}}, YAML + 'beta: null\nmore: {"a": false}\n'),
        ({"kwargs": {}}, None),
    ],
)
def test_arguments_of_a_yaml_file_are_set_there(values, wanted):
    texts = {"/grpo.yaml": YAML, "/accelerate.yaml": "num_machines: 1\n"}
    of = [repairs.EditableScript(lambda file: None, settings={name: text}) for name, text in texts.items()]
    change = Arguments(values).change(of[0])
    assert (change and change.files["/grpo.yaml"]) == wanted and Arguments(values).change(of[1]) is None


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("--output_dir out --temperature 0.9", "--output_dir out --temperature 1.0"),
        ("--output_dir=out --temperature=0.9 x", "--output_dir=out --temperature=1.0 x"),
        ("--output_dir 'a b'", "--output_dir 'a b' --temperature 1.0"),
        ("--verbose", None),
    ],
)
def test_arguments_of_a_command_line_are_set_there(line, wanted):
    """`trl grpo --temperature 0.9`: the script is the library's, and the line is what a reader can change."""
    change = Arguments({"temperature": 1.0}).change(
        repairs.EditableScript(lambda file: None, settings={COMMAND_LINE: line})
    )
    assert (change and change.files[COMMAND_LINE]) == wanted


def test_arguments_of_a_parser_are_set_before_the_trainer_is_made():
    """`parser.parse_args_into_dataclasses()` names no argument; sizes that are checked while they are made stay."""
    given = script("trainer = @trainer GRPOTrainer(m, args=options.training)\n")
    (text,) = Arguments({"temperature": 1.0, "beta": 0.0}).change(given).files.values()
    assert text.startswith("options.training.temperature = 1.0\noptions.training.beta = 0.0\ntrainer =")
    assert Arguments({"num_generations": 4}).change(given) is None


@pytest.mark.parametrize(("other", "wanted"), [("num_generations=cli.n, ", "cli.n"), ("", "4")])
def test_an_argument_that_is_to_equal_another_is_written_as_that_one(other, wanted):
    """So that an option of the script's command line stays an option, and changes both."""
    given = script(f"args = @arguments GRPOConfig({other}per_device_train_batch_size=cli.batch)\n")
    size = "per_device_train_batch_size"
    (text,) = Arguments({size: 4}, {size: "num_generations"}).change(given).files.values()
    assert f"{size}={wanted})" in text


def test_edits_inside_a_function(tmp_path):
    path = tmp_path / "rewards.py"
    path.write_text(
        'import re\n\ndef reward(completions, answer):\n    """Of tags."""\n'
        '    return [re.match("a.b", c) for c in completions]\n'
    )
    module = {}
    exec(compile(path.read_text(), str(path), "exec"), module)
    given = repairs.EditableScript(lambda file: Text(file, pathlib.Path(file).read_text()))
    texts = [
        repair.change(given).files[str(path)].splitlines()
        for repair in (
            FirstLine(module["reward"], "completions = completions[:1]"),
            AnyKeywords(module["reward"]),
        )
    ]
    assert texts[0][4:6] == [
        "    completions = completions[:1]",
        '    return [re.match("a.b", c) for c in completions]',
    ]
    assert texts[1][2] == "def reward(completions, answer, **kwargs):"
    path.write_text("\n\ndef reward(completions, *others): ...\n")
    (text,) = AnyKeywords(module["reward"]).change(given).files.values()
    assert text.strip() == "def reward(completions, *others, **kwargs): ..."


OVERRIDES = """
class Own(Base):
    \"\"\"A trainer of its own.\"\"\"

    @decorated
    def loss(self):
        return -1

    def rewards(self):
        return [0]


class Short(Base):
    def loss(self):
        return 2
"""


def test_a_method_of_its_own_is_taken_out(tmp_path):
    """The parent's runs then: one of several, both, and the only one of a class."""
    path = tmp_path / "train.py"
    path.write_text(OVERRIDES)

    class Base:
        def loss(self):
            return 1

        def rewards(self):
            return [1]

    def run(text):
        module = {"Base": Base, "decorated": lambda function: function, "__name__": "train"}
        exec(compile(text, str(path), "exec"), module)
        return module

    module = run(OVERRIDES)
    given = repairs.EditableScript(lambda file: Text(file, pathlib.Path(file).read_text()))
    one, both = (WithoutMethod(module["Own"], name) for name in ("loss", "rewards"))
    for repair, wanted in ((one, (1, [0], 2)), (Together((one, both)), (1, [1], 2))):
        (text,) = repair.change(given).files.values()
        own, short = run(text)["Own"](), run(text)["Short"]()
        assert (own.loss(), own.rewards(), short.loss()) == wanted and "A trainer of its own" in text
    (text,) = WithoutMethod(module["Short"], "loss").change(given).files.values()
    assert run(text)["Short"]().loss() == 1
    assert Together((one, both)).change(repairs.EditableScript(lambda file: None)) is None


FILES = {
    "LF": b"a = 1\nb = 2\nc = 3\n",
    "CRLF": b"a = 1\r\nb = 2\r\nc = 3\r\n",
    "BOM": b"\xef\xbb\xbfa = 1\nb = 2\n",
    "no line end": b"a = 1\nb = 2",
    "latin": b"# -*- coding: latin-1 -*-\na = '\xe4'\nb = 2\n",
}


@pytest.mark.parametrize("kind", FILES)
def test_a_patch_is_what_git_applies(kind, tmp_path):
    new = {}
    for name in ("train.py", "src/more.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(FILES[kind])
        text = read_source(path)
        new[str(path)] = encode_source(path, text.replace("b = 2", "b = 22"))
    old = {path: pathlib.Path(path).read_bytes() for path in new}
    for context in (1, 3):
        patch = make_patch(old, new, {path: str(pathlib.Path(path).relative_to(tmp_path)) for path in new}, context)
        (tmp_path / "fix.diff").write_bytes(patch)
        subprocess.run(["git", "apply", "fix.diff"], cwd=tmp_path, check=True)
        assert all(pathlib.Path(path).read_bytes() == contents for path, contents in new.items())
        subprocess.run(["git", "apply", "-R", "fix.diff"], cwd=tmp_path, check=True)
        assert all(pathlib.Path(path).read_bytes() == contents for path, contents in old.items())


def test_a_place_is_that_of_the_script_as_it_was_given():
    """An import that an earlier repair brought moves no line; of a notebook the cell is told, and the line in it."""
    text = "import trl\n# cell 1\nx = 1\n# cell 2\n\ntrainer.train()\n"
    edited = "import copy\n" + text.replace("x = 1\n", "x = 2\ny = 3\n")
    at = edited.index("trainer.train")
    assert locate("/a/train.py", edited, at, text) == Location("/a/train.py", 6)
    assert str(locate("/a/train.ipynb", edited, at, text)) == "train.ipynb, cell 2, line 2"


def test_edits_are_of_the_text_before_them():
    text = Text("x", "f(a=1, b=2)\n")
    call = text.tree.body[0].value
    edits = [*text.set_keywords(call, {"a": "10", "c": "3"}), *text.without_keyword(call, call.keywords[1])]
    assert apply_edits({"x": text.text}, edits)["x"].replace(" ", "") == "f(a=10,c=3)\n"


@pytest.fixture
def session(tmp_path):
    """Return a function that opens a session of a script in a Python without torch: its runs end in one line."""
    script = tmp_path / "train.py"
    script.write_text("")
    saved = tmp_path / "session"
    return lambda limit=60, **more: session_of(script, saved, sys._base_executable, {}, limit, **more)


@pytest.mark.parametrize("more", [{}, {"preload": False}, {"processes": 4}])
def test_orders_that_follow_at_once_are_all_run(more, session):
    """The next order is there before the last run is buried; nothing of it may be lost, and no process is left."""
    with session(**more).open() as runs:
        results = [runs.run(Change()) for _ in range(8)]
    assert len({result.error for result in results}) == 1 and results[0].error.startswith("train.py")
    assert not _with_folder(runs.folder)


def test_one_limit_holds_for_all_runs(session):
    with pytest.raises(TimeIsOver, match="after 1 seconds"), session(limit=1).open() as runs:
        for _ in range(50):
            runs.run(Change())
    assert not _with_folder(runs.folder)


# The rounds: a run is an answer, by the repairs that are made in it; each is a file of its own.


def change_of(names):
    return Change(files=dict.fromkeys(sorted(names), ""))


def finding(failure, repairs, **more):
    changes = () if repairs is None else (change_of(repairs),)
    return Finding(failure, f"{failure} is bad", changes=changes, **more)


class Runs:
    """A script with failures, each with what takes it away, and what another one hides."""

    def __init__(self, bad, heals=None, hides=None, error=None, no_edit=(), flaky=(), brings=()):
        self.bad, self.hides, self.no_edit, self.flaky = bad, hides or {}, no_edit, set(flaky)
        self.brings = list(brings)  # what a run with a change finds beside it
        self.ends_with = ""  # the error of a run with a change
        self.heals = heals or {each: {each} for each in bad}
        self.error = error or {}
        self.made = []

    def __call__(self, change):
        made = {*change.files}
        self.made.append(made)
        left = [each for each in self.bad if not self.heals[each] & made]
        there = [each for each in left if not any(each in self.hides.get(other, ()) for other in left)]
        if len(self.made) > 1:
            there = [each for each in there if each not in self.flaky]
        hidden = {each for other in left for each in self.hides.get(other, ())}
        errors = [text for each, text in self.error.items() if each in left]
        found = [finding(each, None if each in self.no_edit else {*made, each}) for each in there]
        held = [
            Finding.held(each, f"{each} is good", "-")
            for each in (*self.bad, "F9")
            if each not in left and each not in hidden
        ]
        error = self.ends_with if made and self.ends_with else errors[0] if errors else ""
        return Answer(findings=[*found, *held, *(self.brings if made else ())], error=error)


def tried(runs):
    outcome = trials.Rounds(runs, runs(Change()))
    outcome.try_all()
    return outcome, {trial.finding.failure: trial.finding.why for trial in outcome.suspected()}


def named(outcome):
    return [trial.finding for trial in outcome.named]


def test_both_findings_of_one_failure_are_told_where_nothing_is_tried():
    """Prompts and answers that are cut are both F11."""
    first = Answer(
        findings=[finding("F11", None, part=part) for part in ("max_prompt_length", "max_completion_length")]
    )
    outcome = trials.Rounds(lambda change: first, first)
    outcome.try_all()
    assert [trial.finding.part for trial in outcome.suspected()] == ["max_prompt_length", "max_completion_length"]


def test_two_failures_of_one_id_in_one_function_are_named_in_turn():
    """The second was told as the first that its repair does not heal, and then dropped for it has the same id."""

    def run(change):
        left = [each for each in ("line breaks", "column") if each not in change.files]
        part = "reward_funcs[0]"
        found = [finding("F14", {*change.files, each}, part=part, fault=each, tried="it gives 1") for each in left]
        return Answer(findings=found)

    outcome = trials.Rounds(run, run(Change()))
    outcome.try_all()
    assert [each.key for each in named(outcome)] == ["F14:reward_funcs[0]:line breaks", "F14:reward_funcs[0]:column"]
    assert {*outcome.change.files} == {"line breaks", "column"} and not outcome.suspected()


OTHER = {"failure": "F14", "part": "reward_funcs[1]"}


@pytest.mark.parametrize(
    ("then", "heals"),
    [
        ([finding(repairs=None, **OTHER)], True),
        ([Finding.held("F14", "it pays", "-", part="reward_funcs[0]")], True),
        ([finding("F14", None, part="reward_funcs[0]", fault="form"), finding(repairs=None, **OTHER)], False),
        ([Finding.not_checked("F14", "w", part="reward_funcs[0]"), finding(repairs=None, **OTHER)], False),
        ([Finding.held(evidence="it pays", control="-", **OTHER)], False),
    ],
    ids=["gone beside another", "held", "another fault", "not checked any more", "another one is held"],
)
def test_a_function_is_healed_by_what_is_said_of_itself(then, heals):
    def run(change):
        bad = finding("F14", ["column"], part="reward_funcs[0]", fault="column")
        return Answer(findings=then if change.files else [bad])

    outcome, _ = tried(run)
    assert [each.key for each in named(outcome)] == ["F14:reward_funcs[0]:column"] * heals


def test_a_failure_beside_a_named_one_of_the_same_function_is_not_dropped():
    of = [{"part": "reward_funcs[0]", "fault": fault} for fault in ("line breaks", "column")]
    answer = Answer("train.py")
    named, other = Finding("F14", "e", verdict=Verdict.NAMED, **of[0]), Finding.suspected("F14", "e", "", **of[1])
    whole = Finding.suspected("F14", "says less of it", "", part="reward_funcs[0]")
    answer.settle([other, Finding.suspected("F14", "e", "again", **of[0]), whole, named])
    assert answer.findings == [named, other]


def test_what_hides_behind_another_is_named_in_turn():
    """F2 ends the run; F3b and F15 show behind it, each is run twice without its repair and once with it."""
    runs = Runs(["F2", "F3b", "F15"], hides={"F2": ["F3b", "F15"]}, error={"F2": "element 0 of tensors"})
    outcome, suspected = tried(runs)
    assert [each.failure for each in named(outcome)] == ["F2", "F3b", "F15"] and not suspected
    assert (named(outcome)[1].evidence, named(outcome)[1].tried) == ("F3b is bad", "F3b is good")
    assert [each.round for each in named(outcome)] == [1, 2, 3] and not outcome.last.error
    assert [each.failure for each in named(outcome) if each.hidden] == ["F3b", "F15"]


def test_two_that_one_repair_heals_are_not_told_apart():
    """Checkpointing off takes F1 and F7 away alike: neither is named; a finer repair tells which is which."""
    _, suspected = tried(Runs(["F1", "F7"], heals={"F1": {"F1", "F7"}, "F7": {"F1", "F7"}}))
    assert "not told apart" in suspected["F1"] and "not told apart" in suspected["F7"]
    outcome, suspected = tried(Runs(["F1", "F7"], heals={"F1": {"F1"}, "F7": {"F1", "F7"}}))
    assert [each.failure for each in named(outcome)] == ["F1"]
    assert suspected == {"F7": "gone with the repair of F1"}


REASONS = {
    "no edit": ({"bad": ["F3a"], "no_edit": ["F3a"]}, trials.NO_EDIT),
    "not again": ({"bad": ["F7"], "flaky": ["F7"]}, trials.NOT_AGAIN),
    "it stays": ({"bad": ["F7"], "heals": {"F7": {"another"}}}, "still there"),
    "it crashes": ({"bad": ["F7"]}, "NameError: x"),
    "another comes": ({"bad": ["F7"], "brings": [finding("F9", None)]}, "brings F9"),
}


@pytest.mark.parametrize("kind", REASONS)
def test_why_a_failure_is_not_named(kind):
    options, reason = REASONS[kind]
    runs = Runs(**options)
    runs.ends_with = "train.py, line 3, ended in NameError: x" * (kind == "it crashes")
    outcome, suspected = tried(runs)
    (why,) = suspected.values()
    assert reason in why and not outcome.named and outcome.change == Change()
    assert bool(outcome.notes) == (kind == "not again")


def test_a_judge_s_own_undo_needs_a_second_run_alone():
    first = Answer(findings=[finding("F14", None, tried="with re.DOTALL it gives 1")])
    made = []
    outcome = trials.Rounds(lambda change: made.append(change) or first, first)
    outcome.try_all()
    assert [each.failure for each in named(outcome)] == ["F14"] and made == [Change()]


def test_a_rival_is_tried_once_and_not_in_each_round():
    """Three failures in one run: twice without a change, each repair alone, and then one on top of the others."""
    runs = Runs(["F2", "F7", "F15"])
    outcome, _ = tried(runs)
    assert [each.failure for each in named(outcome)] == ["F2", "F7", "F15"]
    assert sorted(map(len, runs.made)) == [0, 0, 1, 1, 1, 2, 3]


def test_the_first_of_several_repairs_that_heals_is_taken():
    """Two methods of a trainer are its own: the one that is not to blame is put back first, and does not help."""
    runs = Runs(["F21"])

    def run(change):
        answer = runs(change)
        changes = tuple(change_of([name]) for name in ("F20", "F21", "F22"))
        answer.findings = [dataclasses.replace(each, changes=changes * each.accuses) for each in answer.findings]
        return answer

    outcome = trials.Rounds(run, run(Change()))
    outcome.try_all()
    assert {*outcome.change.files} == {"F21"} and {"F22"} not in runs.made and not outcome.suspected()


def test_four_rounds_are_all():
    names = ["F23", "F2", "F8", "F1", "F7", "F14"]
    hides = {name: names[place + 1 :] for place, name in enumerate(names)}
    outcome, suspected = tried(Runs(names, hides=hides))
    assert [each.failure for each in named(outcome)] == names[:4] and suspected == {"F7": trials.ROUNDS_OVER}


def test_no_second_run_where_nothing_can_be_named():
    for runs in (Runs(["F3a"], no_edit=["F3a"]), Runs([])):
        tried(runs)
        assert len(runs.made) == 1


EVERY_FIELD = Finding(
    "F11",
    "2 of 4 prompts are cut",
    "Set max_prompt_length=9.",
    tried="0 of 4",
    ends=True,
    part="max_prompt_length",
    fault="begin",
    verdict=Verdict.NAMED,
    why="w",
    control="c",
    figures=(Quantity("prompts that are cut", 2, "prompts", 4),),
    place=Location("train.ipynb", 3, 2),
    cut=("use_vllm",),
    changes=(Change({"train.py": "x = 1"}),),
    diff="+x",
    round=2,
    hidden=True,
    own=True,
    mild=True,
)


def test_what_is_mild_stands_last():
    """A suspicion of what is learned comes before what costs memory and is sure."""
    memory = Finding("F3a", "e", "r", verdict=Verdict.NAMED, mild=True)
    answer = Answer("train.py", findings=[memory, Finding.suspected("F19", "e", "w")])
    assert [each.failure for each in answer.accusations] == ["F19", "F3a"] and answer.exit_status == 1


def test_an_answer_is_the_same_behind_a_pipe():
    """Each field of each kind; nothing has to be read out of a sentence. An answer of before has no verdicts."""
    assert not [name for name, value in vars(EVERY_FIELD).items() if not value and name != "undo"]
    others = [
        Finding.suspected("F7", "e", "w", "r"),
        Finding.held("F1", "e", "c"),
        Finding.not_applicable("F2", "w"),
        Finding.not_checked("F21", "w", part="loss", cut=("use_liger_kernel",)),
    ]
    effects = [Effect("writes", "/a")]
    answer = Answer("train.py", {"trl": "1"}, [EVERY_FIELD, *others], "e", "0" * 64, ["c"], ["n"], effects=effects)
    told = json.loads(json.dumps(answer.to_json()))
    assert Answer.from_json(told) == answer
    assert told["findings"][0]["key"] == "F11:max_prompt_length:begin"
    for name in ("findings", "suspected", "held", "not_applicable", "not_checked"):
        told[name] = [{key: each[key] for key in ("failure", "evidence") if key in each} for each in told[name]]
    old = Answer.from_json(told)
    assert [each.verdict for each in old.findings] == [each.verdict for each in answer.findings]
    for broken in ({}, {"findings": [{}]}, {"findings": 1}, {"findings": [{"failure": "F1", "verdict": "?"}]}):
        with pytest.raises((KeyError, TypeError, ValueError)):
            Answer.from_json(broken)


# Statements of one script; what lies in the run's folder, is read, or is an import's does not count.
EFFECTS = {
    "open('{outside}/a.txt', 'w')": ["writes {outside}/a.txt"],
    "os.remove('{outside}/there')": ["removes {outside}/there"],
    "os.rename('{outside}/a.txt', '{outside}/c')": ["writes {outside}/c"],
    "subprocess.run(['true'])": ["starts true"],
    "os.system('false')": ["starts false"],
    "socket.create_connection(('127.0.0.1', 1), 1)": ["connects to 127.0.0.1:1"],
    "shutil.rmtree('{outside}/folder')": ["removes {outside}/folder/file", "removes {outside}/folder"],
    **dict.fromkeys(("shutil.rmtree('{inside}/folder')", "open('{inside}/a.txt', 'w')", "open('{outside}/c')"), ()),
    **dict.fromkeys(("os.makedirs('{outside}/b')", "import http.server", "import library"), ()),
}


def test_what_a_script_does_beside_its_training_is_seen(tmp_path):
    """Files, processes and connections, in the order of the script."""
    outside, inside, script = tmp_path / "outside", tmp_path / "inside", tmp_path / "train.py"
    for place in (outside, inside):
        (place / "folder").mkdir(parents=True)
        (place / "folder" / "file").touch()
    (outside / "there").touch()
    (inside / "library.py").write_text("import subprocess\nsubprocess.run(['true'])\n")
    text = "".join(f"try:\n    {statement}\nexcept OSError:\n    pass\n" for statement in EFFECTS)
    script.write_text("import os, shutil, subprocess, socket\n" + text.format(outside=outside, inside=inside))
    code = f"""
import pathlib, sys
from failurelab.preflight.stage import effects, own_code
sys.path.insert(0, {str(inside)!r})
own = own_code.OwnCode({str(script)!r})
effects.Effects(pathlib.Path({str(inside / "told")!r}), own, [{str(inside)!r}]).listen()
exec(compile(open({str(script)!r}).read(), {str(script)!r}, "exec"))
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    told = map(json.loads, (inside / "told").read_text().splitlines())
    expected = [effect.format(outside=outside) for effects in EFFECTS.values() for effect in effects]
    assert [f"{each['kind']} {each['what']}" for each in told] == expected


def test_what_a_repair_has_healed_is_told_by_the_same_part():
    """Another judge may hold the failure of the whole script: its words say nothing of the repair."""
    held = [Finding.held("F13", "whole", "-"), Finding.held("F13", "own", "-", part="rollout_func")]
    finding = Finding("F13", "e", part="rollout_func")
    assert trials._held(finding, Answer(findings=held)) == "own"
    assert trials._held(finding, Answer(findings=held[:1])) == "whole"
