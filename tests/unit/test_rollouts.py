"""Garbage rollouts: generation under gradient checkpointing, measured in the installed transformers, and repaired."""

import copy
import functools
import inspect
import types

import pytest
import torch
import transformers
from packaging.version import Version
from small import checkpoint, llava, lora, said

from failurelab import _greedy, gradients, rollouts
from failurelab._unwrap import unwrap
from failurelab.guards import RolloutGuard
from failurelab_course.experiments import models

installed = Version(transformers.__version__)
MIXED = [prompt for prompt, _ in models.sums()[::7]]  # padding is needed
# What was measured: up to 4.48 a causal mask that is a full square, made for padded batches and with eager attention
# always; 4.49 to 4.52 right; from 4.53 on the layers drop the cache; from 5.24 on only while gradients are enabled.
SQUARE_MASK = installed < Version("4.49")
DROPPED_CACHE = Version("4.53") <= installed < Version("5.24")
RIGHT = not SQUARE_MASK and not DROPPED_CACHE


def check(model, tokenizer, prompts=MIXED, **options):
    return rollouts.check(model, tokenizer, prompts, **{"max_new_tokens": 4} | options)


def generate_options(model, tokenizer) -> dict:
    ids, mask = _greedy.encode(model, tokenizer, MIXED, 4)
    return {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 4, "do_sample": False}


def state(model) -> list:
    """Everything that a generation could leave changed."""
    config = unwrap(model).generation_config
    return [
        (
            name,
            module.training,
            getattr(module, "gradient_checkpointing", None),
            id(getattr(module, "_gradient_checkpointing_func", None)),
            sorted(vars(module)),
            len(module._forward_hooks) + len(module._forward_pre_hooks),
        )
        for name, module in model.named_modules()
    ] + [id(config), str(config)]


@pytest.mark.parametrize("reentrant", [None, True, False])
def test_train_mode_and_checkpointing_with_the_cache(model, tokenizer, reentrant):
    """Train mode alone is no failure; checkpointing is, in the versions that have it, whatever its kind."""
    if reentrant is not None:
        checkpoint(model, reentrant)
    report = check(model, tokenizer)
    assert report.checkpointing == {None: "off", True: "reentrant", False: "non-reentrant"}[reentrant]
    assert report.use_cache is True and report.dropout is False  # generate goes on believing that there is a cache
    assert report.agrees == (RIGHT or reentrant is None)
    if report.agrees:
        assert report.agreeing == len(MIXED) and report.error < 1e-4
    else:
        assert report.error > 1 and report.mean_error > 0.05 and report.agreeing < len(MIXED)
        assert report.training_logp < report.evaluation_logp
        assert not report.worst.agrees and report.worst.training != report.worst.evaluation


def test_gpt2_drops_its_cache_in_every_release_from_4_53_on(tokenizer):
    """The layers of other models are healed in transformers 5.24; GPT-2's model keeps the cache from its layers."""
    model = models.untrained(transformers.GPT2Config, vocab_size=len(tokenizer))
    checkpoint(model, reentrant=False)
    report = check(model, tokenizer)
    assert report.agrees == (installed < Version("4.53"))
    rollouts.repair(model)
    assert check(model, tokenizer).agrees and not report.dropout


@pytest.mark.parametrize("gradients_enabled", [True, False])
def test_a_loop_of_ones_own_is_judged_with_gradients_as_it_has_them(model, tokenizer, gradients_enabled):
    """From transformers 5.24 on layers keep the cache where gradients are off: the comparison leaves them on."""
    checkpoint(model, reentrant=False)
    names = inspect.signature(model.forward).parameters
    cache_name = "cache" if "cache" in names else "past_key_values"

    def generate(input_ids, attention_mask, **_):
        """Draw two tokens, the second from the first and the cache."""
        start = model(input_ids=input_ids, attention_mask=attention_mask, use_cache=True)
        first = start.logits[:, -1].argmax(-1, keepdim=True)  # (batch, 1)
        mask = torch.cat([attention_mask, torch.ones_like(first)], 1)
        cached = {cache_name: start[cache_name]} if cache_name in start else {}
        after = model(input_ids=first, attention_mask=mask if cached else None, use_cache=True, **cached)
        second = after.logits[:, -1].argmax(-1, keepdim=True)
        sequences = torch.cat([input_ids, first, second], 1)
        return types.SimpleNamespace(sequences=sequences, logits=(start.logits[:, -1], after.logits[:, -1]))

    ids, mask = _greedy.encode(model, tokenizer, MIXED, 2)
    with torch.set_grad_enabled(gradients_enabled):
        report = rollouts.compare(model.train(), tokenizer, ids, mask, generate=generate)
    if installed >= Version("4.53"):
        assert report.agrees == (installed >= Version("5.24") and not gradients_enabled)
        assert report.agrees or report.error > 1


@pytest.mark.parametrize(("reentrant", "peft"), [(True, False), (False, True)])
def test_safe_generation_agrees_with_eval_mode_and_restores_everything(model, tokenizer, reentrant, peft):
    options = generate_options(model, tokenizer)
    expected = model.eval().generate(**options)
    if peft:
        model = lora(model)  # B starts at zero: the function is the same
        model.generate(**options)  # PEFT leaves an attribute of its own
    checkpoint(model, reentrant)
    model.train()
    unwrap(model).model.layers[0].eval()  # a part that somebody keeps in eval mode
    before = state(model)
    with rollouts.safe_generation(model) as safe:
        assert safe is model and not model.training
        assert not list(gradients.checkpointed(model))  # off, also for code that asks the flag and not the mode
        assert torch.equal(model.generate(**options), expected)
    assert state(model) == before
    with pytest.raises(ZeroDivisionError), rollouts.safe_generation(model):
        with rollouts.safe_generation(model):
            assert not model.training
        assert not model.training
        raise ZeroDivisionError
    assert state(model) == before and model.training


@pytest.mark.parametrize("partial", [False, True])
def test_a_repaired_model_generates_as_in_eval_mode_until_the_handle_goes(model, tokenizer, partial):
    """Without a repair use_cache=False, as an argument or in the config that is handed over, reaches generation too."""
    checkpoint(model, reentrant=False)
    if partial:
        model.generate = functools.partial(model.generate, top_k=0)
    broken, before = check(model, tokenizer), state(model)
    with rollouts.repair(model):
        assert check(model, tokenizer).agrees
    assert state(model) == before and check(model, tokenizer) == broken and broken.agrees == RIGHT
    config = transformers.GenerationConfig(max_new_tokens=4, do_sample=True, use_cache=False)
    for options in ({"use_cache": False}, {"generation_config": config}):
        report = check(model, tokenizer, **options)
        assert report.agrees and report.use_cache is False


def test_a_tokenizer_for_generate_is_no_second_one(model, tokenizer):
    """`generate(stop_strings=..., tokenizer=...)`: the guard and the comparison have a tokenizer of their own."""
    batch = tokenizer(MIXED, return_tensors="pt", padding=True, padding_side="left")
    options = {"stop_strings": ["="], "tokenizer": tokenizer, "max_new_tokens": 4}
    assert rollouts.compare(model, tokenizer, batch.input_ids, batch.attention_mask, **options).agrees
    guard = RolloutGuard()
    guard.report, guard._rounding = None, None
    guard._judge(
        model.train(), tokenizer, model.generate, batch.input_ids, attention_mask=batch.attention_mask, **options
    )
    assert guard.report.agrees


def test_a_check_changes_nothing(model, tokenizer):
    checkpoint(model, reentrant=False)
    model.eval()
    model.model.layers[1].train()
    model.model.norm.register_forward_hook(lambda *_: torch.rand(1) and None)  # a part that draws random numbers
    before, random_state = state(model), torch.get_rng_state()
    check(model, tokenizer)
    assert state(model) == before and torch.equal(torch.get_rng_state(), random_state)
    with pytest.raises((ValueError, TypeError)):
        check(model, tokenizer, no_such_argument=torch.ones(1))
    assert state(model) == before and torch.equal(torch.get_rng_state(), random_state)


@pytest.mark.parametrize("where", ["attention", "adapter"])
def test_dropout_is_reported_and_held_against_nobody(model, tokenizer, where):
    """LoRA with dropout is a healthy run: train mode draws other numbers, but by no fault of generation."""
    if where == "adapter":
        model = lora(model, lora_dropout=0.9, init_lora_weights=False)
    else:
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.9
    report = check(model, tokenizer)
    assert report.dropout and report.agrees


def test_sampling_settings_are_overridden_from_either_config(model, tokenizer):
    greedy = check(model, tokenizer)
    model.generation_config.update(do_sample=True, temperature=5.0, top_k=0, num_beams=1)
    model.generation_config.transformers_version = "4.50.0"  # from then on 4.x lets it win over a trainer's defaults
    config = transformers.GenerationConfig(max_new_tokens=4, do_sample=True, temperature=9.0, num_return_sequences=3)
    report = rollouts.check(model, tokenizer, MIXED, generation_config=config)
    assert report == greedy
    assert check(model, tokenizer, do_sample=True, temperature=9.0) == report
    assert model.generation_config.temperature == 5.0


def test_a_tie_that_rounding_decides_is_no_disagreement(model, tokenizer):
    seven, eight = (tokenizer(text)["input_ids"][0] for text in "78")
    tied = copy.deepcopy(model)
    with torch.no_grad():
        weight = tied.get_output_embeddings().weight
        weight[eight] = weight[seven]
    calls = []

    def generate(input_ids, attention_mask, **_):
        """Take 7 in the first call and 8 in the second, with the probabilities of `policy`."""
        calls.append(0)
        chosen = torch.full((len(input_ids), 1), seven if len(calls) % 2 else eight)
        logits = policy(input_ids=input_ids, attention_mask=attention_mask).logits[:, -1]
        return types.SimpleNamespace(sequences=torch.cat([input_ids, chosen], 1), logits=(logits,))

    ids, mask = _greedy.encode(model, tokenizer, ["3+4="], 4)
    policy = tied
    report = rollouts.compare(tied, tokenizer, ids, mask, generate=generate)
    assert report.agrees and report.agreeing == 0 and report.rollouts[0].training == "7"
    assert rollouts.compare(model, tokenizer, ids, mask, generate=generate).error > 0.1  # another model's numbers


def test_the_same_completions_from_other_probabilities_are_a_disagreement(model, tokenizer):
    """Greedy completions can be right by luck; sampling from wrong probabilities is wrong all the same."""
    hook = model.register_forward_hook(
        lambda module, args, output: setattr(output, "logits", output.logits * 2) if module.training else None
    )
    report = check(model, tokenizer)
    hook.remove()
    assert report.agreeing == len(MIXED) and not report.agrees and report.mean_error > 0.01


def test_the_log_probability_is_that_of_the_tokens(model, tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    report = rollouts.check(model, tokenizer, "3+4=", max_new_tokens=4)  # a plain string is one prompt
    ids = tokenizer("3+4=" + report.rollouts[0].evaluation)["input_ids"] + [tokenizer.eos_token_id]
    with torch.no_grad():
        logps = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
    expected = torch.stack([logps[at - 1, ids[at]] for at in range(4, len(ids))]).mean().item()
    assert report.evaluation_logp == pytest.approx(expected, abs=1e-4)
    tokenizer.padding_side = "right"  # a batch is padded on the left all the same
    report = check(model, tokenizer, [models.as_chat("3+4="), models.as_chat("12+5=")])  # by the chat template
    assert report.agrees and len(report.rollouts) == 2 and report.rollouts[0].prompt != "3+4="


@pytest.mark.parametrize(
    "prompts, new_tokens, message",
    [
        (["3+4=", "1" * 512], 4, "prompt 1 does not fit"),
        (["3+4="], 512, "max_new_tokens="),
        ([], 4, "no prompts"),
        (["3+4=", ""], 4, "prompt 1 .* has no tokens"),
    ],
)
def test_prompts_that_cannot_be_completed_are_errors(model, tokenizer, prompts, new_tokens, message):
    assert model.config.max_position_embeddings == 512
    with pytest.raises(ValueError, match=message):
        rollouts.check(model, tokenizer, prompts, max_new_tokens=new_tokens)
    with pytest.raises(AttributeError, match="has no method generate"):
        rollouts.repair(torch.nn.Linear(1, 1))


SHOWN = torch.tensor([[0, 0, 31, 31, 31, 31, 5, 6], [31, 31, 31, 31, 7, 8, 9, 4], [0, 31, 31, 31, 31, 7, 8, 9]])
SHOWN_MASK = (torch.arange(8)[None] >= torch.tensor([[2], [0], [1]])).long()


def images(count=3):
    return torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def judged(model, tokenizer, ids=SHOWN, mask=SHOWN_MASK, guard=None, **inputs):
    """Generate as a trainer does, under a guard; return the guard and what it warned of."""
    guard = guard or RolloutGuard("warn", max_new_tokens=4)
    arguments = types.SimpleNamespace(bf16=False, fp16=False)
    with said() as messages:
        guard.on_train_begin(arguments, None, None, model=model, processing_class=tokenizer)
        model.train().generate(input_ids=ids, attention_mask=mask, max_new_tokens=4, pad_token_id=0, **inputs)
        guard.on_train_end(arguments, None, None)
    return guard, messages


@pytest.mark.parametrize("checkpointing", [False, True])
def test_tokens_are_scored_with_the_images_of_their_prompt(tokenizer, checkpointing):
    """Scored without its image a healthy run was stopped: each token had another probability than it was drawn with."""
    model = llava()
    if checkpointing:
        checkpoint(model, reentrant=False)
    guard, messages = judged(model, tokenizer, pixel_values=images())
    assert guard.report is not None and len(guard.report.rollouts) == 3
    if not checkpointing:
        assert guard.report.agrees and guard.report.error < 1e-4 and not messages
    elif DROPPED_CACHE:
        assert not guard.report.agrees and len(messages) == 1
    other = rollouts.compare(
        model, tokenizer, SHOWN, SHOWN_MASK, pixel_values=images().flip(0), max_new_tokens=4, pad_token_id=0
    )
    assert abs(other.evaluation_logp - guard.report.evaluation_logp) > 1e-3


@pytest.mark.parametrize(
    ("rows", "known"),
    [
        ([[31] * 8 + [5], [0] * 7 + [6, 7], [0] * 4 + [31] * 4 + [7]], True),  # two images, none, one
        ([[31] * 6 + [5], [31] * 6 + [7]], False),  # one and a half each
    ],
)
def test_prompts_with_other_numbers_of_images_are_scored_with_theirs(tokenizer, rows, known):
    """Whose an image is follows from the tokens that stand for it; where it does not, nothing is accused."""
    ids = torch.tensor(rows)
    guard, messages = judged(llava(), tokenizer, ids, (ids != 0).long(), pixel_values=images())
    if known:
        assert guard.report.agrees and guard.report.error < 1e-4 and not messages
    else:
        assert guard.report is None and len(messages) == 1 and "could not check" in messages[0]
