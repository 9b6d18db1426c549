"""Notebook 09: in bfloat16 hardly a weight changes, and those that cannot move do not; in float32 all do."""


def check(result):
    rounded, fine = (result.figures(case=f"notebook 09: {name}") for name in ("bfloat16", "float32"))
    assert 0 < rounded["changed"] < 0.1 < 0.9 < fine["changed"]
    assert abs(fine["rounded"] - rounded["changed"]) < 0.02  # by one line of notebook 00's step
    assert 0 < rounded["predicted"] < 0.1 and rounded["moved_against_it"] < 0.02
    formats = result.figures(case="notebook 09: formats")
    wide, narrow = "torch.float32", "torch.bfloat16"
    assert formats["then"] == formats["today, a name for GRPOTrainer"] == wide
    assert formats["today, from_pretrained"] == formats["the same, and bf16=True"] == narrow
    assert formats["grades"] == ["lost", "slowed", "lost"]  # at 1e-6, and at 3e-5 by two bounds
    assert formats["gain"] > 0.03


# Wrong answers to the exercise.

WRONG = [
    ("def can_move(weights, step):\n    return weights + step != weights", "Below a power of two"),
    ("def can_move(weights, step):\n    return step > weights.abs() / 512", "The format is the tensor's own"),
    (
        "def can_move(weights, step):\n"
        "    import torch\n"
        "    return (weights.to(torch.bfloat16) + step != weights) | (weights.to(torch.bfloat16) - step != weights)",
        "The format is the tensor's own",
    ),
    (
        "def can_move(weights, step):\n"
        "    import torch\n"
        "    eps = torch.finfo(weights.dtype).eps\n"
        "    spacing = eps * 2.0 ** weights.double().abs().log2().floor()\n"
        "    below = eps * 2.0 ** ((weights.double().abs().log2() - 1e-9).floor())\n"
        "    return step >= below / 2",
        "A sum in the very middle",
    ),
    ("def can_move(weights, step):\n    return ((weights + step) != weights).float().mean()", "it returned"),
    (
        "def can_move(weights, step):\n    return (weights.double() + step != weights.double())",
        "The step is less than half of the spacing",
    ),
    ("def can_move(weights, step):\n    return (weights - step) != weights", "and a step up -1.0"),
    (
        "def can_move(weights, step):\n    double = weights.double()\n"
        "    return [bool((w + s).to(weights.dtype) != w) for w, s in zip(double, [step] * len(double))]",
        "and tensor([False]), with `weights` as they came, is right",
    ),
    (
        "def can_move(weights, step):\n    return ((w.double() + step).to(weights.dtype) != w for w in weights)",
        "(generator), and tensor([False])",
    ),
    (
        "def can_move(weights, step):\n"
        "    old = weights.clone()\n"
        "    weights.copy_(old.double() + step)\n"
        "    up = weights != old\n"
        "    weights.copy_(old.double() - step)\n"
        "    return up | (weights != old)",
        "1 of 6 cases. At “0.05 and 0.001, and 3e-5” it returned",
    ),
    ("def can_move(weights, step):\n    return weights * (1 + step) != weights", "the step is added: it is no factor"),
]
RIGHT = [
    "def can_move(weights, step):\n"
    "    return ((weights.double() + step).to(weights.dtype) != weights) | "
    "((weights.double() - step).to(weights.dtype) != weights)"
]

# The diff: nearly all weights change, and the model is better than before training. The checkpoint of the notebook is
# in bfloat16, as those of a hub are. With LoRA nothing is broken before: PEFT makes the adapters in float32, which
# the notebook shows.

BEFORE = """
import tempfile, torch
from transformers import AutoModelForCausalLM, AutoTokenizer

hub = tempfile.TemporaryDirectory()
for kind, options in ((AutoModelForCausalLM, {"dtype": torch.bfloat16}), (AutoTokenizer, {})):
    kind.from_pretrained(model_path, **options).save_pretrained(hub.name)
model_path = hub.name
"""

MEASURE = """
import torch

prompts, answers = map(list, zip(*sums))


def by_hand(policy):
    batch = tokenizer(prompts * 3, return_tensors="pt", padding=True).to(policy.device)
    torch.manual_seed(0)
    with torch.no_grad():
        ids = policy.eval().generate(**batch, max_new_tokens=4, do_sample=True)
    texts = tokenizer.batch_decode(ids[:, batch.input_ids.shape[1]:], skip_special_tokens=True)
    return sum(correct(texts, answers * 3)) / len(texts)


start, trained = (AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32) for _ in range(2))
trained.load_state_dict(trainer.model.state_dict())
then = dict(start.named_parameters())
changed = sum(int((weight != then[name]).sum()) for name, weight in trained.named_parameters())
metrics = {"share": changed / start.num_parameters(), "before": by_hand(start), "after": by_hand(trained)}
healed = metrics["share"] > 0.9 and metrics["after"] > metrics["before"] + 0.03
"""
LORA = None
SHORT_BROKEN = [("max_steps=80", "max_steps=10")]
