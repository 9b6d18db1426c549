"""The ledger: healthy trainers hold, planted mistakes are found, the rest is not checked."""

import copy
import inspect
import types

import pytest
import torch
import trl
from steps import (
    before,
    needs_online_dpo,
    needs_rloo,
    one_after_another,
    online_dpo,
    planted,
    rloo,
    train_with_and_without,
    trainer,
)

from failurelab import textbook
from failurelab.failures import figures
from failurelab.failures.verdicts import FOUND, HELD, NOT_APPLICABLE, NOT_CHECKED
from failurelab.textbook import balance
from failurelab.textbook.draws import RewardCalls
from failurelab.textbook.listener import MAKING, Listener
from failurelab.textbook.rows import Row

# mechanisms of the registry
DIFFER, PADDING, END, COLUMNS, COPY, WEIGHTS, AGAIN, CONTEXT, PROMPT = balance.judge({}, {})
takes_rollouts = pytest.mark.skipif(
    "rollout_func" not in inspect.signature(trl.GRPOTrainer.__init__).parameters, reason="no rollouts of one's own"
)


def keep(made):
    with textbook.ledger(made) as ledger:
        made.train()
    assert not ledger.problems
    return ledger


def told(ledger):
    return {name: judged.verdict for name, judged in ledger.verdicts.items()}


MAKERS = {
    "GRPO": lambda *given: trainer(*given, max_steps=2, temperature=1.0 if before("0.16") else 0.8),
    "RLOO": lambda *given: rloo(*given, max_steps=2),
    "Online DPO": lambda *given: online_dpo(*given, max_steps=2),
}


@pytest.mark.parametrize(
    "name", ["GRPO", pytest.param("RLOO", marks=needs_rloo), pytest.param("Online DPO", marks=needs_online_dpo)]
)
def test_a_healthy_trainer_holds(name, model, tokenizer, tmp_path):
    """Each token is the policy's own draw, and each row is pushed the way its own reward says."""
    ledger = keep(MAKERS[name](model, tokenizer, tmp_path))
    verdicts, found = told(ledger), ledger.figures
    assert verdicts.pop(COPY) == NOT_APPLICABLE, str(ledger)
    assert verdicts.pop(COLUMNS) != FOUND  # Online DPO of old releases hands no columns over
    assert set(verdicts.values()) == {HELD}, str(ledger)
    assert found["tokens_trained"] > 60 and found["trained_gap"] < 1e-4
    assert "\nrows_turned is 0 (as" in str(ledger)
    assert "(not " not in str(ledger)  # what no failure is about is in its band
    assert found["ends_handed"] == found["ends_drawn"] > 0
    assert set(found) <= set(figures.table())


def test_the_run_is_the_same_with_and_without_it(trained, tmp_path):
    def make(policy):
        return trainer(policy, trained[1], tmp_path, max_steps=2, learning_rate=1e-3)

    ledger, same = train_with_and_without(make, trained[0], textbook.ledger)
    assert same and not ledger.problems and "generate" not in vars(ledger.trainer.model)


def test_the_tables_are_linked(model, tokenizer, tmp_path):
    ledger = keep(trainer(model, tokenizer, tmp_path))
    drawn, trained, paid = (ledger.table(name) for name in ("draws", "trained", "paid"))
    tokens = {(line["draw"], line["context"]): line for line in drawn}
    for line in trained:
        own = tokens[line["draw"], line["context"]]
        assert own["token"] == line["token"] and abs(own["logp"] - line["logp_now"]) < 1e-4
    assert len(paid) == 32 and len({(line["batch"], line["group"]) for line in paid}) == 8
    assert all(line["total"] == pytest.approx(sum(line["rewards"])) for line in paid)


def changed(model, change):
    """Let a function change what the model is given in each forward pass of the loss."""

    def hook(_, args, kwargs):
        if not torch.is_grad_enabled():
            return None
        return (), change(kwargs | dict(zip(["input_ids"], args)))

    model.register_forward_pre_hook(hook, with_kwargs=True)
    return model


def other_token(kwargs):
    """Let the first token of each completion be another one, as of a text that is encoded again."""
    kwargs = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in kwargs.items()}
    for name in {"input_ids", "labels"} & kwargs.keys() if kwargs["input_ids"].shape[1] > 5 else ():
        kwargs[name][:, 5] = 77  # every prompt has five
    return kwargs


def no_mask(kwargs):
    return {name: value for name, value in kwargs.items() if name != "attention_mask"}


def test_a_token_that_was_not_drawn_is_found(model, tokenizer, tmp_path):
    """In trl 0.14 the scored token is taken from elsewhere, so that those behind the other one stand out."""
    ledger = keep(trainer(changed(model, other_token), tokenizer, tmp_path))
    assert told(ledger)[AGAIN] == FOUND
    assert ledger.figures["foreign_tokens"] > 10


def test_padding_that_is_read_is_another_context(model, tokenizer, tmp_path):
    """Trl 0.14 hands no attention mask over (TRL #2708): with prompts of two lengths it does so by itself."""
    ledger = keep(trainer(changed(model, no_mask), tokenizer, tmp_path, lengths=(4, 5)))
    assert told(ledger)[CONTEXT] == FOUND and told(ledger)[AGAIN] == HELD
    assert ledger.figures["moved_tokens"] > 10


def test_weights_that_were_put_in_for_a_draw_are_found(model, tokenizer, tmp_path):
    """The first weights draw, inside `generate`, and the policy's are back when it returns."""
    first, own = copy.deepcopy(model.state_dict()), model.generate

    def generate(*args, **kwargs):
        now = copy.deepcopy(model.state_dict())
        model.load_state_dict(first)
        output = own(*args, **kwargs)
        model.load_state_dict(now)
        return output

    model.generate = generate
    ledger = keep(trainer(model, tokenizer, tmp_path, max_steps=2, learning_rate=1e-3))
    assert told(ledger)[WEIGHTS] == FOUND and ledger.figures["other_weights"] > 0


def test_of_one_draw_it_is_not_known_which_weights_the_next_would_have(model, tokenizer, tmp_path):
    """Those of a copy that is never updated are still the policy's."""
    verdicts = told(keep(trainer(model, tokenizer, tmp_path)))
    assert verdicts[WEIGHTS] == NOT_CHECKED and verdicts[AGAIN] == verdicts[CONTEXT] == HELD  # no padding in trl 0.14


@pytest.mark.skipif(before("0.22"), reason="advantages are computed inside the loss")
def test_rows_that_have_the_advantages_of_others_are_found(model, tokenizer, tmp_path):
    kind = planted(inputs=lambda inputs: inputs | {"advantages": inputs["advantages"].roll(1, 0)})
    ledger = keep(trainer(model, tokenizer, tmp_path, kind=kind))
    assert ledger.figures["rows_turned"] > 5 and "(not rows_turned == 0)" in str(ledger)


@needs_online_dpo
def test_pairs_that_are_swapped_are_found(model, tokenizer, tmp_path):
    """A negative beta turns chosen and rejected."""
    made = online_dpo(model, tokenizer, tmp_path)
    made.args.beta = made._beta = -0.1
    assert keep(made).figures["rows_turned"] > 5


@pytest.mark.skipif(before("0.15"), reason="trl 0.14 draws for each prompt itself")
def test_groups_of_several_prompts_are_found(model, tokenizer, tmp_path, monkeypatch):
    one_after_another(monkeypatch)
    ledger = keep(trainer(model, tokenizer, tmp_path))
    assert told(ledger)[PROMPT] == FOUND and ledger.figures["groups_mixed"] == 8


def test_groups_of_one_prompt_alone_could_not_be_mixed(model, tokenizer, tmp_path):
    made = trainer(model, tokenizer, tmp_path, rows=[("11+1=", "12")] * 40)
    assert told(keep(made))[PROMPT] == NOT_CHECKED


def test_equal_rewards_leave_nothing_to_see(model, tokenizer, tmp_path):
    """No token has a gradient then, so what is trained on is not known either."""
    ledger = keep(trainer(model, tokenizer, tmp_path, rewards=[lambda completions, **_: [1.0] * len(completions)]))
    verdicts = told(ledger)
    assert verdicts[DIFFER] == FOUND and ledger.figures["rows_turned"] is None
    assert {verdicts[name] for name in (AGAIN, CONTEXT, COPY, WEIGHTS)} == {NOT_CHECKED}


def drawn_by(model, tokenizer, prompts):
    asked = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
    drawn = model.generate(**asked, max_new_tokens=6, do_sample=True)
    end = tokenizer.eos_token_id
    rows = [row.tolist() for row in drawn[:, asked["input_ids"].shape[1] :]]
    ids = [tokenizer(prompt, add_special_tokens=False)["input_ids"] for prompt in prompts]
    return {"prompt_ids": ids, "completion_ids": rows, "logprobs": None}, end


def cut(output, end):
    rows = [row[: row.index(end) + 1] if end in row else row for row in output["completion_ids"]]
    return output | {"completion_ids": rows}


@takes_rollouts
@pytest.mark.parametrize("way", ["right", "padding", "again", "hint", "server"])
def test_what_a_rollout_function_makes_of_its_draws(way, model, tokenizer, tmp_path):
    """Padding is left, text encoded again, the prompt another, or a server draws unseen."""

    def rollout(prompts, trainer):
        asked = [f"1+{prompt}" for prompt in prompts] if way == "hint" else prompts
        output, end = drawn_by(trainer.model, tokenizer, asked)
        output = output if way == "padding" else cut(output, end)
        if way in ("again", "server"):
            output["completion_ids"] = [[*tokenizer(" 7").input_ids, 9] for _ in prompts]
        if way in ("hint", "server"):
            output["prompt_ids"] = [tokenizer(prompt, add_special_tokens=False)["input_ids"] for prompt in prompts]
        if way == "server":  # behind prompts that nobody was seen to draw behind
            output["prompt_ids"] = [[8, *ids] for ids in output["prompt_ids"]]
        return output

    def by_length(completions, completion_ids, **_):
        return [place % 4 - 0.1 * len(ids) for place, ids in enumerate(completion_ids)]

    made = trainer(model, tokenizer, tmp_path, more=[("rollout_func", rollout)], rewards=[by_length])
    ledger = keep(made)
    verdicts, found = told(ledger), ledger.figures
    expected = {"right": HELD, "padding": HELD, "again": FOUND}.get(way, NOT_CHECKED)
    assert verdicts[AGAIN] == expected, str(ledger)
    if way == "padding":
        assert verdicts[PADDING] == FOUND and found["padding_trained"] > 0
    if way == "again":
        assert found["foreign_tokens"] == found["tokens_trained"]
    if way == "hint":
        assert verdicts[CONTEXT] == FOUND and found["moved_tokens"] == found["tokens_trained"]


@takes_rollouts
@pytest.mark.parametrize(
    ("rate", "synchronizes", "verdict"), [(1e-2, False, FOUND), (1e-2, True, HELD), (0.0, False, NOT_CHECKED)]
)
def test_a_copy_that_draws_and_never_gets_the_weights(rate, synchronizes, verdict, model, tokenizer, tmp_path):
    other = copy.deepcopy(model)

    def rollout(prompts, trainer):
        if synchronizes:
            other.load_state_dict(trainer.model.state_dict())
        return cut(*drawn_by(other, tokenizer, prompts))

    options = {"max_steps": 2, "learning_rate": rate, "more": [("rollout_func", rollout)]}
    ledger = keep(trainer(model, tokenizer, tmp_path, **options))
    assert told(ledger)[COPY] == verdict, str(ledger)
    assert told(ledger)[AGAIN] == HELD


class OwnOrder:
    num_generations = 2

    def _generate(self):
        """Draw in an order of its own."""


LINKS = {  # what was drawn, what was paid as texts and as ids, and which draw each is
    "in order": (OwnOrder, "1 2 3 4", "1 2 3 4", None, [0, 1, 2, 3]),
    "by turns": (OwnOrder, "1 2 3 4", "1 3 2 4", None, [0, 2, 1, 3]),
    "by turns, by a library": (types.SimpleNamespace, "1 2 3 4", "1 3 2 4", None, [0, 1, 2, 3]),
    "by ids": (OwnOrder, "9 1 2 1", "1 1 2", "1 1 2", [1, 3, 2]),
    "the first of several turns": (OwnOrder, "9 1 2", "1 2", "17 2", [1, 2]),
    "the last ones": (OwnOrder, "9 1 2", "1 2", None, [1, 2]),
    "the last ones, as the first one says the same": (OwnOrder, "1 1 2", "1 2", None, [1, 2]),
    "not known": (OwnOrder, "9 1 2", "3 4", None, [None, None]),
}


@pytest.mark.parametrize("case", LINKS)
def test_which_draw_a_completion_is_that_is_paid(case, tokenizer):
    kind, drawn, texts, ids, places = LINKS[case]
    heard = object.__new__(Listener)
    heard.trainer = kind()
    heard.trainer.num_generations, heard.trainer.processing_class = 2, tokenizer

    def encode(words):
        return [tuple(tokenizer.convert_tokens_to_ids(list(word))) for word in words.split()]

    given = {"completions": texts.split()} | ({"completion_ids": encode(ids)} if ids else {})
    rows = [Row((5,), own, False) for own in encode(drawn)]
    assert heard.find_draws(rows, RewardCalls({0: given}, {0: [0.0] * len(places)})) == places


class Asks(OwnOrder):
    def _generate(self):
        return super()._generate()


@pytest.mark.parametrize("kind", [OwnOrder, Asks, types.SimpleNamespace])
def test_what_a_script_overrides_wholly_asks_the_library_for_nothing(kind):
    heard = object.__new__(Listener)
    heard.trainer = kind()
    told = heard.overrides(MAKING), heard.overrides(MAKING, wholly=True)
    assert told == (kind is not types.SimpleNamespace, kind is OwnOrder)


def test_a_picture_says_what_it_shows(model, tokenizer, tmp_path):
    ledger = keep(trainer(changed(model, other_token), tokenizer, tmp_path))
    shown = ledger._repr_html_()
    assert 'role="img"' in shown and "in 0 of them" not in shown and 'title="foreign"' in shown
