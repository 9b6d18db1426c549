"""Options that a script keeps elsewhere are read as if they stood in the call; what is computed stays unknown."""

import pytest

from failurelab.diagnose.script import ScriptError, read_script

HEAD = "from trl import GRPOConfig, GRPOTrainer\n"
TAIL = "trainer = GRPOTrainer(model='my/model', reward_funcs=exact, args=args, train_dataset=rows)\n"
DIRECT = "args = GRPOConfig(temperature=0.7, beta=0.1, gradient_checkpointing=True)\n"
WRITTEN = {
    "keywords": DIRECT,
    "a dict": """
CONFIG = {'temperature': 0.7, 'beta': 0.1, 'gradient_checkpointing': True}
args = GRPOConfig(**CONFIG)
""",
    "dict()": """
base = dict(temperature=0.7)
args = GRPOConfig(**base, **dict(beta=0.1, gradient_checkpointing=True))
""",
    "two dicts": """
base = {'temperature': 1.0, 'beta': 0.1}
args = GRPOConfig(**{**base, 'temperature': 0.7, 'gradient_checkpointing': True})
""",
    "entries": """
c = {'t': 0.7, 'b': 0.1}
args = GRPOConfig(temperature=c['t'], beta=c['b'], gradient_checkpointing=True)
""",
    "yaml": """
args = GRPOConfig(**yaml.safe_load('temperature: 0.7\\nbeta: 1e-1  # small\\ngradient_checkpointing: true\\n'))
""",
    "json": """
TEXT = '{"temperature": 0.7, "beta": 0.1, "gradient_checkpointing": true}'
args = GRPOConfig(**json.loads(TEXT))
""",
    "a dataclass": """
@dataclass
class Settings:
    heat: float = 0.7
    beta: float = field(default=0.1)

s = Settings()
args = GRPOConfig(temperature=s.heat, beta=s.beta, gradient_checkpointing=True)
""",
    "a changed dataclass": """
@dataclass
class Settings:
    temperature: float = 1.0
    beta: float = 0.1

s = Settings(temperature=0.7)
args = GRPOConfig(**asdict(s), gradient_checkpointing=True)
""",
    "argparse": """
p = argparse.ArgumentParser()
p.add_argument('--temperature', type=float, default=0.7)
p.add_argument('--kl-beta', default=0.1)
p.add_argument('--no_checkpointing', dest='gc', action='store_false')
o = p.parse_args()
args = GRPOConfig(temperature=o.temperature, beta=o.kl_beta, gradient_checkpointing=o.gc)
""",
}


@pytest.mark.parametrize("form", WRITTEN)
def test_options_are_read_however_they_are_written(form):
    figures = read_script(HEAD + WRITTEN[form] + TAIL, {"trl": "0.14.0"})
    assert (figures["option_temperature"], figures["option_beta"]) == (0.7, 0.1)
    assert figures["checkpointing"] is True


@pytest.mark.parametrize(
    "text", ["args = GRPOConfig(**load(path))\n", "args = GRPOConfig(temperature=choose(), beta=b)\n"]
)
def test_what_is_computed_is_unknown(text):
    figures = read_script(HEAD + text + TAIL, {"trl": "0.14.0"})
    assert figures["option_temperature"] is None and figures["option_beta"] is None


def test_a_subclass_and_a_reward_object_are_seen_through():
    """The trainer by its base, the reward by its __call__, which reads no completion here."""
    own = """
class Mine(GRPOTrainer):
    pass

class Reward:
    def __call__(self, prompts, **kwargs):
        return [1.0] * len(prompts)
"""
    tail = TAIL.replace("GRPOTrainer(", "Mine(").replace("exact", "[Reward()]")
    figures = read_script(HEAD + own + DIRECT + tail, {})
    assert figures["script_trainer"] == "GRPOTrainer"
    assert figures["reward_read"] and figures["reward_ignores_completion"]


def test_the_dtype_of_a_model_that_the_trainer_loads():
    text = "args = GRPOConfig(model_init_kwargs={'dtype': 'bfloat16'})\n"
    assert read_script(HEAD + text + TAIL, {})["model_dtype"] == "bfloat16"
    assert read_script(HEAD + DIRECT + TAIL, {})["model_dtype"] == "by trainer"


def test_no_python_is_said():
    with pytest.raises(ScriptError, match="no Python"):
        read_script("args = (", {})
