"""A log is looked up: errors before notices, the line is shown, and a text that healthy runs print is no verdict."""

import pytest

from failurelab import failures
from failurelab.failures import symptoms

LOG = """\
  0%|          | 0/100 [00:00<?, ?it/s]/home/me/lib/python3.11/site-packages/torch/utils/checkpoint.py:87: UserWarning:
None of the inputs have requires_grad=True.
    Gradients will be None
  warnings.warn(
"""
NOTICE = "`use_cache=True` is incompatible with gradient checkpointing. Setting `use_cache=False`."
ELEMENT = "RuntimeError: element 0 of tensors does not require grad and does not have a grad_fn"


def ids(text):
    return [match.failure.id for match in symptoms.find_matches(text.splitlines(keepends=True))]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (LOG, ["F1"]),
        (LOG + NOTICE, ["F7", "F1"]),
        (NOTICE + "\n" + LOG + ELEMENT, ["F2", "F7", "F23", "F1"]),  # errors first, wherever it stands
        ("None of the inputs have requires_grad=True", ["F1"]),  # cut short by the reader
        ("AttributeError: 'LlamaForCausalLM' object has no attribute 'optimizer'", ["F4"]),
        ("AttributeError: 'MyTrainer' object has no attribute 'optimizer'", []),
        ("ValueError: generation_batch_size (6) must be divisible by num_generations (8).", ["F22"]),
        ("loss: 0.3", []),
    ],
)
def test_what_a_text_finds(text, expected):
    assert ids(text) == expected


def test_the_line_is_shown_with_its_number():
    """In a log of many lines too; the text may stand across two of them."""
    lines = [f"step {number}\n" for number in range(30_000)]
    lines[25_000:25_000] = ["[rank0]: element 0 of tensors does not\n", "require grad and does not have a grad_fn\n"]
    first, second = symptoms.find_matches(lines)
    assert (first.failure.id, first.number) == ("F2", 25_001)
    assert (second.failure.id, second.number) == ("F23", 25_001)  # prints the same, and says what decides
    assert "line 25001: [rank0]: element 0 of tensors does not" in symptoms.describe(lines)


@pytest.mark.parametrize(
    ("text", "decides"),
    [
        (LOG, "guards.GradientGuard()"),
        (NOTICE, "guards.RolloutGuard()"),
        ("AttributeError: 'DeepSpeedZeRoOffload' object has no attribute 'optimizer'", "evaluate() before train()"),
    ],
)
def test_a_text_that_healthy_runs_print_is_no_verdict(text, decides):
    """What decides is said, and no repair is prescribed; one that only failing runs print comes with its check."""
    answer = symptoms.describe([text])
    assert "no verdict: " in answer and decides in answer and "repair: " not in answer
    answer = symptoms.describe(["ValueError: generation_batch_size (6) must be divisible by num_generations (8)."])
    assert f"check: {failures.get('F22').check}" in answer and "repair: " in answer and "no verdict: " not in answer


LINE = "{{'loss': '{}', 'grad_norm': '{}', 'reward': '0.4', '{}'}}\n"
FLAT, HEALTHY = "nothing to learn from", "is healthy"
WARNING = "/lib/guards/base.py:108: GuardWarning: "


@pytest.mark.parametrize(
    ("text", "said", "not_said"),
    [
        # zeros everywhere are no sign of a missing gradient: there is nothing to learn from
        (LINE.format(0, 0, "reward_std': '0") * 3, FLAT, HEALTHY),
        (LINE.format(0, 0, "reward_std': '0") + LINE.format(0, 0.2, "reward_std': '0.1"), HEALTHY, FLAT),
        # a loss of 0 with a gradient, in the log or in a reader's words
        (LINE.format("-1.2e-08", 0.13, "reward_std': '0.1") * 4, HEALTHY, FLAT),
        (LINE.format(0.8, 0.13, "reward_std': '0.1") * 4, "None of the known texts", HEALTHY),
        ("the loss stays at 0 from the first step on", HEALTHY, FLAT),
        ("loss: 0.03", "None of the known texts", HEALTHY),
        # a new name is no failure
        ("FutureWarning: `gradient_checkpointing` is deprecated and will be removed in v6.", "no failure", HEALTHY),
        # what guards said
        (WARNING + "GradientGuard: the optimizer holds 0 of 8 trainable tensors", "F1, F2, F23", HEALTHY),
        ("failurelab.guards.base.GuardTripped: RewardGuard: all 0", "RewardGuard measured in this run: all 0", FLAT),
        (WARNING + "StepGuard: could not check: no reward", "StepGuard judged nothing: no reward", "measured"),
        ("INFO:failurelab.guards:StepGuard: step 1: cosine +1.0000", "None of the known texts", "measured"),
    ],
)
def test_what_figures_and_guards_say(text, said, not_said):
    answer = symptoms.describe(text.splitlines(keepends=True))
    assert said in answer and not_said not in answer


@pytest.mark.parametrize("failure", failures.all(), ids=lambda failure: failure.id)
def test_each_text_of_the_registry_is_found_where_lines_wrap(failure):
    for text in failure.symptoms:
        wrapped = "step 3\n[rank0]: " + text.replace(" ", "\n", 1) + "\nstep 4"
        assert f"{failure.id}: {failure.title}" in symptoms.describe(wrapped.splitlines(keepends=True))


@pytest.mark.parametrize(
    ("content", "answer"),
    [
        (("\ufeff" + LOG).encode("utf-16"), "F1: "),
        (b"caf\xe9 " + ELEMENT.encode("latin-1"), "F2: "),
        (b"", "is empty"),
        (b"\n \n", "is empty"),
        (b"\x7fELF\0\0\0", "is no text"),
        (None, "cannot be read"),
    ],
)
def test_logs_of_any_kind(tmp_path, content, answer):
    log = tmp_path / "train.log"
    if content is not None:
        log.write_bytes(content)
    try:
        assert answer in symptoms.describe(symptoms.read_log(log))
    except symptoms.LogError as error:
        assert answer in str(error) and "Next: " in str(error) and error.exit_status == 2
