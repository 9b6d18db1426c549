"""Whole scripts beside the textbook: what only a script brings, and a healthy one with all that is cut."""

import pytest
from tests.cli.benchmark_scripts import load
from tests.cli.one_session import scripts

from failurelab_course import eras
from failurelab_preflight.finding import CUT

pytestmark = pytest.mark.slow
CORPUS = load("preflight_corpus")

SCRIPT = """
from datasets import Dataset
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
MORE = """
again = {"num_iterations": 2} if "num_iterations" in GRPOConfig.__dataclass_fields__ else {}
options, more = {"gradient_accumulation_steps": 4, **again}, {}
"""
ABSOLUTE = """
def absolute(self, *args, **kwargs):
    return GRPOTrainer.compute_loss(self, *args, **kwargs).abs()

Own.compute_loss = absolute
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
ENGINE = """
def of_the_engine(self, *args, **kwargs):
    engine_logps = getattr(self, "engine_logps", None)
    return GRPOTrainer.compute_loss(self, *args, **kwargs) * engine_logps[0]

Own.compute_loss = of_the_engine
options, more = {"use_vllm": True}, {}
"""
OTHER_REFERENCE = """
from transformers import TrainerCallback

class Other(TrainerCallback):
    def on_train_begin(self, args, state, control, **_):
        for weight in trainer.ref_model.parameters():
            weight.data.mul_(0.5)

options, more = {}, {"callbacks": [Other()]}
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


def of(failure, answers):
    return next(each for each in answers if each.failure == failure)


WRONG = {
    "F21": ABSOLUTE + MORE + GRPO,  # a loss without its sign, where it lies below zero
    "F14": MUTE + MORE + GRPO,  # reward functions read what was not drawn
    "F19": OTHER_REFERENCE + GRPO.replace("beta=0.0", "beta=0.1"),  # it was compared before the callback changes it
    "F10": EQUAL + MORE + GRPO,
}


@pytest.mark.parametrize("failure", WRONG)
def test_what_only_a_script_brings_is_found(failure, run):
    result = run(WRONG[failure])
    accused = {each.failure for each in result.findings if each.accuses}
    assert failure in accused and accused <= {failure, "F14"}
    assert (failure == "F21") is ("F21" not in {each.failure for each in result.held})  # compared with other rewards


def test_a_healthy_script_is_accused_of_nothing(run):
    """Four accumulated batches and two iterations are cut to two of each."""
    result = run(MORE + GRPO)
    held = of("F21", result.held)
    assert not any(each.accuses for each in result.findings)
    assert "cosine +1.0000" in held.evidence and "opposite sign" in held.control


def test_an_error_for_want_of_the_engine_that_is_cut_away_is_not_told_as_the_script_s(run):
    """A loss that reads what vLLM gives beside its tokens: the stand-in has none, which was told as a TypeError."""
    result = run(ENGINE + GRPO)
    ended = of("cut", result.not_checked)
    assert not result.error and ended.ends and ended.origin == CUT and "use_vllm" in ended.why
    assert not any(each.accuses for each in result.findings)
