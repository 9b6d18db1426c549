"""Lab 45: a second try.

"Where an answer is wrong, our tool says so, and the model may answer once more. We mask the tool's words, as the manual
says, and I have printed completions with their masks: it looks right. The reward climbs. But a colleague has put a step
beside its definition, and says that it is another one."

Make the step what it should be. Both turns, options and the rate stay.
"""

import pathlib
import tempfile

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

SUMS = {f"{a}+{b}=": f"{a + b}" for a in range(20) for b in range(20)}


def last_is_right(prompts, completions, **_):
    return [float(said.split("=")[-1].strip() == SUMS[prompt]) for prompt, said in zip(prompts, completions)]


def tool(prompt, said):
    return "" if said.strip() == SUMS[prompt] else f" no, {prompt}"


def rollout(prompts, trainer):
    """Draw two turns, with the tool's words between them."""
    tokenizer = trainer.processing_class

    def encode(text):
        return tokenizer(text)["input_ids"]

    def draw(asked):
        drawn = trainer._generate_single_turn(asked, None, {}, 1)[0] if asked else []  # none if all were right
        return drawn, tokenizer.batch_decode(drawn, skip_special_tokens=True)

    asked = [encode(prompt) for prompt in prompts]
    first, said = draw(asked)
    told = [tool(prompt, text) for prompt, text in zip(prompts, said)]
    second, again = draw([a + f + encode(t) for a, f, t in zip(asked, first, told) if t])
    answer = {"prompt_ids": asked, "completion_ids": [], "env_mask": [], "logprobs": None}
    rest = iter(zip(second, again))
    for ids, text, words in zip(first, said, told):
        more, last = next(rest) if words else ([], "")
        whole = ids + encode(words) + more
        mask = [1] * len(encode(text)) + [0] * len(encode(words)) + [1] * len(encode(last))
        mask += [1] * (len(whole) - len(mask))  # as many as there are tokens
        answer["completion_ids"].append(whole)
        answer["env_mask"].append(mask[: len(whole)])
    return answer


def build_trainer(model_path, output_dir):
    config = GRPOConfig(
        output_dir=output_dir,
        max_steps=30,
        learning_rate=4e-4,
        lr_scheduler_type="constant",
        per_device_train_batch_size=64,
        num_generations=8,
        max_completion_length=4,
        temperature=1.0,
        beta=0.0,
        activation_checkpointing=False,
        bf16=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        seed=0,
    )
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model_path),
        reward_funcs=last_is_right,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": list(SUMS)}),
        processing_class=AutoTokenizer.from_pretrained(model_path, padding_side="left"),
        rollout_func=rollout,
    )


if __name__ == "__main__":
    tiny = pathlib.Path(__file__).resolve().parents[2] / "models" / "tiny-qwen2"
    trainer = build_trainer(str(tiny), tempfile.mkdtemp())
    trainer.train()
    for row in trainer.state.log_history[:30:5]:
        print(f"step {row['step']:2}", *(f"{name} {row[name]:.3f}" for name in ("reward", "grad_norm")))
