import os

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

MODEL = os.environ.get("MODEL", "models/tiny-qwen2")
CHECKPOINTING = os.environ.get("CHECKPOINTING", "default")

model = AutoModelForCausalLM.from_pretrained(MODEL)
tokenizer = AutoTokenizer.from_pretrained(MODEL)
# the vocabulary is fine as it is; saves optimizer memory
model.get_input_embeddings().weight.requires_grad = False

pairs = [(a, b) for a in range(0, 30, 3) for b in range(0, 30, 2)]
data = Dataset.from_list([{"prompt": f"{a}+{b}=", "solution": str(a + b)} for a, b in pairs])


def right(prompts, completions, solution, **_):
    return [1.0 if text.split("\n")[0].strip() == s else 0.0 for text, s in zip(completions, solution)]


options = {}
if CHECKPOINTING != "default":
    options["gradient_checkpointing"] = CHECKPOINTING != "off"
if CHECKPOINTING == "non-reentrant":
    options["gradient_checkpointing_kwargs"] = {"use_reentrant": False}
args = GRPOConfig("out", max_completion_length=16, num_generations=4, per_device_train_batch_size=4,
                  temperature=1.0, learning_rate=1e-4, report_to="none", **options)
trainer = GRPOTrainer(model, right, args, data, processing_class=tokenizer)
if os.environ.get("REPAIRED"):
    trainer.model.enable_input_require_grads()
trainer.train()
