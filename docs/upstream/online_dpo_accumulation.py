"""OnlineDPOTrainer adds the gradients of its micro-batches (trl 0.14 to 1.16). Argument: a model, by folder or id."""

import sys

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

try:
    from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer
except ImportError:  # before 0.29
    from trl import OnlineDPOConfig, OnlineDPOTrainer

tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], padding_side="left")


class Judge:
    def judge(self, prompts, completions, shuffle_order=True):
        return [int(len(second) < len(first)) for first, second in completions]


def reward(completions, **_):
    return [-float(len(text)) for text in completions]


class Divided(OnlineDPOTrainer):
    """The ablation: the loss by the number of micro-batches, as Trainer.training_step divides it."""

    def training_step(self, *given):
        backward, steps = self.accelerator.backward, self.args.gradient_accumulation_steps
        self.accelerator.backward = lambda loss, **options: backward(loss / steps, **options)
        try:
            return super().training_step(*given)
        finally:
            self.accelerator.backward = backward


def run(steps, divided=False):
    set_seed(0)
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
    args = OnlineDPOConfig("out", max_steps=1, per_device_train_batch_size=32 // steps, max_grad_norm=1e9, bf16=False,
                           gradient_accumulation_steps=steps, gradient_checkpointing=False, max_new_tokens=6,
                           learning_rate=0.0, logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True,
                           use_cpu=not torch.cuda.is_available())  # fmt: skip
    judged = "judge" in OnlineDPOTrainer.__init__.__code__.co_varnames
    trainer = (Divided if divided else OnlineDPOTrainer)(
        model=model, args=args, processing_class=tokenizer, train_dataset=data,
        **({"judge": Judge()} if judged else {"reward_funcs": reward}))  # fmt: skip
    trainer.train()
    return next(row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row)


# One prompt 32 times, so that every micro-batch has about the same gradient, however the batch is cut.
data = Dataset.from_dict({"prompt": ["1+1="] * 32})
for steps in (1, 2, 4, 8):
    print(f"gradient_accumulation_steps={steps}: norm of the gradient {float(run(steps)):.3f}, "
          f"with the loss divided {float(run(steps, divided=True)):.3f}")  # fmt: skip
