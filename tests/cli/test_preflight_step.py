"""Whole scripts beside the textbook: what only a script brings, and a healthy one with all that is cut."""

import pytest
from tests.cli.benchmark_scripts import load
from tests.cli.one_session import script, scripts

from failurelab_course import eras
from failurelab_preflight.finding import CUT

pytestmark = pytest.mark.slow
CORPUS = load("preflight_corpus")

OWN = """
class Own(GRPOTrainer):
    pass

again = {"num_iterations": 2} if "num_iterations" in GRPOConfig.__dataclass_fields__ else {}

"""
MORE = "beta=0.0, temperature=1.0, gradient_accumulation_steps=4, **again"
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
"""
OTHER_REFERENCE = """
from transformers import TrainerCallback

class Other(TrainerCallback):
    def on_train_begin(self, args, state, control, **_):
        for weight in trainer.ref_model.parameters():
            weight.data.mul_(0.5)
"""
EQUAL = "lambda completions, **_: [1.0] * len(completions)"


def of_own(before="", config=MORE, **more):
    return script(OWN + before, kind="Own", config=config, **more)


@pytest.fixture(scope="module", params=["trl-0.14", "today"])
def run(request, tmp_path_factory):
    """Return a function that runs a script beside the small model, in one stack."""
    folder = tmp_path_factory.mktemp("step")
    CORPUS.make_folder(folder)
    variables = {"HF_DATASETS_CACHE": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        with scripts(folder, "from trl import GRPOTrainer\n", eras.find(request.param).python, variables) as run:
            yield run


def of(failure, answers):
    return next(each for each in answers if each.failure == failure)


WRONG = {
    "F21": of_own(ABSOLUTE),  # a loss without its sign, where it lies below zero
    "F14": of_own(MUTE),  # reward functions read what was not drawn
    # It was compared before the callback changes it.
    "F19": of_own(OTHER_REFERENCE, "beta=0.1, temperature=1.0", more="callbacks=[Other()],"),
    "F10": of_own(reward=EQUAL),
}


@pytest.mark.parametrize("failure", WRONG)
def test_what_only_a_script_brings_is_found(failure, run):
    result = run(WRONG[failure])
    accused = {each.failure for each in result.findings if each.accuses}
    assert accused and accused <= ({"F10", "F14"} if failure == "F10" else {failure})
    assert (failure == "F21") is ("F21" not in {each.failure for each in result.held})  # compared with other rewards


def test_a_healthy_script_is_accused_of_nothing(run):
    """Four accumulated batches and two iterations are cut to two of each."""
    result = run(of_own())
    held = of("F21", result.held)
    assert not any(each.accuses for each in result.findings)
    assert "cosine +1.0000" in held.evidence and "opposite sign" in held.control


def test_an_error_for_want_of_the_engine_that_is_cut_away_is_not_told_as_the_script_s(run):
    """A loss that reads what vLLM gives beside its tokens: the stand-in has none, which was told as a TypeError."""
    result = run(of_own(ENGINE, "use_vllm=True"))
    ended = of("cut", result.not_checked)
    assert not result.error and ended.ends and ended.origin == CUT and "use_vllm" in ended.why
    assert not any(each.accuses for each in result.findings)
