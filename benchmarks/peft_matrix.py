"""Which of the suspects make "element 0 of tensors does not require grad": dtype, checkpointing, LoRA, model family.

Eras: trl-0.14, trl-0.15, today.
"""

import itertools
import pathlib

import frames
import recording
import torch
import transformers
from peft import LoraConfig

from failurelab import gradients
from failurelab_course.experiments import models, observe, trainers

DTYPES = ("float32", "bf16 autocast", "bf16 weights")
KINDS = ("off", "reentrant", "non-reentrant")
ADAPTER = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def as_llama(qwen2: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    """Return the same weights, and the same function, in the Llama class: a Qwen2 has biases on query, key and value.

    Reports name Qwen2, and are of that family alone only where the same weights do not fail in another one's code.
    """
    config = qwen2.config
    kept = {name: value for name, value in config.to_dict().items() if name in transformers.LlamaConfig().to_dict()}
    kept |= {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "attention_bias": True}
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**kept))
    for layer in llama.model.layers:
        layer.self_attn.o_proj.bias = None  # which attention_bias adds, and Qwen2 lacks
    llama.load_state_dict(qwen2.state_dict())
    llama.generation_config = qwen2.generation_config
    ids = torch.arange(20, 26, device=qwen2.device)[None]
    llama = llama.to(qwen2.device).eval()
    with torch.no_grad():
        torch.testing.assert_close(llama(ids).logits, qwen2(ids).logits, atol=2e-5, rtol=1e-5)
    return llama


def run(family: str, dtype: str, kind: str, trained: str, device: str) -> dict:
    """Train three steps, and return which tensors a gradient reached, and what was raised."""
    policy, tokenizer = models.load(device=device)
    if family == "Llama":
        policy = as_llama(policy)
    if dtype == "bf16 weights":
        policy = policy.to(torch.bfloat16)
    trainer = trainers.grpo(
        policy,
        tokenizer,
        steps=3,
        learning_rate=1e-3,
        prompts_per_step=4,
        bf16=dtype != "float32",
        peft_config=ADAPTER if trained == "LoRA" else None,
        **recording.checkpointing(kind),
    )
    error = ""
    with gradients.watch(trainer.model) as watched:
        try:
            trainer.train()
        except RuntimeError as raised:
            error = f"{type(raised).__name__}: {str(raised).splitlines()[0]}"
    report = watched.report()
    reached = len(report.trainable) - len(report.without_gradient)
    return {"reached": reached, "trainable": len(report.trainable), "error": error}


def table_suspects(folder: pathlib.Path) -> str:
    """Which suspects of "element 0" change anything: tensors that a gradient reaches, by set-up, in trl 0.14."""
    places = [f"{kind}, {trained}" for trained in ("full", "LoRA") for kind in KINDS]
    pattern = rf"matrix: (?P<name>.+?), (?P<place>{'|'.join(places)})"
    runs = frames.read_runs(folder, "peft_matrix", pattern, "trl-0.14")
    found: dict[str, list[str]] = {}
    for name, part in runs.groupby("name", sort=False):
        cells = {
            run["place"]: f"{run['reached']} of {run['trainable']} {run['error'].split(':')[0]}".rstrip()
            for run in part.to_dict("records")
        }
        said = "; ".join(
            f"{trained}: " + ", ".join(f"{kind} {cells.get(f'{kind}, {trained}', 'not recorded')}" for kind in KINDS)
            for trained in ("full", "LoRA")
        )
        found.setdefault(said, []).append(name)
    return "\n".join(f"- {said} ({'; '.join(names)})" for said, names in found.items())


def main() -> None:
    """Run all combinations and record each."""
    device = recording.begin(__doc__).device
    for family, dtype, kind, trained in itertools.product(("Qwen2", "Llama"), DTYPES, KINDS, ("full", "LoRA")):
        metrics = run(family, dtype, kind, trained, device)
        state = "healthy" if metrics["reached"] == metrics["trainable"] else "broken"
        case = f"matrix: {family}, {dtype}, {kind}, {trained}"
        observe.record("F2", state, metrics, case=case, seed=0, device=device)
        print(case, metrics, flush=True)


if __name__ == "__main__":
    main()
