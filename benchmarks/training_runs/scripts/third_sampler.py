from dataclasses import asdict, dataclass

import torch
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


@dataclass
class TrainConfig:
    output_dir: str = "work/sampler"
    max_steps: int = 54
    learning_rate: float = 4e-4
    lr_scheduler_type: str = "constant"
    per_device_train_batch_size: int = 64
    gradient_accumulation_steps: int = 1
    num_generations: int = 8
    max_completion_length: int = 6
    temperature: float = 1.0
    beta: float = 0.0
    gradient_checkpointing: bool = False
    bf16: bool = False
    logging_steps: int = 3
    log_completions: bool = True
    save_strategy: str = "no"
    report_to: str = "none"
    seed: int = 0


class Sampler:
    """A second copy of the model that only generates."""

    def __init__(self, path, tokenizer, limit):
        self.net = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path)).eval()
        self.tokenizer, self.limit = tokenizer, limit

    def load(self, weights):
        self.net.load_state_dict(weights)

    @torch.inference_mode()
    def generate(self, prompts):
        batch = self.tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
        tokens = self.net.generate(**batch, max_new_tokens=self.limit, do_sample=True, top_k=0, temperature=1.0)
        asked = [ids[mask.bool()].tolist() for ids, mask in zip(batch.input_ids, batch.attention_mask)]
        return asked, [self.until_end(row) for row in tokens[:, batch.input_ids.shape[1] :].tolist()]

    def until_end(self, ids):
        end = self.tokenizer.eos_token_id
        return ids[: ids.index(end) + 1] if end in ids else ids


class Rollouts(TrainerCallback):
    def __init__(self, sampler, model):
        self.sampler = sampler
        self.push(model)

    def push(self, model):
        self.sampler.load({name: weight.detach().clone() for name, weight in model.state_dict().items()})

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.push(model)

    def __call__(self, prompts, trainer):
        prompt_ids, completion_ids = self.sampler.generate(prompts)
        return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": None}


def same_word(completions, answer, **kwargs):
    return [1.0 if completion == word else 0.0 for completion, word in zip(completions, answer)]


def words():
    generator = torch.Generator().manual_seed(3)
    picks = torch.randint(0, 9, (300, 4), generator=generator).tolist()
    return sorted({"".join("aeioknstr"[i] for i in row) for row in picks})


cfg = TrainConfig()
path = "models/copier"
tokenizer = AutoTokenizer.from_pretrained(path)
model = AutoModelForCausalLM.from_pretrained(path)
rollouts = Rollouts(Sampler(path, tokenizer, cfg.max_completion_length), model)
trainer = GRPOTrainer(
    model=model,
    args=GRPOConfig(**asdict(cfg)),
    reward_funcs=[same_word],
    train_dataset=Dataset.from_list([{"prompt": f"copy: {word} ->", "answer": word} for word in words()]),
    processing_class=tokenizer,
    rollout_func=rollouts,
    callbacks=[rollouts],
)
trainer.train()
trainer.save_state()
