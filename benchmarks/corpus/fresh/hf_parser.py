from dataclasses import dataclass, field

from datasets import load_dataset
from transformers import HfArgumentParser, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


@dataclass
class ScriptArguments:
    model_path: str = field(default="models/tiny-qwen2")
    data_file: str = field(default="data/sums.jsonl")


class PrintRewards(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs and "reward" in logs:
            print(f"[{state.global_step}] reward={logs['reward']:.3f} loss={logs.get('loss')}")


def exact(completions, answer, **_):
    return [1.0 if c.strip() == a else 0.0 for c, a in zip(completions, answer)]


def digits_only(completions, **_):
    return [sum(ch.isdigit() for ch in c) / max(len(c), 1) for c in completions]


def main():
    script_args, training_args = HfArgumentParser((ScriptArguments, GRPOConfig)).parse_args_into_dataclasses()
    training_args.report_to = []
    data = load_dataset("json", data_files=script_args.data_file, split="train").shuffle(seed=0)
    print(data)
    trainer = GRPOTrainer(
        model=script_args.model_path,
        args=training_args,
        reward_funcs=[exact, digits_only],
        train_dataset=data,
        callbacks=[PrintRewards()],
    )
    result = trainer.train()
    print(result.metrics)


if __name__ == "__main__":
    main()
