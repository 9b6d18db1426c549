"""QLoRA GRPO to take home: 4-bit weights, an adapter, checkpointing, every guard; on a CPU, one GPU or several.

    .venv/bin/python examples/train_qlora_grpo.py
    .venv/bin/torchrun --nproc_per_node 2 examples/train_qlora_grpo.py --steps 4
    .venv/bin/accelerate launch --config_file examples/accelerate_gpus.yaml examples/train_qlora_grpo.py

One process for each GPU: every process loads its own copy of the model, in 4 bit, where it trains. The task is the
course's sums; yours goes into `train_dataset` and `reward_funcs`. A model of your own is named by `--model`; give
`--form chat` if it has a chat template, a `--completion-length` that lets it answer, and a `--learning-rate` around
1e-5. Rank 0 prints one line of JSON, and with `--output` saves the adapter. Exit status 1: a guard stopped the run, and
said why.
"""

import argparse
import json
import pathlib
import sys
import tempfile

import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, PrinterCallback, set_seed
from trl import GRPOConfig, GRPOTrainer

from failurelab import gradients, guards, placement, updates
from failurelab_course.experiments import models, observe

HALF = torch.cuda.is_available() and torch.cuda.is_bf16_supported()
PRECISION = torch.bfloat16 if HALF else torch.float32  # one for weights, 4-bit products and autocast
NON_REENTRANT = {"use_reentrant": False}


def load(name: str):
    """Return the model in 4 bit, on this process's own device, and its tokenizer."""
    hub = "/" in name and not pathlib.Path(name).is_dir()
    path = name if hub else models.path(name)
    four_bit = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=PRECISION,
    )
    # Asked here and not when the script is imported: only now does each process know which device is its own.
    here = placement.local_device_map()
    model = AutoModelForCausalLM.from_pretrained(path, quantization_config=four_bit, device_map=here, dtype=PRECISION)
    return model, AutoTokenizer.from_pretrained(path, padding_side="left")


def build_trainer(options: argparse.Namespace, output_dir: str) -> GRPOTrainer:
    """Return the trainer, not started."""
    set_seed(options.seed)
    model, tokenizer = load(options.model)
    lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    # The order that works: prepare for 4 bit, checkpointing, hook, wrap. The trainer gets no peft_config.
    model = gradients.prepare_peft(model, lora, NON_REENTRANT)
    config = GRPOConfig(
        output_dir=output_dir,
        max_steps=options.steps,
        seed=options.seed,
        learning_rate=options.learning_rate,
        lr_scheduler_type="constant",
        per_device_train_batch_size=options.batch,  # completions, in each process
        gradient_accumulation_steps=1,
        num_generations=options.generations,
        max_completion_length=options.completion_length,
        temperature=1.0,
        beta=0.0,
        loss_type="grpo",
        activation_checkpointing=True,
        activation_checkpointing_kwargs=NON_REENTRANT,
        bf16=HALF,
        use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=torch.cuda.is_available(),
        ddp_find_unused_parameters=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=model,
        args=config,
        processing_class=tokenizer,
        train_dataset=models.rows(form=options.form),
        reward_funcs=models.reward,
        callbacks=[
            guards.PlacementGuard(),
            guards.RolloutGuard(),
            guards.LogitsGuard(),
            guards.GradientGuard(),
            guards.UpdateGuard(),
        ],
    )
    # While it is made, trl casts the adapters of a 4-bit model to bfloat16, where a part of each step rounds away.
    updates.to_float32(trainer.model)
    trainer.remove_callback(PrinterCallback)
    return trainer


def four_bit_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of the 4-bit weights by name."""
    return {name: each.data.clone() for name, each in model.named_parameters() if hasattr(each, "quant_state")}


def main() -> None:
    """Train, compare the weights with what they were, and say so in one line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny", help="tiny, a folder, or a hub id")
    parser.add_argument("--form", default="plain", choices=("plain", "chat"), help="prompts as text, or as messages")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="1e-3 suits the small model only")
    parser.add_argument("--batch", type=int, default=64, help="completions for each process and step")
    parser.add_argument("--generations", type=int, default=8, help="completions for each prompt")
    parser.add_argument("--completion-length", type=int, default=4, help="tokens")
    parser.add_argument("--output", default="", help="folder for the adapter")
    options = parser.parse_args()
    observe.quiet()
    with tempfile.TemporaryDirectory() as temporary:
        try:
            trainer = build_trainer(options, options.output or temporary)
        except models.ModelError as error:
            sys.exit(str(error))
        before, adapters = four_bit_weights(trainer.model), gradients.snapshot(trainer.model)
        try:
            trainer.train()
        except guards.GuardTripped as tripped:
            sys.exit(str(tripped))
        now = four_bit_weights(trainer.model)
        if options.output:
            trainer.save_model(options.output)
        rewards = [row["reward"] for row in trainer.state.log_history if "reward" in row]
        tenth = max(1, len(rewards) // 10)
        found = {
            "processes": trainer.args.world_size,
            "device": str(trainer.args.device),
            "steps": trainer.state.global_step,
            "reward_first": round(sum(rewards[:tenth]) / tenth, 3),
            "reward_last": round(sum(rewards[-tenth:]) / tenth, 3),
            "four_bit_unchanged": f"{sum(torch.equal(before[n], now[n]) for n in before)} of {len(before)}",
            "adapters_changed": f"{len(adapters.changed(trainer.model))} of {len(adapters)}",
            "adapters_in": sorted({str(p.dtype) for p in trainer.model.parameters() if p.requires_grad}),
        }
        if trainer.is_world_process_zero():
            print(json.dumps(found), flush=True)
        if trainer.args.world_size > 1:
            torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
