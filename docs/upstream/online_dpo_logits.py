"""OnlineDPOTrainer makes logits for the prompt too, and drops them (trl 1.16). Argument: a model, folder or hub id."""

import sys

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

COMPLETION = 16


class Trainer(OnlineDPOTrainer):
    def _forward(self, model, prompt_ids, prompt_mask, completion_ids, completion_mask, vision_inputs=None):
        made = []
        hook = model.get_output_embeddings().register_forward_hook(lambda head, args, output: made.append(output))
        scores = super()._forward(model, prompt_ids, prompt_mask, completion_ids, completion_mask)
        hook.remove()
        used = completion_ids.shape[1] + 1  # the last one is made too: it predicts what comes after the completion
        ids, mask = torch.cat((prompt_ids, completion_ids), 1), torch.cat((prompt_mask, completion_mask), 1)
        kept = model(ids, attention_mask=mask, logits_to_keep=used).logits[:, :-1]
        same = kept.log_softmax(-1).gather(-1, completion_ids[..., None])[..., 0]
        which = "policy" if torch.is_grad_enabled() else "reference"
        print(f"{which}: rows of logits made {made[0].shape[1]}, with logits_to_keep {used}, of a prompt of "
              f"{prompt_ids.shape[1]} and a completion of {completion_ids.shape[1]} tokens; largest difference of the "
              f"log-probabilities {float((scores - same).detach().abs().max()):.1g}")  # fmt: skip
        return scores


set_seed(0)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
for length in (48, 240):
    data = Dataset.from_dict({"prompt": [("1+1=2 " * 99)[:length]] * 4})
    args = OnlineDPOConfig("out", max_steps=1, per_device_train_batch_size=4, max_new_tokens=COMPLETION, bf16=False,
                           generation_kwargs={"min_new_tokens": COMPLETION}, save_strategy="no", report_to=[],
                           disable_tqdm=True)  # fmt: skip
    Trainer(model=model, reward_funcs=lambda completions, **_: [float(len(c)) for c in completions], args=args,
            train_dataset=data, processing_class=tokenizer).train()  # fmt: skip
