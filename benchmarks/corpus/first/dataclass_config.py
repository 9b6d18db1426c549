from dataclasses import dataclass, field

from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser
from trl import GRPOConfig, GRPOTrainer


@dataclass
class ScriptArguments:
    model_name: str = field(default="Qwen/Qwen2-0.5B-Instruct")
    dataset: str = field(default="data/chat.jsonl")
    use_lora: bool = field(default=False)
    dtype: str = field(default="float32")


def answer_in_text(completions, answer, **kwargs):
    texts = [completion[0]["content"] for completion in completions]
    return [float(a in text) for a, text in zip(answer, texts)]


def main(script_args, training_args):
    tokenizer = AutoTokenizer.from_pretrained(script_args.model_name)
    model = AutoModelForCausalLM.from_pretrained(script_args.model_name, torch_dtype=script_args.dtype)
    trainer = GRPOTrainer(
        model=model,
        args=training_args,
        reward_funcs=[answer_in_text],
        train_dataset=load_dataset("json", data_files=script_args.dataset, split="train"),
        processing_class=tokenizer,
        peft_config=LoraConfig(task_type="CAUSAL_LM") if script_args.use_lora else None,
    )
    trainer.train()
    trainer.save_model(training_args.output_dir)


if __name__ == "__main__":
    main(*HfArgumentParser((ScriptArguments, GRPOConfig)).parse_args_into_dataclasses())
