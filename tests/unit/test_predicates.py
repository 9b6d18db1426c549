"""Predicates: what they hold of, what they say, and what is refused before it can mislead."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tensors_without_gradient > 0", True),
        ("tensors_without_gradient == 24", True),
        ("tensors_without_gradient != 24", False),
        ("tensors_without_gradient >= 2.4e1", True),
        ("accuracy_after > accuracy_before", True),
        ("accuracy_after <= accuracy_before", False),
        ("checkpointing == true", True),
        ("checkpointing == false", False),
        ("error ~ 'element 0'", True),
        ('error ~ "^element"', False),
        ("error == ''", False),
        ("error != ''", True),
    ],
)
def test_what_holds(text, expected):
    assert predicates.parse(text).holds(FIGURES) is expected


@settings(deadline=None, derandomize=True)
@given(left=st.floats(allow_nan=False), right=st.floats(allow_nan=False), op=st.sampled_from(("<", "<=", ">", ">=")))
def test_numbers_compare_as_in_python(left, right, op):
    comparisons = {"<": left < right, "<=": left <= right, ">": left > right, ">=": left >= right}
    if right in (float("inf"), float("-inf")):
        return
    assert predicates.parse(f"figure {op} {right!r}").holds({"figure": left}) is comparisons[op]


@pytest.mark.parametrize("op", ["<", "<=", ">", ">=", "==", "!="])
@pytest.mark.parametrize("figure", ["reward_last", "loss"])
def test_nothing_holds_of_what_could_not_be_measured(figure, op):
    """A run that crashed has no reward: neither 'healthy' nor 'broken as declared' may follow from that."""
    predicate = predicates.parse(f"{figure} {op} 0.1")
    assert predicate.holds(FIGURES) is None
    assert predicates.failing([predicate], FIGURES) == [predicate]


def test_an_absent_figure_is_an_error_and_says_what_there_is():
    with pytest.raises(predicates.PredicateError, match=r"'tensors_witout_gradient'.*tensors_without_gradient"):
        predicates.parse("tensors_witout_gradient > 0").holds(FIGURES)
    with pytest.raises(predicates.PredicateError, match="best"):
        predicates.parse("accuracy_after >= best").holds(FIGURES)


NO_PREDICATES = """
tensors >; tensors => 0; a > 0 and b > 0; __import__('os').system('true') > 0; a > 1e; a > 'open; a ~ unquoted; a ~ '('
"""


@pytest.mark.parametrize("text", [*NO_PREDICATES.strip().split("; "), "0 < a < 1", "a.b > 1", ""])
def test_what_is_no_predicate_is_refused(text):
    with pytest.raises(predicates.PredicateError, match=r"predicate|regular expression"):
        predicates.parse(text)


def test_a_text_and_a_number_do_not_compare():
    """`error > 0` would be a TypeError deep in a run; it is said as what it is."""
    with pytest.raises(predicates.PredicateError, match="cannot be compared"):
        predicates.parse("error > 0").holds(FIGURES)
    with pytest.raises(predicates.PredicateError, match="in a text"):
        predicates.parse("tensors_trainable ~ '25'").holds(FIGURES)


def test_it_says_in_words_how_it_stands():
    predicate = predicates.parse(
        {
            "check": "tensors_without_gradient == 0",
            "holds": "all {tensors_trainable} have one",
            "fails": "{tensors_without_gradient} of {tensors_trainable} have none, {accuracy_after:.1f}",
        }
    )
    assert predicate.describe(FIGURES) == "24 of 25 have none, 0.5"
    assert predicate.describe(FIGURES | {"tensors_without_gradient": 0}) == "all 25 have one"
    plain = predicates.parse("accuracy_after < accuracy_before")
    text = "accuracy_after is 0.53, accuracy_before is 0.44 (not accuracy_after < accuracy_before)"
    assert plain.describe(FIGURES) == text


def test_templates_name_measured_figures_only():
    assert predicates.fields("{a} and {b:.2f}") == ("a", "b")
    assert predicates.fill("{reward_last:.2f}", FIGURES) == "not measured"
    with pytest.raises(predicates.PredicateError, match="'nothing', which was not measured"):
        predicates.fill("{nothing}", FIGURES)
    with pytest.raises(predicates.PredicateError, match="cannot be written"):
        predicates.fill("{error:.2f}", FIGURES)


@pytest.mark.parametrize(
    ("table", "problem"),
    [({"holds": "x"}, "check"), ({"check": "a > 0", "fail": "x"}, "'fail'"), ({"check": "a > 0", "holds": 3}, "text")],
)
def test_tables_have_known_keys(table, problem):
    with pytest.raises(predicates.PredicateError, match=problem):
        predicates.parse(table)
