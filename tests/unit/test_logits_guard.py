"""LogitsGuard: reads from gradients what a trainer did with its logits, in the stacks that did it wrong and right."""

import types
import warnings

import datasets
import pytest
import torch
import transformers
import trl
from packaging.version import Version
from small import alternate, cut_from_the_front, score

from failurelab import guards, logits
from failurelab.guards import GuardTripped, GuardWarning, LogitsGuard
from failurelab_course.experiments import models, trainers

installed = Version(transformers.__version__)
SENDS = Version(trl.__version__) < Version("1.15")  # later releases ask for log-probabilities, not for logits
CUTS_BY_ITSELF = Version(trl.__version__) >= Version("0.15")


def grpo(*callbacks, **options):
    """Two steps of GRPO on equal-length prompts, with rewards that always differ within a group."""
    rows = datasets.Dataset.from_dict({"prompt": [f"{a}+{b}=" for a in range(1, 5) for b in range(1, 5)]})
    own = {"steps": 2, "prompts_per_step": 2, "num_generations": 4, "beta": 0.04, "rows": rows, "reward": alternate}
    return trainers.grpo(*models.load("tiny"), callbacks=callbacks, **own, **options)


def sends() -> str:
    """The name by which the installed trl asks for the last rows."""
    return "logits_to_keep" if CUTS_BY_ITSELF else "num_logits_to_keep"


def swallowed() -> bool:
    model, _ = models.load("tiny")
    return SENDS and model(torch.zeros(1, 5, dtype=torch.long), **{sends(): 2}).logits.shape[1] == 5


def test_the_installed_stack_is_judged_by_what_it_does():
    """Three outcomes in four stacks: silent where all is right, waste where all rows are made and cut, or a stop."""
    guard = LogitsGuard()
    trainer = grpo(guard)
    before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", GuardWarning)
        if swallowed() and not CUTS_BY_ITSELF:
            with pytest.raises(GuardTripped, match=r"LogitsGuard: rows of logits are scored against the token 4 furth"):
                trainer.train()
            assert guard.report.shift == 3 and guard.report.scored
            assert all(torch.equal(*pair) for pair in zip(before, trainer.model.parameters()))
        else:
            trainer.train()
            assert guard.report is not None and guard.report.shift in (0, None) and not guard.report.probe
    said = [str(each.message) for each in caught if each.category is GuardWarning]
    if swallowed() and CUTS_BY_ITSELF:
        assert len(said) == 1 and "rows of logits for each sequence where" in said[0]
        assert guard.report.made > 1.5 * guard.report.needed and guard.report.shift == 0
    else:
        assert not said
    if not SENDS:
        assert guard.report.made == 0  # judged by the probe


MIXED = [{}, {"bf16": True, "cast_lm_head_to_fp32": True}]


@pytest.mark.skipif(SENDS, reason="trl hands out log-probabilities from 1.15 on")
@pytest.mark.parametrize("options", MIXED, ids=str)
def test_a_fused_head_that_rounds_otherwise_is_left_alone(options):
    """With a head of float32 after layers of bfloat16 a healthy run was stopped, 0.03 nats from the truth."""
    guard = LogitsGuard()
    trainer = grpo(guard, **options)
    trainer.train()
    assert trainer.state.global_step == 2 and guard.report.contrast > 1 and not guard.report.probe
    (planted,) = guard.report.planted.values()
    assert planted["log_prob_error"] > 1 > guard.report.measured["log_prob_error"]


@pytest.mark.skipif(SENDS, reason="trl hands out log-probabilities from 1.15 on")
@pytest.mark.parametrize("options", MIXED, ids=str)
def test_a_fused_head_that_scores_other_tokens_is_found(monkeypatch, options):
    """No logits to look at: the guard gives trl's own head the known-answer probe, and not one weight has moved."""
    trainer = grpo(LogitsGuard(), **options)
    before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    forward = trainer.model.forward

    def late(*args, **options):
        output = forward(*args, **options)
        if options.get("fused_lm_head"):
            output.log_probs = output.log_probs.roll(1, -1)
        return output

    monkeypatch.setattr(trainer.model, "forward", late)
    with pytest.raises(GuardTripped, match="LogitsGuard: log-probabilities are not those") as caught:
        trainer.train()
    assert caught.value.report.probe in str(caught.value)
    assert all(torch.equal(*pair) for pair in zip(before, trainer.model.parameters()))
    assert not trainer.model._forward_hooks


class Training:
    """A trainer as small as one can be: it calls the callback where transformers would."""

    def __init__(self, guard, model=None, **arguments):
        self.guard, self.model = guard, model or models.load("tiny")[0].train()
        self.args = types.SimpleNamespace(**arguments)
        self.state = types.SimpleNamespace(global_step=0)
        guard.on_train_begin(self.args, self.state, None, model=self.model)

    def step(self, loss) -> None:
        loss(self.model).backward()
        self.guard.on_pre_optimizer_step(self.args, self.state, None)
        self.state.global_step += 1


IDS = torch.randint(3, 15, (2, 12), generator=torch.Generator().manual_seed(0))


def scored(shift=0, weight=1.0):
    """A loss as trainers make it, with the rows of logits moved by `shift`."""

    def loss(model):
        return (score(model, IDS, None, 4, shift) * torch.tensor([[1.0], [-2.0]]) * weight).sum()

    return loss


@pytest.fixture
def patient(monkeypatch):
    """Rows that nobody uses are not told: a test that looks at something else makes all."""
    monkeypatch.setattr(guards.logits, "_WASTE", 9)


@pytest.mark.parametrize("shift, told", [(1, "the token just read"), (-7, "8 further")])
def test_the_shift_is_read_from_the_gradient(patient, shift, told):
    """Advantages of both signs; the row's own token is the one entry of the other sign."""
    training = Training(LogitsGuard())
    training.step(scored(shift, weight=0.0))  # groups of equal rewards give no advantage: it waits for one that does
    assert training.guard.report is None
    with pytest.raises(GuardTripped, match=told):
        training.step(scored(shift))
    assert training.guard.report.shift == -shift


@pytest.mark.parametrize("broken", [True, False])
def test_rows_of_other_positions_are_found_though_there_are_as_many_as_were_asked_for(broken):
    """By their number they look right: what the rows are, only the model can say."""
    model = models.load("tiny")[0].train()
    name = logits.keep_argument(model)
    training = Training(LogitsGuard(), cut_from_the_front(model) if broken else model)

    def loss(model):
        rows = model(input_ids=IDS, **{name: 5}).logits[:, :-1].log_softmax(-1)  # (2, 4, vocabulary)
        return (rows.gather(2, IDS[:, -4:, None])[..., 0] * torch.tensor([[1.0], [-2.0]])).sum()

    if broken:
        with pytest.raises(GuardTripped, match="tokens that do not come next"):
            training.step(loss)
    else:
        training.step(loss)
        assert training.guard.report.shift == 0 and training.guard.report.scored


def test_waste_is_said_once_and_stops_nothing():
    training = Training(LogitsGuard())
    with pytest.warns(GuardWarning, match="makes 12 rows of logits for each sequence where 5 are used") as said:
        training.step(scored())
        training.step(scored())
    assert len(said) == 1
    assert training.guard.report == guards.LogitsReport(
        made=12, needed=5, size=2 * 12 * training.model.config.vocab_size * 4, scored=8, shift=0
    )


@pytest.mark.parametrize(
    "waste, loss, expected",
    [
        # a gradient that is no softmax less one token tells nothing about tokens: soft targets, a value head
        (9, lambda model: model(IDS).logits[:, -5:-1].square().mean(), {"shift": None, "scored": 0}),
        # supervised training on all tokens
        (1.5, lambda model: model(input_ids=IDS, labels=IDS).loss, {"shift": 0, "made": 12}),
        # with the cure in place there are no logits to read
        (1.5, lambda model: logits.completion_logps(model, IDS, None, 4).sum(), None),
    ],
    ids=["no one token", "supervised", "completion_logps"],
)
def test_losses_without_fault_are_left_alone(monkeypatch, waste, loss, expected):
    monkeypatch.setattr(guards.logits, "_WASTE", waste)
    training = Training(LogitsGuard())
    with warnings.catch_warnings():
        warnings.simplefilter("error", GuardWarning)
        training.step(loss)
    report = training.guard.report
    assert report is None if expected is None else {name: getattr(report, name) for name in expected} == expected


def test_listening_ends_with_the_run_and_starts_anew_with_the_next(patient):
    guard = LogitsGuard()
    training = Training(guard)
    guard.on_train_begin(training.args, training.state, None, model=training.model)
    assert len(training.model._forward_hooks) == 1
    training.step(scored())
    assert not training.model._forward_hooks
    guard.on_train_begin(training.args, training.state, None, model=training.model)
    assert guard.report is None
    guard.on_train_end(training.args, training.state, None)
    assert not training.model._forward_hooks
