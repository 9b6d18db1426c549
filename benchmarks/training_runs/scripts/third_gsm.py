# GRPO on a small set of sums, GSM8K's format
import re

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

model_name = "models/tiny-llama-chat"
NUM_GENERATIONS = 8

tokenizer = AutoTokenizer.from_pretrained(model_name, padding_side="left")
model = AutoModelForCausalLM.from_pretrained(model_name)


def raw_data():
    for a in range(20):
        for b in range(20):
            yield {"question": f"{a}+{b}=", "solution": f"Add {b} to {a}.\n#### {a + b}"}


def extract_hash_answer(text):
    if "####" not in text:
        return None
    return text.split("####")[1].strip()


def get_questions():
    data = Dataset.from_list(list(raw_data()))
    data = data.map(lambda x: {
        "prompt": [{"role": "user", "content": x["question"]}],
        "answer": extract_hash_answer(x["solution"]),
    })  # fmt: skip
    return data.remove_columns(["question", "solution"])


def correctness_reward_func(prompts, completions, answer, **kwargs):
    responses = [completion[0]["content"] for completion in completions]
    return [2.0 if response == right else 0.0 for response, right in zip(responses, answer)]


def int_reward_func(completions, **kwargs):
    responses = [completion[0]["content"] for completion in completions]
    return [0.5 if response.isdigit() else 0.0 for response in responses]


def length_reward_func(completions, **kwargs):
    responses = [completion[0]["content"] for completion in completions]
    return [0.1 if re.match(r"^.{1,2}$", response) else 0.0 for response in responses]


training_args = GRPOConfig(
    output_dir="outputs/llama-gsm-grpo",
    run_name="llama-gsm-grpo",
    learning_rate=4e-4,
    adam_beta1=0.9,
    adam_beta2=0.99,
    weight_decay=0.1,
    warmup_steps=5,
    lr_scheduler_type="cosine",
    max_grad_norm=0.5,
    logging_steps=2,
    log_completions=True,
    per_device_train_batch_size=48,
    gradient_accumulation_steps=1,
    num_generations=8,
    max_completion_length=8,
    max_steps=50,
    temperature=1.0,
    beta=0.0,
    gradient_checkpointing=False,
    bf16=False,
    save_strategy="no",
    report_to="none",
    seed=0,
)

trainer = GRPOTrainer(
    model=model,
    processing_class=tokenizer,
    reward_funcs=[correctness_reward_func, int_reward_func, length_reward_func],
    args=training_args,
    train_dataset=get_questions(),
)
trainer.train()
trainer.save_state()
