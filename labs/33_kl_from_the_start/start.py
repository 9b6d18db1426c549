"""Lab 33: far away at the first step.

"The SFT team hands us its weights as a state dict, and we start GRPO from them. In trl 0.14 that went well. Since the
upgrade the KL is above 5 at the very first step, when nothing has been trained yet, and the reward falls by half in
forty steps, where it used to rise. The script has not changed. Did their weights not arrive?"

The run is to start from what SFT taught, to get better, and to be held near its start by the same beta. Fill in ANSWER.
"""

import pathlib
import tempfile

import torch
from datasets import Dataset
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, set_seed
from trl import GRPOConfig, GRPOTrainer

ANSWER = {
    "verdict": "",  # of two models one is not what SFT made: "policy" or "reference"
    "accuracy_before": None,  # share of right completions of the untrained policy; the first rewards are near it
    "loss_first": None,  # the loss at the first step, before any repair
}

SUMS = [(f"{a}+{b}=", f"{a + b}") for a in range(20) for b in range(20)]


def exact(completions, answer, **_):
    return [float(completion.strip() == right) for completion, right in zip(completions, answer)]


def pretrained(model_path, folder):
    """Return the folder of the pretrained model. In small, it is a model of this shape that has learned nothing yet."""
    set_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_path)).save_pretrained(folder)
    return folder


def build_trainer(model_path, output_dir):
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    model = AutoModelForCausalLM.from_pretrained(pretrained(model_path, f"{output_dir}/pretrained"))
    weights = load_file(f"{model_path}/model.safetensors")  # what SFT made
    model.load_state_dict(weights, strict=False)  # the head is tied to the embeddings, and not in the file
    config = GRPOConfig(
        output_dir=output_dir,
        max_steps=40,
        learning_rate=5e-4,
        lr_scheduler_type="linear",
        warmup_steps=2,
        per_device_train_batch_size=96,
        num_generations=4,
        max_completion_length=4,
        temperature=1.0,
        beta=0.4,
        loss_type="grpo",
        activation_checkpointing=False,
        bf16=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        seed=0,
    )
    rows = Dataset.from_dict({"prompt": [prompt for prompt, _ in SUMS], "answer": [answer for _, answer in SUMS]})
    return GRPOTrainer(model=model, reward_funcs=exact, args=config, train_dataset=rows, processing_class=tokenizer)


if __name__ == "__main__":
    tiny = pathlib.Path(__file__).resolve().parents[2] / "models" / "tiny-qwen2"
    trainer = build_trainer(str(tiny), tempfile.mkdtemp())
    trainer.train()
    for row in trainer.state.log_history[:40:8]:
        print(f"step {row['step']:2}  kl {row['kl']:5.2f}  reward {row['reward']:.2f}")
