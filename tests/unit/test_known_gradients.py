"""Known gradients: cases that two ways compute, right losses that are accused of nothing, bugs found by their names."""

import dataclasses
import json
import pathlib
import subprocess
import sys

import planted_losses
import pytest
import torch

from failurelab import known_gradients
from failurelab.known_gradients import Declared, EditedCases, cases, check, definition, names, read_cases
from failurelab.known_gradients.definition import LossOptions

ROOT = pathlib.Path(__file__).parents[2]
CASES = read_cases()


def pick(*words):
    """Return the cases whose id starts with one of these."""
    return [case for case in CASES if case.id.startswith(words)]


class Definition:
    """An adapter that is the definition, with options changed; it takes every option."""

    def __init__(self, **change):
        self.change = change

    def loss(self, case):
        [getattr(case.asked, field.name) for field in dataclasses.fields(LossOptions)]
        value, gradient = definition.gradient(case.batch, dataclasses.replace(case.options, **self.change))
        return torch.tensor(value), gradient

    loss_of_logits = loss

    def advantages(self, case):
        return definition.advantages(case.batch, dataclasses.replace(case.options, scale=case.asked.scale))


@pytest.mark.slow
def test_files_are_what_two_ways_compute():
    from tools import gradient_cases

    assert gradient_cases.main(["--check"]) == 0  # raises where finite differences say otherwise


def test_cases_excite_what_they_are_about():
    """Undo each option that a case gives: its gradient is another one, or the case shows nothing."""
    shown = set()
    for case in CASES:
        if case.kind not in ("gradient", "logits"):
            continue
        for name, value in dataclasses.asdict(case.options).items():
            usual = getattr(LossOptions(), name)
            if value != usual:
                other = definition.gradient(case.batch, dataclasses.replace(case.options, **{name: usual}))[1]
                if names.apart(other, definition.gradient(case.batch, case.options)[1]) > 1e-3:
                    shown.add(name)
    fields = {field.name for field in dataclasses.fields(LossOptions)}
    rest = {"wrong", "scale", "sapo_pos", "sapo_neg", "max_length"}  # or shown by another test
    rest |= {"cispo_bound", "cispo_low", "empty_rows", "kl_reduce", "kl_cap"}
    assert shown == fields - rest


@pytest.mark.parametrize("adapter", [Definition, planted_losses.Loss])
def test_a_right_loss_is_accused_of_nothing(adapter):
    report = known_gradients.check_adapter(adapter())
    assert report.count(check.AGREES) + report.count(check.NOT_RUN) == len(CASES)
    assert report.count(check.AGREES) >= 60


@pytest.mark.parametrize("planted", planted_losses.PLANTED, ids=lambda each: each.__name__)
def test_each_planted_bug_is_found_and_named(planted):
    report = known_gradients.check_adapter(planted(), chosen=CASES)
    found = [result for result in report.results if result.status == check.DIFFERS]
    named = {result.name for result in found if result.group != "wiring"}
    assert found and not report.count(check.BROKEN)
    assert len(named) == 1 and planted.CALLED in named.pop()


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"cispo_bound": "absolute"}, "bound, not margin"),
        ({"dual_clip": 3.0}, "dual clip"),
        ({"kl_cap": 10.0}, "KL capped at 10"),
        ({"empty_rows": False}, "rows without tokens do not count"),
        ({"reduce": "padded length"}, "padded length"),
        ({"kl_reduce": "token_mean"}, "KL term as a mean over all tokens"),
        ({"epsilon_high": 0.2}, "epsilon_high has no effect"),
    ],
)
def test_differences_of_libraries_are_named(change, name):
    report = known_gradients.check_adapter(Definition(**change), chosen=CASES)
    assert name in report.names()


@pytest.mark.parametrize(
    ("change", "statuses", "line"),
    [({"dual_clip": 3.0}, [check.AGREES, check.OTHER], "its manual"), ({}, [check.DIFFERS], "not what it declares")],
    ids=["done", "declared_and_not_done"],
)
def test_what_is_declared_is_another_objective_and_no_fault(change, statuses, line):
    adapter = Definition(**change)
    adapter.DECLARES = [Declared({"objective": "clip"}, {"dual_clip": 3.0}, "its manual")]
    cases = pick("clip/far", "clip/token-mean") if change else pick("clip/far")[:1]
    report = known_gradients.check_adapter(adapter, chosen=cases)
    assert [result.status for result in report.results] == statuses and line in report.results[-1].line


class Returns:
    """An adapter that reads all options, and returns this."""

    def __init__(self, value):
        self.value = value

    def loss(self, case):
        [getattr(case.asked, field.name) for field in dataclasses.fields(LossOptions)]
        return self.value(case)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (lambda case: (0.0, torch.zeros(3)), "shape (3,), not (8, 7)"),
        (lambda case: (0.0, torch.full((8, 7), torch.nan)), "NaN"),
        (lambda case: (0.0, None), "NoneType"),
        (lambda case: case.accumulate(lambda part: torch.ones(())), "a loss without a gradient"),
        (lambda case: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_a_bad_answer_is_one_line_with_the_case(value, said):
    report = known_gradients.check_adapter(Returns(value), chosen=pick("clip/symmetric"))
    (line,) = report.text().splitlines()[1:]
    assert line.startswith("BROKEN") and "clip/symmetric" in line and said in line


def test_an_option_that_is_lacking_is_not_run_by_name():
    class Small:
        def loss(self, case):
            case.asked.choose("reduce", {"token_mean": None})
            return definition.gradient(case.batch, LossOptions())

    report = known_gradients.check_adapter(
        Small(), chosen=pick("kl/constant", "clip/dual", "clip/far", "logits/entropy")
    )
    said = {result.id: result.line for result in report.results}
    assert {result.status for result in report.results} == {check.NOT_RUN}
    assert said["kl/constant"] == "no reduce='constant'" and "dual_clip=3.0" in said["clip/dual"]
    assert "epsilon_high=0.28" in said["clip/far"] and "loss_of_logits" in said["logits/entropy"]


def test_an_edited_file_says_so_by_its_checksum(tmp_path):
    text = (cases.FOLDER / "clip.json").read_text(encoding="utf-8")
    (tmp_path / "clip.json").write_text(text.replace("-0.1", "-0.2", 1), encoding="utf-8")
    with pytest.raises(EditedCases, match="sha256"):
        read_cases(tmp_path)
    (tmp_path / "clip.json").write_text(text[:200], encoding="utf-8")
    with pytest.raises(EditedCases, match=r"clip\.json"):
        read_cases(tmp_path)


@pytest.mark.parametrize(
    ("name", "said"),
    [("my_own_adapter", "no_such_package"), ("my_own_adapter.py", "no_such_package"), ("no-such-library", "openrlhf")],
)
def test_an_adapter_that_cannot_be_had_says_what_is_missing_in_a_line(name, said, tmp_path, monkeypatch):
    (tmp_path / "my_own_adapter.py").write_text("import no_such_package_at_all\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(known_gradients.NoAdapter, match=said) as told:
        check.find_adapter(name)
    assert len(str(told.value).splitlines()) == 1
    report = known_gradients.check_adapter(check.find_adapter("verl"), str(tmp_path), pick("clip"))
    assert {result.status for result in report.results} == {check.NOT_RUN} and "verl" in report.results[0].line


def test_two_mistakes_at_once_are_named_together():
    adapter = Definition(dual_clip=3.0, kl_cap=10.0)
    (result,) = known_gradients.check_adapter(adapter, chosen=pick("kl/far")).results[:1]
    assert result.name == "KL capped at 10"  # the case has dual clip already
    adapter = Definition(reduce="sequence_mean", wrong=frozenset({"KL with the wrong sign"}))
    (result,) = known_gradients.check_adapter(adapter, chosen=pick("cut/kl-4-micro")).results
    assert "KL with the wrong sign + reduce=sequence_mean" in result.name.split(" or ")


def test_a_name_is_that_which_explains_most_cases():
    assert names.settle({"a": ["x", "y"], "b": ["y"], "c": []}) == {
        "a": "y", "b": "y", "c": "no definition has this gradient",
    }  # fmt: skip
    assert names.settle({"a": ["x", "y"]}) == {"a": "x or y"}


def test_the_command_reads_an_adapter_of_its_own(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))  # what lies beside it is found, as Python does for a script
    (tmp_path / "near.py").write_text("", encoding="utf-8")
    (tmp_path / "mine.py").write_text(
        "import near\nfrom failurelab.known_gradients import definition\n"
        "def loss(case):\n"
        "    case.asked.epsilon_high, case.asked.epsilon_low\n"
        "    return definition.gradient(case.batch, case.options)\n",
        encoding="utf-8",
    )
    assert check.main([str(tmp_path / "mine.py"), "--only", "clip/sym", "--json", str(tmp_path / "out.json")]) == 0
    assert capsys.readouterr().out == "mine: 1 cases: 1 agrees\n"
    assert json.loads((tmp_path / "out.json").read_text())["cases"][0]["status"] == check.AGREES
    assert check.main([str(tmp_path / "mine.py"), "--only", "clip/dual"]) == 3


def test_trl_is_held_by_its_own_step():
    report = known_gradients.check_adapter(check.find_adapter("trl"), chosen=CASES)
    assert not report.count(check.DIFFERS) and not report.count(check.BROKEN) and report.count(check.AGREES) >= 50
    assert {result.name for result in report.results if result.status == check.OTHER} == {
        "bound, not margin, no lower bound"
    }


def test_async_grpo_is_a_mean_of_means():
    """AsyncGRPOTrainer's own compute_loss in trl 1.16.0 (#7206, #7249): where it is mended, this test says so."""
    report = known_gradients.check_adapter(
        check.find_adapter("trl_async"), chosen=pick("cut/token-mean", "clip/token-mean")
    )
    names = {result.id: result.name for result in report.results}
    assert names.pop("clip/token-mean") == "" and names.pop("cut/token-mean-2-ranks") == ""
    assert names.pop("cut/token-mean-2-ranks-groups-on-both") == ""
    assert set(names.values()) == {"mean of means, each over all ranks"} and len(names) == 4


@pytest.mark.slow
def test_the_file_to_copy_runs_with_the_cases_beside_it(tmp_path):
    (tmp_path / "cases").symlink_to(cases.FOLDER)
    (tmp_path / "test_mine.py").write_text((ROOT / "examples" / "test_known_gradients.py").read_text(encoding="utf-8"))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 0 and "passed" in done.stdout, done.stdout[-2000:]
