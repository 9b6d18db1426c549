"""Predicates: what they hold of, what they say, and what is refused before it can mislead."""

import math
import operator

import pytest

from failurelab.failures import predicates

FIGURES = {
    "tensors_without_gradient": 24,
    "tensors_trainable": 25,
    "accuracy_before": 0.44,
    "accuracy_after": 0.53,
    "error": "RuntimeError: element 0 of tensors does not require grad",
    "checkpointing": True,
    "reward_last": None,
    "loss": float("nan"),
}
HOLD = """
tensors_without_gradient == 24; tensors_without_gradient >= 2.4e1; accuracy_after > accuracy_before;
checkpointing == true; error ~ 'element 0'; error != ''
"""
DO_NOT = """
tensors_without_gradient != 24; accuracy_after <= accuracy_before; checkpointing == false; error ~ "^element";
error == ''
"""
NO_PREDICATES = """
tensors >; tensors => 0; a > 0 and b > 0; __import__('os').system('true') > 0; a > 1e; a > 'open; a ~ unquoted;
a ~ '('; 0 < a < 1; a.b > 1;
"""


def each(texts):
    return [text.strip() for text in texts.split(";")]


@pytest.mark.parametrize(("texts", "expected"), [(HOLD, True), (DO_NOT, False)])
def test_what_holds(texts, expected):
    for text in each(texts):
        assert predicates.parse(text).holds(FIGURES) is expected, text


def test_numbers_compare_as_in_python():
    comparisons = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
    numbers = (-1e300, -2.5, -0.0, 0.0, 1e-300, 3.0, math.nextafter(3.0, 4.0))
    for op, compare in comparisons.items():
        for left in numbers:
            for right in numbers:
                assert predicates.parse(f"figure {op} {right!r}").holds({"figure": left}) is compare(left, right)


@pytest.mark.parametrize("op", ["<", "<=", ">", ">=", "==", "!="])
@pytest.mark.parametrize("figure", ["reward_last", "loss"])
def test_nothing_holds_of_what_could_not_be_measured(figure, op):
    """A run that crashed has no reward: neither 'healthy' nor 'broken as declared' may follow from that."""
    predicate = predicates.parse(f"{figure} {op} 0.1")
    assert predicate.holds(FIGURES) is None
    assert predicates.failing([predicate], FIGURES) == [predicate]


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        *((lambda text=text: predicates.parse(text), "predicate|regular expression") for text in each(NO_PREDICATES)),
        # A figure that is absent is an error and says what there is; `error > 0` would be a TypeError deep in a run.
        (lambda: predicates.parse("tensors_witout > 0").holds(FIGURES), "'tensors_witout'.*tensors_without_gradient"),
        (lambda: predicates.parse("accuracy_after >= best").holds(FIGURES), "best"),
        (lambda: predicates.parse("error > 0").holds(FIGURES), "cannot be compared"),
        (lambda: predicates.parse("tensors_trainable ~ '25'").holds(FIGURES), "in a text"),
        (lambda: predicates.fill("{nothing}", FIGURES), "'nothing', which was not measured"),
        (lambda: predicates.fill("{error:.2f}", FIGURES), "cannot be written"),
        # Tables have known keys.
        (lambda: predicates.parse({"holds": "x"}), "check"),
        (lambda: predicates.parse({"check": "a > 0", "fail": "x"}), "'fail'"),
        (lambda: predicates.parse({"check": "a > 0", "holds": 3}), "text"),
    ],
)
def test_what_is_refused(ask, said):
    with pytest.raises(predicates.PredicateError, match=said):
        ask()


def test_it_says_in_words_how_it_stands():
    holds = "all {tensors_trainable} have one"
    fails = "{tensors_without_gradient} of {tensors_trainable} have none, {accuracy_after:.1f}"
    predicate = predicates.parse({"check": "tensors_without_gradient == 0", "holds": holds, "fails": fails})
    assert predicate.describe(FIGURES) == "24 of 25 have none, 0.5"
    assert predicate.describe(FIGURES | {"tensors_without_gradient": 0}) == "all 25 have one"
    plain = predicates.parse("accuracy_after < accuracy_before")
    text = "accuracy_after is 0.53, accuracy_before is 0.44 (not accuracy_after < accuracy_before)"
    assert plain.describe(FIGURES) == text
    assert predicates.fields("{a} and {b:.2f}") == ("a", "b")
    assert predicates.fill("{reward_last:.2f}", FIGURES) == "not measured"
