"""The textbook under trl's other options: each holds in a healthy run, and a mistake in it is found."""

import functools

import pytest
import torch
import transformers
import trl
from steps import before, compare, compare_steps, has, holds, ones, planted, trainer

pytestmark = pytest.mark.slow
SYNCED = {"sync_ref_model": True, "ref_model_sync_steps": 2, "beta": 0.1, "learning_rate": 1e-2}
COMPILED = {"torch_compile": True, "torch_compile_backend": "eager"}
# A cache of few blocks: by default it takes a share of all memory.
BATCHED = {
    "use_transformers_continuous_batching": True,
    "transformers_continuous_batching_config": {"num_blocks": 64, "max_batch_tokens": 64},
}
AGAIN = {"num_iterations": 3, "learning_rate": 5e-3, "beta": 0.1}
LUSPO = AGAIN | {"loss_type": "luspo", "importance_sampling_level": "sequence"}
VESPO = AGAIN | {"loss_type": "vespo"}


@pytest.fixture
def make(model, tokenizer, tmp_path):
    return lambda **options: trainer(model, tokenizer, tmp_path, **{"rewards": [ones]} | options)


def in_16_bits(made):
    """Let a trainer scale its loss as on a GPU: accelerate makes no scaler for a CPU, and computes in float32."""
    made.accelerator.scaler, made.accelerator.native_amp = torch.amp.GradScaler("cpu"), True
    return made


def needs(name):
    return pytest.mark.skipif(not has(name), reason=f"this release has no {name}")


# Releases before TRL #6654 (August 2026) train padding at the level of tokens, and earlier ones have no such loss.
MASKED = pytest.mark.skipif(before("1.16"), reason="this release has no such loss, or trains it on padding")


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"generation_kwargs": {"top_k": 5, "top_p": 0.9}}, 1),
        ({"neftune_noise_alpha": 0.1}, 1),
        (COMPILED, 1),
        (SYNCED, 3),
        pytest.param(VESPO, 3, marks=needs("vespo_k_pos")),
        pytest.param(LUSPO, 3, marks=MASKED),
        pytest.param(BATCHED, 1, marks=needs("use_transformers_continuous_batching")),
    ],
)
def test_a_healthy_run_holds(options, steps, make):
    if not set(options) <= set(trl.GRPOConfig.__dataclass_fields__):
        pytest.skip("this release has no such option")
    reports = compare_steps(make(**options, max_steps=steps), range(1, steps + 1))
    assert len(reports) == steps
    assert all(map(holds, reports)), reports
    if "neftune_noise_alpha" in options:
        assert reports[0].floor.cosine > 0, "no noise was drawn"


@pytest.mark.skipif(before("0.22"), reason="this release asks for a GPU")
@pytest.mark.parametrize("most", [1.0, 0.0])
def test_the_scale_of_numbers_of_16_bits_is_taken_back(most, make):
    """With clipping, which takes it back too, and without."""
    report = compare(in_16_bits(make(fp16=True, max_grad_norm=most)))
    assert holds(report), report


@pytest.mark.skipif(before("0.22"), reason="this release asks for a GPU")
def test_an_overflow_of_16_bits_is_no_mistake(make):
    made = in_16_bits(make(fp16=True))
    made.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1e38)
    report = compare(made)
    assert report.verdict == "NOT CHECKED" and "too large for 16 bits" in report.reason


@pytest.mark.skipif(before("0.22"), reason="this release asks for a GPU, or does not compile")
@pytest.mark.parametrize(("options", "wrap"), [({"fp16": True}, in_16_bits), (COMPILED, lambda made: made)])
def test_a_mistake_is_named_in_16_bits_and_in_a_compiled_run(options, wrap, make):
    report = compare(wrap(make(kind=planted(loss=torch.neg), **options)))
    assert (report.verdict, report.named) == ("FOUND", "opposite sign")


class Truncated(trl.GRPOTrainer):
    """The weight of a row is that of its negative advantage, whatever its sign."""

    @staticmethod
    def get_gamma_weights(advantages, *given, **options):
        return trl.GRPOTrainer.get_gamma_weights(-advantages.abs() - 1, *given, **options)


@needs("vespo_k_pos")
def test_a_weight_of_vespo_s_that_is_another_one_is_found(make):
    reports = compare_steps(make(kind=Truncated, **VESPO, max_steps=3), (1, 3))
    assert [report.verdict for report in reports] == ["HELD", "FOUND"]  # at a ratio of 1 every weight is 1


@needs("use_transformers_continuous_batching")
def test_weights_that_are_cast_to_generate_are_found(make):
    """It is the policy itself that trl 1.16 casts, and the optimizer steps in 16 bits from there on."""
    made = make(**BATCHED, bf16=True)
    report = compare(made)
    assert (report.verdict, report.named) == ("FOUND", "weights cast to other numbers")
    assert "26 of 26" in report.reason and next(made.model.parameters()).dtype == torch.bfloat16


class Casts(transformers.TrainerCallback):
    """What DeepSpeed does with bf16 before the first step, while its optimizer keeps the weights in float32."""

    def on_train_begin(self, args, state, control, model=None, **_):
        model.to(torch.bfloat16)


def test_weights_that_an_engine_casts_before_the_first_step_are_no_mistake(make):
    made = make(bf16=True)
    made.add_callback(Casts())
    report = compare(made)
    assert (report.verdict, report.named) == ("HELD", None)


def checkpointed(layer):
    """Let a layer compute itself again in the backward pass, with an input that requires a gradient."""
    inner = layer.forward

    def forward(hidden, **options):
        again = functools.partial(inner, **options)
        given = hidden if hidden.requires_grad else hidden.detach().requires_grad_()
        return (
            torch.utils.checkpoint.checkpoint(again, given, use_reentrant=True)
            if torch.is_grad_enabled()
            else again(hidden)
        )

    layer.forward = forward


def test_checkpoints_of_a_script_s_own_are_seen_through(make):
    """No gradient that is asked for by name comes out of them: a healthy trainer's was told to be wrong."""
    made = make()
    made.model.get_input_embeddings().weight.requires_grad_(False)
    for layer in made.model.model.layers:
        checkpointed(layer)
    report = compare(made)
    assert holds(report), report.reason
