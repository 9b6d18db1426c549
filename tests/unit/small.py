"""Small models, and what several of these test files do with them."""

import contextlib
import functools
import subprocess
import sys
import tempfile
import warnings

import peft
import pytest
import torch
import transformers

from failurelab import guards, logits
from failurelab._unwrap import unwrap


def qwen2(seed: int = 0, dtype: torch.dtype = torch.float32, **config) -> transformers.PreTrainedModel:
    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(seed)
    return transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(**sizes | heads | {"tie_word_embeddings": True} | config)
    ).to(dtype)


def llava(image: int = 31, words: int = 32) -> transformers.PreTrainedModel:
    """Return a small model of images and text: four tokens with the id `image` stand for one of 8 x 8 pixels."""
    seen = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision = transformers.CLIPVisionConfig(**seen, image_size=8, patch_size=4, projection_dim=16)
    text = qwen2(tie_word_embeddings=False, vocab_size=words).config
    parts = {"vision_config": vision, "text_config": text, "vision_feature_layer": -1}
    config = transformers.LlavaConfig(**parts, image_token_index=image)
    return stir(transformers.LlavaForConditionalGeneration(config), "", 0.3)


def reward_model(tokenizer) -> transformers.PreTrainedModel:
    """Return a small model that gives each text one number."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    more = {"num_key_value_heads": 2, "vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    return transformers.Qwen2ForSequenceClassification(transformers.Qwen2Config(**sizes, **more, num_labels=1))


def lora_config(**options):
    return peft.LoraConfig(**{"r": 2, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"} | options)


def lora(model, **options):
    return peft.get_peft_model(model, lora_config(**options))


def added(model):
    """Return a model with an adapter by `add_adapter`: transformers 5.24.0 asks for a peft that no index has."""
    try:
        model.add_adapter(lora_config())
    except ValueError as error:
        assert "version of PEFT" in str(error)
        pytest.skip(str(error))
    return model


def stir(model, part: str, std: float):
    """Give the parameters with this in their names random numbers; return the model."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if part in name:
                parameter.normal_(std=std)
    return model


def checkpoint(model, reentrant: bool) -> None:
    """Switch gradient checkpointing on, and nothing else: transformers 5 sets the input hook along with it."""
    function = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=reentrant)
    unwrap(model)._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=function)


def cut_from_the_front(model):
    """Give a model the forward of somebody who keeps as many rows of logits as were asked for, and the wrong ones."""

    class Cut(type(model)):
        def forward(self, input_ids=None, logits_to_keep=0, num_logits_to_keep=0, **options):
            output = super().forward(input_ids=input_ids, **options)
            kept = logits_to_keep or num_logits_to_keep or output.logits.shape[1]
            output.logits = output.logits[:, :kept]
            return output

    model.__class__ = Cut
    return model


def moving(move):
    """Return an optimizer that moves weights by a function of the step that AdamW's first one is, about."""

    class Own(torch.optim.AdamW):
        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for weights in group["params"]:
                    if weights.grad is not None:
                        move(self.state[weights], weights, group["lr"] * weights.grad.float().sign())

    return Own


def master(state, weights, step):
    """Keep float32 copies in the state, as optimizers with master weights do."""
    weights.copy_(state.setdefault("w32", weights.float().clone()).sub_(step))


def other_keep_argument(model) -> str:
    """Return the name for the last rows of logits that this model does not know."""
    return {"logits_to_keep": "num_logits_to_keep", "num_logits_to_keep": "logits_to_keep"}[logits.keep_argument(model)]


def score(model, ids, mask, length, shift=0, temperature=1.0):
    """Return the log-probabilities of the last tokens, with the rows of logits moved by `shift`."""
    rows = model(input_ids=ids, attention_mask=mask).logits / temperature
    first = ids.shape[1] - length - 1 + shift
    rows = rows[:, first : first + length].log_softmax(-1)
    return rows.gather(-1, ids[:, -length:, None])[..., 0]


def grpo(model, tokenizer, prompts=("1+1=",), reward=None, more=(), **options):
    """Return a GRPOTrainer of the installed trl that has not begun; it writes nothing."""
    import datasets
    import trl

    args = trl.GRPOConfig(output_dir=tempfile.gettempdir(), report_to=[], use_cpu=True, bf16=False, **options)
    rows = datasets.Dataset.from_dict({"prompt": list(prompts)})
    given = {"args": args, "train_dataset": rows, "processing_class": tokenizer, **dict(more)}
    return trl.GRPOTrainer(model=model, reward_funcs=reward or alternate, **given)


def evaluated(config):
    """Return a trainer of the course's small model with this config and an evaluation set."""
    import datasets
    import trl

    from failurelab_course.experiments import models

    model, tokenizer = models.load("tiny")
    rows = datasets.Dataset.from_dict({"prompt": ["1+1=", "2+2="] * 4})
    given = {"processing_class": tokenizer, "train_dataset": rows, "eval_dataset": rows, "args": config}
    return trl.GRPOTrainer(model=model, reward_funcs=alternate, **given)


def alternate(completions, **_) -> list[float]:
    """Reward every other completion, so that no group has equal rewards and every step has a gradient."""
    return [float(index % 2) for index in range(len(completions))]


@contextlib.contextmanager
def said():
    """Yield a list that holds, after the block, what guards warned of in it."""
    messages = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield messages
    messages += [str(each.message) for each in caught if issubclass(each.category, guards.GuardWarning)]


def run_child(code: str, *arguments: str) -> str:
    """Run Python code in a process of its own; return what it prints. Simulated devices hold for a process."""
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
