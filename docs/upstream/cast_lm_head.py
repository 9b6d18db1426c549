"""cast_lm_head_to_fp32 does not reach generation under bf16 (trl 1.16). Argument: a model, by folder or hub id."""

import sys

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from trl import GRPOConfig, GRPOTrainer

tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])


def outside_autocast(head):
    forward = head.forward

    def in_float32(hidden):
        with torch.autocast(hidden.device.type, enabled=False):
            return forward(hidden)

    head.forward = in_float32


class Trainer(GRPOTrainer):
    def compute_loss(self, model, inputs, **options):
        """Beside the loss: scores by the model's logits, from which generation draws, and those of training."""
        ids = torch.cat((inputs["prompt_ids"], inputs["completion_ids"]), 1)
        mask = torch.cat((inputs["prompt_mask"], inputs["completion_mask"]), 1)
        labels = torch.where(inputs["completion_mask"].bool(), inputs["completion_ids"], -100)
        with torch.no_grad():
            logits = model(input_ids=ids, attention_mask=mask).logits
            known = torch.cat((torch.full_like(inputs["prompt_ids"], -100), labels), 1)
            fused = model(input_ids=ids, attention_mask=mask, labels=known, fused_lm_head=True).log_probs
        drawn = (logits[:, :-1].float() / self.temperature).log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        apart = (drawn - fused).abs()[known[:, 1:] != -100]
        print(f"scores of logits and of training lie apart by {apart.mean():.1g} nats, at most {apart.max():.1g}")
        return super().compute_loss(model, inputs, **options)


for cast, outside in ((False, False), (True, False), (True, True)):
    set_seed(0)
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
    data = Dataset.from_dict({"prompt": [f"{a}+{b}=" for a in range(20) for b in range(20)]})
    args = GRPOConfig("out", max_steps=1, per_device_train_batch_size=16, num_generations=8, max_completion_length=4,
                      bf16=True, use_cpu=not torch.cuda.is_available(), cast_lm_head_to_fp32=cast, save_strategy="no",
                      report_to=[], disable_tqdm=True)  # fmt: skip
    trainer = Trainer(model, lambda completions, **_: [float(i % 2) for i in range(len(completions))], args, data,
                      processing_class=tokenizer)  # fmt: skip
    head = trainer.model.get_output_embeddings()
    if outside:
        outside_autocast(head)
    seen = set()
    head.register_forward_hook(lambda head, args, output, seen=seen: seen.add(output.dtype))
    print("cast_lm_head_to_fp32" if cast else "as it is", "outside autocast" if outside else "")
    trainer.train()
    print("the head returns, while generating:", seen)
