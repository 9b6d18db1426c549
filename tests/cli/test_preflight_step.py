"""Whole scripts beside the textbook: three mistakes that a public benchmark plants in a trainer, and healthy ones."""

import pytest
from tests.cli.benchmark_scripts import load
from tests.cli.one_session import scripts

from failurelab_course import eras

pytestmark = pytest.mark.slow
CORPUS = load("preflight_corpus")

SCRIPT = """
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

path = "models/tiny-qwen2"
tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
rows = [(a, b) for a in range(10) for b in range(10)]
data = {"prompt": [f"{a}+{b}=" for a, b in rows], "answer": [str(a + b) for a, b in rows]}


def right(completions, answer, **_):
    return [float(text.strip() == each) for text, each in zip(completions, answer)]


class Own(GRPOTrainer):
    pass


"""
GRPO = """
trainer = Own(
    model=AutoModelForCausalLM.from_pretrained(path),
    args=GRPOConfig("out", beta=0.0, temperature=1.0, learning_rate=1e-5, gradient_checkpointing=False,
                    per_device_train_batch_size=8, num_generations=4, max_completion_length=6, **options),
    train_dataset=Dataset.from_dict(data), processing_class=tokenizer, reward_funcs=right, **more,
)
trainer.train()
"""
PLAIN = "options, more = {'gradient_accumulation_steps': 1}, {}\n"
LORA = """
options = {"gradient_accumulation_steps": 1}
more = {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")}
"""
MORE = """
again = {"num_iterations": 2} if "num_iterations" in GRPOConfig.__dataclass_fields__ else {}
options, more = {"gradient_accumulation_steps": 4, **again}, {}
"""
# Release 0.14 computes log-probabilities and advantages inside its loss, so there the loss is what can be overridden.
REVERSED = """
def reversed_logps(self, *args, **kwargs):
    logps, *rest = self.parent(*args, **kwargs)
    return -logps, *rest

def reversed_loss(self, *args, **kwargs):
    return -GRPOTrainer.compute_loss(self, *args, **kwargs)

name = "_get_per_token_logps_and_entropies"
if hasattr(GRPOTrainer, name):
    Own.parent, Own._get_per_token_logps_and_entropies = getattr(GRPOTrainer, name), reversed_logps
else:
    Own.compute_loss = reversed_loss
"""
DIVIDED = """
def divided(self, *args, **kwargs):
    batch = GRPOTrainer._generate_and_score_completions(self, *args, **kwargs)
    return batch | {"advantages": batch["advantages"] / 10_000}

def divided_loss(self, *args, **kwargs):
    return GRPOTrainer.compute_loss(self, *args, **kwargs) / 10_000

if hasattr(GRPOTrainer, "_generate_and_score_completions"):
    Own._generate_and_score_completions = divided
else:
    Own.compute_loss = divided_loss
"""
ABSOLUTE = """
def absolute(self, *args, **kwargs):
    return GRPOTrainer.compute_loss(self, *args, **kwargs).abs()

Own.compute_loss = absolute
"""
UNCHANGED = ABSOLUTE.replace(".abs()", " * 1.0")
MUTE = """
class Mute(type(tokenizer)):
    def decode(self, ids, *args, **kwargs):
        text = super().decode(ids, *args, **kwargs)
        texts = text if isinstance(text, list) else [text]
        told = [each.partition("</think>")[2] for each in texts]
        return told if isinstance(text, list) else told[0]

    def batch_decode(self, ids, *args, **kwargs):
        return [self.decode(each, *args, **kwargs) for each in ids]

tokenizer.__class__ = Mute
"""
OTHER_REFERENCE = """
from transformers import TrainerCallback

class Other(TrainerCallback):
    def on_train_begin(self, args, state, control, **_):
        for weight in trainer.ref_model.parameters():
            weight.data.mul_(0.5)

options, more = {"gradient_accumulation_steps": 1}, {"callbacks": [Other()]}
"""
EQUAL = "right = lambda completions, **_: [1.0] * len(completions)\n"


@pytest.fixture(scope="module", params=["trl-0.14", "today"])
def run(request, tmp_path_factory):
    """Return a function that runs a script beside the small model, in one stack."""
    folder = tmp_path_factory.mktemp("step")
    CORPUS.make_folder(folder)
    variables = {"HF_DATASETS_CACHE": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        with scripts(folder, SCRIPT, eras.find(request.param).python, variables) as run:
            yield run


def accused(result):
    """Return what a run says against a script."""
    return [each for each in result.findings if each.accuses]


def of(failure, answers):
    return next(each for each in answers if each.failure == failure)


@pytest.mark.parametrize(
    ("mistake", "failure", "said"),
    [
        (REVERSED, "F21", "Named: opposite sign"),
        (DIVIDED, "F21", "Named: constant factor, times"),
        (ABSOLUTE, "F21", "cosine"),  # it shows where a loss lies below zero alone
        (MUTE, "F14", "what your reward functions read is not what was drawn"),
    ],
)
def test_a_planted_mistake_is_found_and_named(mistake, failure, said, run):
    (found,) = accused(run(mistake + PLAIN + GRPO))
    assert found.failure == failure and said in found.evidence


@pytest.mark.parametrize("options", [PLAIN, LORA, MORE, UNCHANGED + PLAIN])
def test_a_healthy_script_holds(options, run):
    result = run(options + GRPO)
    held = of("F21", result.held)
    assert not [each for each in result.findings if each.accuses]
    assert "cosine +1.0000" in held.evidence and "opposite sign" in held.control


def test_a_reference_that_a_callback_changes_as_training_begins(run):
    """It was compared before that, and F19 was HELD."""
    (found,) = accused(run(OTHER_REFERENCE + GRPO.replace("beta=0.0", "beta=0.1")))
    assert found.failure == "F19" and "apart by" in found.evidence


def test_equal_rewards_are_f10_and_the_step_is_compared_with_others(run):
    result = run(EQUAL + PLAIN + GRPO)
    assert {"F10", "F14"} & {each.failure for each in accused(result)} and of("F21", result.held)
