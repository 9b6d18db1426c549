"""The table of what reward functions pay: a user's own call, what it shows at a glance, and its way over a pipe."""

import functools
import json
import re

from failurelab_preflight.reward_table import quote
from failurelab_preflight.rewards import RewardTable, ask

PROMPT = "What is 3 + 4? Think first: <think> why </think> <answer> it </answer>"


def right(completions, answer, **_):
    found = [re.search(r"<answer>(.*?)</answer>", text, re.DOTALL) for text in completions]
    return [float(bool(match) and match[1].strip() == wanted) for match, wanted in zip(found, answer)]


def loud(completions, **_):
    return [100.0 * ("<think>" in text) for text in completions]


def odd(completions, **_):
    return [None if not text else float("nan") if "cat" in text else 1.0 / len(text) for text in completions]


def picky(completions, **_):
    if any(not text for text in completions):
        raise ValueError("no text")
    return [float(len(text)) for text in completions]


def flags(table, about):
    parts = [key.partition(" ")[0] for key in table.functions if about and key.endswith(about)]
    return [(flag.verdict, flag.failure) for flag in table.flags if flag.part in (parts or [""])]


def test_a_quoted_text_has_its_backslashes_once():
    assert quote("\\boxed{7}\n") == "'\\boxed{7}\\n'"


def test_a_table_shows_right_wrong_and_nothing_at_a_glance():
    table = ask([right, loud], prompt=PROMPT, answer="7", columns={"level": 3})
    assert table.functions == ["reward_funcs[0] right", "reward_funcs[1] loud"]
    worths = {line.worth: line.rewards[0] for line in table.lines if line.form == "prompt's form"}
    assert worths == {"right": 1.0, "wrong": 0.0}
    assert {"empty", "cut in the middle", "LaTeX", "unit", "box", "prompt's form + newline"} <= {
        line.form for line in table.lines
    }
    picture = table.picture(100)
    assert len(picture) < 20 and max(map(len, picture)) <= 120 and "right" in picture[0] and "loud" in picture[0]
    assert flags(table, "right") == [] and ("HELD", "F14") in flags(table, "")
    assert repr(table).startswith("\n".join(picture)) and "HELD F14" in repr(table)


def test_what_is_no_number_is_shown_where_it_was_paid_and_crosses_a_pipe():
    table = ask([odd, picky], prompt="Tell me.")
    paid = {line.form: line.rewards for line in table.lines}
    assert paid["empty"] == [None, "raises"]
    assert ("FOUND", "F14") in flags(table, "picky")
    told = json.loads(json.dumps(table.to_json()))
    again = RewardTable.from_json(told)
    assert again.functions == table.functions and not again.flags  # which cross as findings
    assert {line.form: line.rewards for line in again.lines}["long"][0] == "nan"
    assert json.loads(json.dumps(again.to_json())) == told


def test_nothing_is_paid_with_a_sign():
    """A penalty of no letters is -0.0 in Python."""
    table = ask(lambda completions, **_: [-0.1 * len(each) for each in completions], prompt="Tell me.")
    (line,) = [line for line in table.picture(100) if "empty" in line]
    assert line.endswith(" 0")


def test_a_column_is_read_by_its_name_and_a_conversation_as_messages():
    def reads_text(completions, truth, **_):
        return [float(re.findall(r"\d+", text)[-1:] == [each]) for text, each in zip(completions, truth)]

    def reads_messages(completions, truth, **_):
        return reads_text([completion[-1]["content"] for completion in completions], truth)

    prompt = [{"role": "user", "content": "3+4?"}]
    table = ask([reads_text, reads_messages], prompt=prompt, columns={"truth": "7"})
    assert flags(table, "reads_text") == [("FOUND", "F14")] and flags(table, "reads_messages") == []
    table = ask(reads_messages, prompt=prompt, columns={"truth": "7"})
    assert ("HELD", "F14") in flags(table, "") and not [flag for flag in table.flags if flag.verdict == "FOUND"]


def test_a_wrapped_partial_asks_for_no_column_that_it_has_bound():
    def weighted(completions, answer, exact, near, **_):
        return [exact if text == wanted else near * (wanted in text) for text, wanted in zip(completions, answer)]

    bound = functools.update_wrapper(functools.partial(weighted, exact=1.0, near=0.25), weighted)
    assert flags(ask(bound, answer="7"), "weighted") == []
