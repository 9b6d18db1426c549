"""Lab 46: out of character.

"Where an answer is wrong, our tool says so, and the model may answer once more. No answer is encoded again on its way
to the loss: it gets the ids of both turns as they were drawn, and a mask that is counted from them. I printed both,
and they are right. But I asked the policy how likely its own answers are, right after it had drawn them, and it finds
second answers far less likely than first ones. The longer we train, the stranger they are to it."

Make second answers as likely as first ones. Both turns, options and the rate stay.
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
        return trainer._generate_single_turn(asked, None, {}, 1)[0] if asked else []  # none if all were right

    asked = [encode(prompt) for prompt in prompts]
    first = draw(asked)
    said = tokenizer.batch_decode(first, skip_special_tokens=True)
    told = [tool(prompt, text) for prompt, text in zip(prompts, said)]
    second = iter(draw([encode(prompt + text + words) for prompt, text, words in zip(prompts, said, told) if words]))
    answer = {"prompt_ids": asked, "completion_ids": [], "env_mask": [], "logprobs": None}
    for ids, words in zip(first, told):
        between, more = (encode(words), next(second)) if words else ([], [])
        answer["completion_ids"].append(ids + between + more)
        answer["env_mask"].append([1] * len(ids) + [0] * len(between) + [1] * len(more))
    return answer


@torch.no_grad()
def likely(trainer):
    """Return the mean log-probability of a token of first and of second answers, under the policy that draws them."""
    drawn, scores = rollout(list(SUMS)[:64], trainer), ([], [])
    for prompt, ids, mask in zip(drawn["prompt_ids"], drawn["completion_ids"], drawn["env_mask"]):
        whole = torch.tensor([prompt + ids], device=trainer.model.device)
        logps = trainer.model(whole).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        own = logps.gather(1, whole[0, len(prompt) :, None])[:, 0].tolist()
        for place, score in enumerate(own):
            if mask[place]:
                scores[0 in mask[:place]].append(score)
    return [sum(turn) / max(1, len(turn)) for turn in scores]


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
    before = likely(trainer)
    trainer.train()
    for when, scores in (("before", before), ("after", likely(trainer))):
        print(f"{when:6} training, log-probability of a token: first answers {scores[0]:.2f}, second {scores[1]:.2f}")
