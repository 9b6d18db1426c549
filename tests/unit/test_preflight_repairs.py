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

from failurelab import failures
from failurelab.failures import figures
from failurelab_preflight import patch, repairs, trials
from failurelab_preflight.answer import COMMAND_LINE, Answer, Differences, Effect
from failurelab_preflight.finding import RELEASE, SCRIPT, Change, Finding, Location, Quantity, Verdict
from failurelab_preflight.repairs import Arguments, Keyword, Statement
from failurelab_preflight.reward_table import Line, RewardTable
from failurelab_preflight.script_text import (
    Place,
    Text,
    apply_edits,
    encode_source,
    locate,
    make_patch,
    place_of,
    read_source,
)
from failurelab_preflight.session import TimeIsOver, _with_folder

# A script as people write it; `@kind` marks the call that a repair speaks of.
SCRIPTS = {
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


def changed(repair, given):
    """Return the text with a repair's edits; None where it has no place."""
    edits = repair.edit(given)
    return apply_edits({edits[0].file: given.texts(edits[0].file).text}, edits)[edits[0].file] if edits else None


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
    text = changed(repair, given)
    tree = ast.parse(text)
    assert all(part in text for part in there) and not any(part in text for part in gone)
    assert ("\r\n" in text) == (newline == "\r\n") and "\n" not in text.replace(newline, "")
    before = ast.dump(ast.parse(given.texts("").text))
    assert ast.dump(tree) != before
    if isinstance(repair, Arguments):
        calls = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Call)]
        (call,) = (call for call in calls if call.startswith("GRPOConfig("))
        assert eval(call, {"config": {"temperature": 0.9}, "GRPOConfig": dict})["temperature"] == 1.0


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


MAIN, TRAIN = "def main():\n    own = f()\n", "trainer = f()\n@train trainer.train()\n"
OF_PARSER = (
    "trainer = @trainer GRPOTrainer(m, args=options.training)\n"  # parse_args_into_dataclasses names no argument
)
PLACES = [  # a script, a repair, and the script with it: None where it has no place in the script's own files
    (MAIN + "    @train own.train()\n", Statement("def g():\n    return {{1: {trainer}}}\ng()"),
     MAIN + "    def g():\n        return {1: own}\n    g()\n    own.train()\n"),
    # In a file that imports nothing else, an import stood before `from __future__`, which is an error of syntax.
    *((first + TRAIN, Statement("copy.copy({trainer})", imports="import copy"),
       f"{first}import copy\ntrainer = f()\ncopy.copy(trainer)\ntrainer.train()\n")
      for first in ('"""What it is."""\n', "from __future__ import annotations\n", "")),
    (OF_PARSER, Arguments({"temperature": 1.0, "beta": 0.0}),
     f"options.training.temperature = 1.0\noptions.training.beta = 0.0\n{OF_PARSER.replace('@trainer ', '')}"),
    (OF_PARSER, Arguments({"num_generations": 4}), None),  # sizes that are checked while they are made stay
    *(("make(peft_config=1)\n", repair, None)
      for repair in (Statement("{trainer}.x = 1"), Arguments({"temperature": 1.0}), Keyword("trainer", "peft_config"))),
]  # fmt: skip


@pytest.mark.parametrize(("text", "repair", "wanted"), PLACES)
def test_a_repair_stands_in_its_place(text, repair, wanted):
    assert changed(repair, script(text)) == wanted


FILES = {
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
    return lambda limit=300, **more: session_of(script, saved, sys._base_executable, {}, limit, **more)


@pytest.mark.parametrize("more", [{}, {"processes": 4}])
def test_orders_that_follow_at_once_are_all_run(more, session):
    """The next order is there before the last run is buried; nothing of it may be lost, and no process is left."""
    with session(**more).open() as runs:
        results = [runs.run(Change()) for _ in range(4)]
    assert len({result.error for result in results}) == 1 and "train.py" in results[0].error
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

    def __init__(self, bad, heals=None, hides=None, error=None, no_edit=(), flaky=(), brings=(), ends_with=""):
        self.bad, self.hides, self.no_edit, self.flaky = bad, hides or {}, no_edit, set(flaky)
        self.brings = list(brings)  # what a run with a change finds beside it
        self.ends_with = ends_with  # the error of a run with a change
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
        ([Finding.held("F14", "-", "-"), Finding.held("F14", "it pays", "-", part="reward_funcs[0]")], True),
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
    assert {each.tried for each in named(outcome)} <= {"it pays", "it is no longer said of reward_funcs[0]"}


def test_a_failure_beside_a_named_one_of_the_same_function_is_not_dropped():
    of = [{"part": "reward_funcs[0]", "fault": fault} for fault in ("line breaks", "column")]
    answer = Answer("train.py")
    named, other = Finding("F14", "e", verdict=Verdict.NAMED, **of[0]), Finding.suspected("F14", "e", "", **of[1])
    whole = Finding.suspected("F14", "says less of it", "", part="reward_funcs[0]")
    answer.settle([other, Finding.suspected("F14", "e", "again", **of[0]), whole, named])
    assert answer.findings == [named, other]


CHAIN = ["F23", "F2", "F8", "F1", "F7", "F14"]
ROUNDS = {  # a script, what is named in turn, why others are not, and how many repairs are in each run
    "one ends the run and hides two": (
        {"bad": ["F2", "F3b", "F15"], "hides": {"F2": ["F3b", "F15"]}, "error": {"F2": "element 0 of tensors"}},
        "F2 F3b F15", {}, [0, 0, 1, 1, 2, 2, 3],
    ),
    "three in one run": ({"bad": ["F2", "F7", "F15"]}, "F2 F7 F15", {}, [0, 0, 1, 2, 3]),
    "four rounds are all": (
        {"bad": CHAIN, "hides": {name: CHAIN[place + 1 :] for place, name in enumerate(CHAIN)}},
        "F23 F2 F8 F1", {"F7": trials.ROUNDS_OVER}, [0, 0, 1, 1, 2, 2, 3, 3, 4],
    ),
    "one edit heals both": (
        {"bad": ["F1", "F7"], "heals": {"F1": {"F1"}, "F7": {"F1", "F7"}}},
        "F1", {"F7": "gone with the repair of F1"}, [0, 0, 1],
    ),
    "no edit": ({"bad": ["F3a"], "no_edit": ["F3a"]}, "", {"F3a": trials.NO_EDIT}, [0]),
    "nothing": ({"bad": []}, "", {}, [0]),
    "not again": ({"bad": ["F7"], "flaky": ["F7"]}, "", {"F7": trials.NOT_AGAIN}, [0, 0]),
    "it stays": ({"bad": ["F7"], "heals": {"F7": {"another"}}}, "", {"F7": "still there"}, [0, 0, 1]),
    "it crashes": ({"bad": ["F7"], "ends_with": "NameError: x"}, "", {"F7": "NameError: x"}, [0, 0, 1]),
    "another comes": ({"bad": ["F7"], "brings": [finding("F9", None)]}, "", {"F7": "brings F9"}, [0, 0, 1]),
}  # fmt: skip


@pytest.mark.parametrize("kind", ROUNDS)
def test_the_rounds_of_repairs(kind):
    """The worst first, each behind those that healed; what was hidden has to come twice too."""
    options, names, reasons, sizes = ROUNDS[kind]
    runs = Runs(**options)
    outcome, suspected = tried(runs)
    assert [each.failure for each in named(outcome)] == names.split() and list(map(len, runs.made)) == sizes
    assert [each.round for each in named(outcome)] == [1, 2, 3, 4][: len(names.split())]
    assert all(each.tried == f"{each.failure} is good" for each in named(outcome))
    assert suspected.keys() == reasons.keys() and all(reasons[each] in why for each, why in suspected.items())
    assert {*outcome.change.files} == {*names.split()} and bool(outcome.notes) == (kind == "not again")


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


OWN = "hf_secret"  # in whatever may quote the script
EVERY_FIELD = Finding(
    "F11", OWN, OWN, tried=OWN, ends=True, part="max_prompt_length", fault="begin", verdict=Verdict.NAMED, why=OWN,
    control=OWN, figures=(Quantity("prompts that are cut", 2, "prompts", 4),), place=Location(f"/{OWN}/t.ipynb", 3, 2),
    changes=(Change({"train.py": "x = 1"}),), diff=OWN, round=2, origin=SCRIPT, mild=True,
)  # fmt: skip


def test_what_is_mild_stands_last():
    """A suspicion of what is learned comes before what costs memory and is sure."""
    memory = Finding("F3a", "e", "r", verdict=Verdict.NAMED, mild=True)
    answer = Answer("train.py", findings=[memory, Finding.suspected("F19", "e", "w")])
    assert [each.failure for each in answer.accusations] == ["F19", "F3a"] and answer.exit_status == 1


@pytest.mark.parametrize(
    ("more", "verdict", "status"),
    [
        ({"origin": RELEASE, "mild": True}, Verdict.NOTED, 0),
        ({"origin": SCRIPT, "mild": True}, Verdict.SUSPECTED, 1),
        ({"origin": RELEASE}, Verdict.SUSPECTED, 1),  # what it costs is not known
        ({"origin": RELEASE, "mild": True, "ends": True}, Verdict.SUSPECTED, 1),  # it blocks
    ],
)
def test_what_a_release_does_to_everybody_and_only_slows_is_noted(more, verdict, status):
    """F15 of trl before 0.16 was NAMED on healthy scripts, with status 1; no repair of it is tried."""
    answer = Answer("train.py")
    given = Finding.suspected("F15", "e", "w", **more)
    answer.settle([given, Finding.held("F15", "of another step", "c")])
    assert [each.verdict for each in answer.findings] == [verdict] and answer.exit_status == status
    assert not trials.Rounds(lambda change: Answer(), answer).suspected() or verdict is not Verdict.NOTED
    told = answer.to_json()
    assert told["failures"]["F15"]["verdict"] == verdict.value and Answer.from_json(told) == answer


def test_an_answer_is_the_same_behind_a_pipe_and_quotes_the_script_where_it_is_asked_to_alone():
    """Each field of each kind; nothing has to be read out of a sentence. An answer of before has no verdicts."""
    assert not [name for name, value in vars(EVERY_FIELD).items() if not value and name != "undo"]
    others = [
        Finding.suspected("F7", OWN, OWN, OWN),
        Finding.held("F1", OWN, OWN),
        Finding.not_applicable("F2", OWN),
        Finding.not_checked("F21", OWN, part="loss"),
    ]
    versions, effects = {"trl": f"1.0+{OWN}", OWN: "2"}, [Effect("writes", OWN)]
    answer = Answer(OWN, versions, [EVERY_FIELD, *others], OWN, "0" * 64, [OWN], [OWN], effects=effects)
    answer.rewards = RewardTable(["reward_funcs[0] f"], [Line("right", "alone", OWN, [1.0])])
    told = json.loads(json.dumps(answer.to_json()))
    assert Answer.from_json(told) == answer
    for name in ("findings", "suspected", "held", "not_applicable", "not_checked"):
        told[name] = [{key: each[key] for key in ("failure", "evidence") if key in each} for each in told[name]]
    old = Answer.from_json(told)
    assert [each.verdict for each in old.findings] == [each.verdict for each in answer.findings]
    for broken in ({}, {"findings": [{}]}, {"findings": 1}, {"findings": [{"failure": "F1", "verdict": "?"}]}):
        with pytest.raises((KeyError, TypeError, ValueError)):
            Answer.from_json(broken)
    answer.compared, answer.patch_folder = Differences(OWN, error=OWN), OWN
    public = answer.to_json(texts=False)
    assert OWN not in json.dumps(public) and public["findings"][0]["place"]["line"] == 3
    assert public["error"] and Answer.from_json(public).error


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
from failurelab_preflight.stage import effects, own_code
sys.path.insert(0, {str(inside)!r})
own = own_code.OwnCode({str(script)!r})
effects.Effects(pathlib.Path({str(inside / "told")!r}), own, [{str(inside)!r}]).listen()
exec(compile(open({str(script)!r}).read(), {str(script)!r}, "exec"))
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    told = map(json.loads, (inside / "told").read_text().splitlines())
    expected = [effect.format(outside=outside) for effects in EFFECTS.values() for effect in effects]
    assert [f"{each['kind']} {each['what']}" for each in told] == expected


# A patch of the user's, applied in memory; and one measurement beside another.

DIFF = """\
--- a/train.py
+++ b/train.py
@@ -2,3 +2,4 @@
 b = 2

-c = 3
+c = 4
+d = 5
"""
TEXT = "a = 1\nb = 2\n\nc = 3\n"


def patched(diff, text=TEXT, folder=None, editable=lambda path: True, line="--beta 0.1"):
    folder = folder or pathlib.Path("/nowhere")
    return patch.apply_patch(diff, lambda path: text, [folder], line, editable).files


WITH_IT = "a = 1\nb = 2\n\nc = 4\nd = 5\n"


@pytest.mark.parametrize(
    ("diff", "text", "wanted"),
    [
        (DIFF, TEXT, WITH_IT),
        ("diff --git a/train.py b/train.py\n" + DIFF.replace("-2,3 +2,4", "-90,7 +1,9"), TEXT, WITH_IT),  # wrong lines
        (DIFF, TEXT.replace("\n", "\r\n"), WITH_IT.replace("\n", "\r\n")),
        (DIFF.replace("\n", "\r\n"), TEXT.rstrip("\n"), WITH_IT),
        ("--- train.py\n+++ other.py\n@@ -4,0 +5 @@\n+e = 1\n", TEXT, TEXT + "e = 1\n"),
        ("--- train.py\n+++ train.py\n@@ -1 +1 @@\n--- a\n+-- b\n", "-- a\n", "-- b\n"),
    ],
)
def test_a_patch_is_applied_in_memory(diff, text, wanted, tmp_path):
    """With the file's own line ends, where its lines stand; the file stays as it is."""
    (tmp_path / "train.py").write_text("as it is")
    assert patched(diff, text, tmp_path) == {str(tmp_path / "train.py"): wanted}
    assert (tmp_path / "train.py").read_text() == "as it is"


def test_a_patch_of_the_command_line_changes_options():
    diff = "--- command line\n+++ command line\n@@ -1 +1 @@\n---beta 0.1\n+--beta 0.2\n"
    assert patched(diff) == {COMMAND_LINE: "--beta 0.2"}


@pytest.mark.parametrize(
    ("diff", "text", "more", "said"),
    [
        (DIFF, "x = 1\n", {}, "'b = 2' is not where it has it"),
        (DIFF.replace("-2,3", "-90,3"), TEXT + TEXT, {}, "stand there 2 times"),
        (DIFF.replace("+c = 4", "+c = 3").replace("+d = 5\n", ""), TEXT, {}, "is the same with it"),
        ("Set beta to 0.\n", TEXT, {}, "no unified diff"),
        (DIFF.replace("--- a/train.py", "--- /dev/null"), TEXT, {}, "makes or removes b/train.py"),
        (DIFF.replace("train.py", "gone.py"), TEXT, {}, "gone.py is not there"),
        (DIFF, TEXT, {"editable": lambda path: False}, "cannot be edited for a run"),
    ],
)
def test_a_patch_that_does_not_apply_says_why(diff, text, more, said, tmp_path):
    (tmp_path / "train.py").touch()
    with pytest.raises(patch.PatchError) as raised:
        patched(diff, text, tmp_path, **more)
    assert said in str(raised.value) and "\n" not in str(raised.value)


def measured(*findings, error="", **values):
    return Answer(findings=list(findings), error=error, measured=values)


BAD, GOOD = Finding("F15", "e"), Finding.held("F15", "t", "c")
F9, F9_HELD, RATE = Finding("F9", "e"), Finding.held("F9", "e", "c"), Finding.suspected("rate", "e", "w")


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        (measured(BAD), measured(GOOD), {"healed": ["F15"]}),
        (measured(F9_HELD), measured(Finding.noted("F9", "e")), {}),
        (measured(BAD), measured(Finding.not_checked("F15", "w")), {"unclear": ["F15"]}),
        (measured(BAD, F9_HELD), measured(GOOD, F9), {"unclear": ["F15"], "came": ["F9"]}),
        (measured(BAD), measured(GOOD, RATE), {"unclear": ["F15"], "came": ["rate"]}),
        (measured(BAD), measured(GOOD, F9), {"healed": ["F15"], "shown": ["F9"]}),
        (measured(BAD, error="x"), measured(GOOD, RATE), {"healed": ["F15"], "shown": ["rate"]}),
        (measured(BAD, F9), measured(GOOD, F9), {"healed": ["F15"], "stayed": ["F9"]}),
        (measured(BAD), measured(error="y"), {"error": "y"}),
        (measured(BAD, error="x"), measured(GOOD, error="further on"), {"healed": ["F15"]}),
        (measured(dataclasses.replace(BAD, verdict=Verdict.NAMED)), measured(GOOD), {"healed": ["F15"]}),  # as saved
    ],
)
def test_an_edit_heals_what_is_held_after_it_where_nothing_came(before, after, told):
    """Unknown is not healed, and neither is what another failure took the place of."""
    compared = trials.compare(before, after)
    assert {name: value for name, value in vars(compared).items() if value and name != "figures"} == told


def test_figures_that_an_edit_changes():
    """By part and name; one that a second run without the edit changes too tells nothing."""

    def step(cosine):
        return Finding.held("F21", "e", "c", figures=(Quantity("step_cosine", cosine, "cosine"),))

    before, after = measured(step(-1.0), beta=0.0, loss_last=1.0), measured(step(1.0), beta=0.0, loss_last=2.0)
    again = measured(step(-1.0), beta=0.0, loss_last=1.5)
    told = [tuple(vars(each).values()) for each in trials.compare(before, after).figures]
    assert told == [("", "loss_last", 1.0, 2.0, "loss"), ("", "step_cosine", -1.0, 1.0, "cosine")]
    assert [each.name for each in trials.compare(before, after, again).figures] == ["step_cosine"]


def test_json_has_a_row_for_each_failure_and_a_key_for_each_figure():
    answer = Answer("/home/me/train.py", {"trl": "1"}, [BAD, F9_HELD], "at /home/me", measured={"beta": 0.5})
    told = json.loads(json.dumps(answer.to_json(texts=False)))
    assert set(told["failures"]) == {failure.id for failure in failures.all()}
    assert set(told["figures"]) == set(figures.table()) and told["figures"]["beta"] == 0.5
    verdicts = {name: row["verdict"] for name, row in told["failures"].items() if row["looked_at"]}
    assert verdicts == {"F15": "FOUND", "F9": "HELD"} and told["failures"]["F4"]["verdict"] == "NOT CHECKED"
    assert (told["schema"], told["seed"]) == (2, 0) and told["failurelab"]
