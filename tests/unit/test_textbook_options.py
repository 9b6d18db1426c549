"""The textbook under trl's other options: each holds in a healthy run, and a mistake in it is found."""

import functools

import pytest
import torch
import transformers
import trl
from engine import Engine, colocate
from steps import before, compare_steps, guarded_and_not, has, ones, planted, right, trainer

pytestmark = pytest.mark.slow
SYNCED = {"sync_ref_model": True, "ref_model_sync_steps": 2, "beta": 0.1, "learning_rate": 1e-2}
MOVED = {"learning_rate": 1e-2, "max_steps": 3}
# A cache of few blocks: by default it takes a share of all memory.
BATCHED = {
    "use_transformers_continuous_batching": True,
    "transformers_continuous_batching_config": {"num_blocks": 64, "max_batch_tokens": 64},
}
LUSPO = {"loss_type": "luspo", "num_iterations": 3, "learning_rate": 5e-3, "beta": 0.1}
VESPO = {"loss_type": "vespo", "num_iterations": 3, "learning_rate": 5e-3, "beta": 0.1}


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
        ({"torch_compile": True, "torch_compile_backend": "eager"}, 1),
        (SYNCED, 3),
        pytest.param(VESPO, 3, marks=needs("vespo_k_pos")),
        pytest.param(LUSPO | {"importance_sampling_level": "sequence"}, 3, marks=MASKED),
        pytest.param(BATCHED, 1, marks=needs("use_transformers_continuous_batching")),
    ],
)
def test_a_healthy_run_holds(options, steps, make):
    if not set(options) <= set(trl.GRPOConfig.__dataclass_fields__):
        pytest.skip("this release has no such option")
    reports = compare_steps(make(**options, max_steps=steps), range(1, steps + 1))
    assert len(reports) == steps
    for report in reports:
        assert report.verdict == "HELD" and report.apart.cosine >= 0.999 and abs(report.apart.size - 1) <= 0.02, report
    if "neftune_noise_alpha" in options:
        assert reports[0].floor.cosine > 0, "no noise was drawn"


@pytest.mark.skipif(before("0.22"), reason="this release asks for a GPU")
@pytest.mark.parametrize("most", [1.0, 0.0])
def test_the_scale_of_numbers_of_16_bits_is_taken_back(most, make):
    """With clipping, which takes it back too, and without."""
    (report,) = compare_steps(in_16_bits(make(fp16=True, max_grad_norm=most)), (1,))
    assert report.verdict == "HELD" and report.apart.cosine >= 0.999 and abs(report.apart.size - 1) <= 0.02, report


@pytest.mark.skipif(before("0.22"), reason="this release asks for a GPU")
def test_a_mistake_in_16_bits_is_named_and_an_overflow_is_none(make):
    (report,) = compare_steps(in_16_bits(make(fp16=True, kind=planted(loss=lambda loss: -loss))), (1,))
    assert (report.verdict, report.named) == ("FOUND", "opposite sign")
    made = in_16_bits(make(fp16=True))
    made.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1e38)
    (report,) = compare_steps(made, (1,))
    assert report.verdict == "NOT CHECKED" and "too large for 16 bits" in report.reason


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
    (report,) = compare_steps(made, (1,))
    assert (report.verdict, report.named) == ("FOUND", "weights cast to other numbers")
    assert "26 of 26" in report.reason and next(made.model.parameters()).dtype == torch.bfloat16


class Casts(transformers.TrainerCallback):
    """What DeepSpeed does with bf16 before the first step, while its optimizer keeps the weights in float32."""

    def on_train_begin(self, args, state, control, model=None, **_):
        model.to(torch.bfloat16)


def test_weights_that_an_engine_casts_before_the_first_step_are_no_mistake(make):
    made = make(bf16=True)
    made.add_callback(Casts())
    (report,) = compare_steps(made, (1,))
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
    (report,) = compare_steps(made, (1,))
    assert (report.verdict, report.named) == ("HELD", None), report.reason


@pytest.mark.skipif(not has("torch_compile"), reason="this release does not compile")
def test_a_mistake_in_a_compiled_run_is_named(make):
    options = {"torch_compile": True, "torch_compile_backend": "eager"}
    (report,) = compare_steps(make(kind=planted(loss=lambda loss: -loss), **options), (1,))
    assert (report.verdict, report.named) == ("FOUND", "opposite sign")


@pytest.mark.parametrize("options", [SYNCED, {"use_vllm": True}])
def test_a_run_with_the_guard_ends_at_the_same_weights(options, trained, tmp_path, monkeypatch):
    if not set(options) <= set(trl.GRPOConfig.__dataclass_fields__):
        pytest.skip("this release has no such option")

    def make(policy):
        more = colocate(monkeypatch, Engine(policy, trained[1])) if "use_vllm" in options else options
        return trainer(policy, trained[1], tmp_path, rewards=[ones, right], **MOVED | more)

    _, same = guarded_and_not(make, trained[0], every=1)
    assert same
