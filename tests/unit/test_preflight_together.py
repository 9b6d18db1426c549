"""What several ranks of a run say together; that they do is measured in tests/cli/test_preflight_ranks.py."""

import pytest

from failurelab_preflight.answer import Answer, Effect
from failurelab_preflight.finding import Finding, Verdict
from failurelab_preflight.session import RankResult, together

LOST = "train.py, line {}, ended in RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer"


def result(error="", ended=0, hangs="", cut=(), effects=(), found=(), held=()):
    findings = [Finding(failure) for failure in found] + [Finding.held(failure, "", "-") for failure in held]
    return RankResult(Answer("", {}, findings, error, cut=[*cut], effects=[*effects]), ended, hangs)


def test_rank_0_answers_and_the_last_rank_tells_of_its_own_device():
    """On rank 0 every map that names GPU 0 is right; what both cut or did is told once."""
    saves = [Effect("writes", "a")]
    first = result(held=["F1", "F5"], cut=["device 0 -> cpu"], effects=saves)
    last = result(found=["F5"], held=["F22"], cut=["device 1 -> cpu", "device 0 -> cpu"], effects=saves)
    whole = together([first, last], ["FSDP"])
    assert [(finding.failure, finding.verdict) for finding in whole.findings] == [
        ("F1", Verdict.HELD),
        ("F5", Verdict.FOUND),
    ]
    assert whole.cut == ["FSDP", "device 0 -> cpu", "device 1 -> cpu"] and whole.effects == saves
    assert together([first]) == first.answer


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [
        (result(held=["F14"]), result(held=["F14"]), [Verdict.HELD]),
        (result(held=["F14"]), result(found=["F14"]), [Verdict.HELD, Verdict.FOUND]),  # the answer keeps the worse
        (result(held=["F14"]), result(), [Verdict.HELD, Verdict.NOT_CHECKED]),
        (result(found=["F14"]), result(found=["F14"]), [Verdict.FOUND]),
    ],
)
def test_what_one_rank_holds_another_has_to_hold_too(first, second, told):
    """A reward may hang on the number of its process."""
    whole = together([first, second])
    assert [finding.verdict for finding in whole.findings] == told
    assert all("rank 1" in finding.evidence + finding.why for finding in whole.findings[1:])


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
    assert together(results).error == error
