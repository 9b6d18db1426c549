"""Whole scripts beside the textbook: three mistakes that a public benchmark plants in a trainer, and healthy ones."""

import pathlib

import pytest
from tests.cli.benchmark_scripts import load

from failurelab.preflight import command, launcher_line
from failurelab_course import eras

pytestmark = pytest.mark.slow
CORPUS = load("preflight_corpus")
STACKS = ["trl-0.14", "today"]

SCRIPT = """
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

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
EQUAL = "right = lambda completions, **_: [1.0] * len(completions)\n"
SFT = """
texts = {"text": [f"{a}+{b}={a + b}" for a, b in rows]}
trainer = SFTTrainer(model=AutoModelForCausalLM.from_pretrained(path), args=SFTConfig("out"),
                     train_dataset=Dataset.from_dict(texts), processing_class=tokenizer)
trainer.train()
"""


@pytest.fixture(params=STACKS)
def ask(request, tmp_path, monkeypatch):
    """Return a function that asks preflight about a script, beside the small model, in one stack."""
    CORPUS.make_folder(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    python = str(eras.find(request.param).python)

    def judge(*parts):
        pathlib.Path("train.py").write_text(SCRIPT + "".join(parts))
        told = command.ask(launcher_line.Launch("train.py"), python=python)
        return told, {answer["failure"]: answer for answer in (*told.accusations, *told.held, *told.not_checked)}

    return judge


@pytest.mark.parametrize(
    ("mistake", "failure", "said"),
    [
        (REVERSED, "F21", "Named: opposite sign"),
        (DIVIDED, "F21", "Named: constant factor, times"),
        (MUTE, "F14", "what your reward functions read is not what was drawn"),
    ],
)
def test_a_planted_mistake_is_found_and_named(mistake, failure, said, ask):
    """By its cause; and where a method of the script's own is the mistake, its parent's heals."""
    told, _ = ask(mistake, PLAIN, GRPO)
    assert [found["failure"] for found in told.accusations if found["failure"] != "F3a"] == [failure], told.accusations
    assert said in told.accusations[0]["evidence"]
    # With the overridden method taken out the gradient is the textbook's; what decodes has no undo.
    assert [found["failure"] for found in told.findings if found["failure"] != "F3a"] == [failure] * (failure == "F21")


@pytest.mark.parametrize("options", [PLAIN, LORA, MORE])
def test_a_healthy_script_holds(options, ask):
    told, answers = ask(options, GRPO)
    assert told.accusations == [] and "F21" in [answer["failure"] for answer in told.held], answers["F21"]
    assert "cosine +1.0000" in answers["F21"]["evidence"] and "opposite sign" in answers["F21"]["control"]


def test_equal_rewards_are_f10_and_the_step_is_compared_with_others(ask):
    told, answers = ask(EQUAL, PLAIN, GRPO)
    assert {"F10", "F14"} & {found["failure"] for found in told.accusations}
    assert answers["F21"] in told.held


def test_another_trainer_has_no_textbook(ask):
    _, answers = ask(SFT)
    assert "no textbook here for SFTTrainer" in answers["F21"]["why"]
