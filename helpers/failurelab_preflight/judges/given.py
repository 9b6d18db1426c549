"""What the libraries themselves say of arguments as they were given, and rows that all have one prompt."""

import traceback
from collections.abc import Iterator

from failurelab_preflight.answer import Finding
from failurelab_preflight.judges.rows import generates, prompted
from failurelab_preflight.rewards.forms import last_text
from failurelab_preflight.rewards.table import quote
from failurelab_preflight.training import Training

FAILURE = "given"
_ROWS = 256  # whose prompts are read


def refused(error: BaseException) -> Iterator[Finding]:
    """Yield what an error says that refuses training arguments while they are made."""
    through = [frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)]
    if isinstance(error, ValueError) and "__post_init__" in through:
        said = f"these training arguments are refused: {' '.join(str(error).split())}"
        yield Finding(FAILURE, said, "Set them as it asks for.", ends=True, part="arguments")


def judge_dataset(training: Training) -> Iterator[Finding]:
    """Note rows that all have one prompt."""
    prompts = [row["prompt"] for row in prompted(training, _ROWS)] if generates(training.trainer) else []
    if len({repr(prompt) for prompt in prompts}) == 1:
        training.notes.append(f"all {len(prompts)} rows that were read have one prompt, {quote(last_text(prompts[0]))}")
    yield from ()
