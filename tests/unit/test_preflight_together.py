"""What several ranks of a run say together; that they do is measured in tests/cli/test_preflight_ranks.py."""

import pytest

from failurelab.preflight.session import together

KINDS = ("findings", "suspected", "held", "not_applicable", "not_checked")
LOST = "train.py, line {}, ended in RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer"


def result(error="", ended=0, hangs="", cut=(), effects=(), **answers):
    answers = {kind: [{"failure": failure} for failure in answers.get(kind, ())] for kind in KINDS}
    return answers | {"error": error, "ended": ended, "hangs": hangs, "cut": [*cut], "effects": [*effects], "notes": []}


def test_rank_0_answers_and_the_last_rank_tells_of_its_own_device():
    """On rank 0 every map that names GPU 0 is right; what both cut or did is told once."""
    first = result(held=["F1", "F5"], cut=["device 0 -> cpu"], effects=[{"kind": "writes", "what": "a"}])
    last = result(findings=["F5"], held=["F22"], cut=["device 1 -> cpu", "device 0 -> cpu"], effects=first["effects"])
    whole = together([first, last], ["FSDP"])
    assert [whole[kind] for kind in KINDS] == [[{"failure": "F5"}], [], [{"failure": "F1"}], [], []]
    assert whole["cut"] == ["FSDP", "device 0 -> cpu", "device 1 -> cpu"] and len(whole["effects"]) == 1
    assert together([first]) == first | {"cut": ["device 0 -> cpu"]}


OWN = "train.py, line 7, ended in KeyError: 'rank'"
ERRORS = {
    "none": ([result(), result()], ""),
    "of both": ([result(OWN, 2), result(OWN, 1)], OWN),
    "of one, and the other lost it": ([result(LOST.format(9), 1), result(OWN, 2)], f"rank 1 of 2: {OWN}"),
    "of rank 0 alone": ([result(OWN, 1), result(hangs="rank 1 was training")], f"rank 0 of 2: {OWN}"),
    "of each, one first": ([result("b", 2), result("a", 1)], "rank 1 of 2: a"),
    "one died, the other lost it": ([result(LOST.format(9), 1), result("gloo died")], "rank 1 of 2: gloo died"),
    "different calls": (
        [result(LOST.format(7), 2), result(LOST.format(9), 1)],
        "the ranks do not come to the same calls, and would wait for ever: rank 0 waited for the others in train.py, "
        "line 7; rank 1 waited for the others in train.py, line 9",
    ),
    "one hangs": (
        [result(LOST.format(7), 2), result(hangs="rank 1 was training (line 3)")],
        "the ranks do not come to the same calls, and would wait for ever: rank 0 waited for the others in train.py, "
        "line 7; rank 1 was training (line 3)",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_the_error_is_that_of_the_rank_which_had_it(name):
    """The others lose their connection by it; where all have lost it, nobody has an error of his own."""
    results, error = ERRORS[name]
    assert together(results)["error"] == error
