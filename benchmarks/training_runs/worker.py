"""Runs scripts of the corpus in one stack: imports the libraries once, and forks a child for each script.

    PYTHON worker.py < jobs.json

The child runs `train.py` as it is, in a folder of its own, and keeps what a run leaves behind. What a script does not
keep by itself is taken at the class of transformers' Trainer: the weights before and after training, and the rows that
trl shows under log_completions.
"""

import contextlib
import importlib.metadata
import json
import math
import os
import pathlib
import re
import shutil
import signal
import sys
import tempfile
import traceback

LIBRARIES = ("trl", "transformers", "torch", "peft", "accelerate", "datasets")
LOG_LIMIT, LINE_LIMIT, ROWS = 6000, 400, 8
SECONDS = 240
# Lines that speak of the machine and not of the run
HERE_ALONE = re.compile(r"pin_memory|real_accelerator|GLIBCXX|bitsandbytes native|^  super\(\).__init__\(loader\)$")
SHOWN = (
    "error",
    "reward_first",
    "reward_last",
    "accuracy",
    "grad_norm",
    "kl_first",
    "clipped_ratio",
    "elements_changed",
)


def run(job: dict) -> None:
    """Run one script in this process and write its artefacts, and `result.json`, into the job's folders."""
    import transformers

    from failurelab_course.experiments import deepspeed, observe

    artefacts, kept = pathlib.Path(job["artefacts"]), pathlib.Path(job["kept"])
    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)
        pathlib.Path("models").symlink_to(job["models"])
        pathlib.Path("train.py").write_text(job["script"])
        output = os.open("output", os.O_WRONLY | os.O_CREAT)
        for stream in (1, 2):  # by their numbers: loggers hold the old sys.stderr
            os.dup2(output, stream)
        seen: dict = {}
        spy(transformers.Trainer, seen)
        error = ""
        try:
            namespace = {"__name__": "__main__", "__file__": "train.py"}
            with deepspeed.ready() if job.get("launched") else contextlib.nullcontext():
                exec(compile(job["script"], "train.py", "exec"), namespace)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
            frames = raised.__traceback__.tb_next  # without this file's own
            traceback.print_exception(type(raised), raised, frames)
        sys.stdout.flush()
        sys.stderr.flush()
        log = readable(pathlib.Path("output").read_text(errors="replace"), name)
        trainer = seen.get("trainer")
        figures = {"error": error, "entry": observe.record("ground", "measured", {})}
        if trainer is not None and not job.get("launched"):  # under ZeRO-3 a parameter is in parts
            history = trainer.state.log_history
            if history:
                (artefacts / "trainer_state.json").write_text(compact(vars(trainer.state)))
            figures |= measure(trainer, seen, history)
            probes = probe(seen.get("before"), weights(trainer.model))
            if figures.get("accuracy") is not None:
                probes["accuracy_after"] = round(figures["accuracy"], 4)
            (artefacts / "probes.json").write_text(json.dumps(probes) + "\n")
            figures |= probes
            from safetensors.torch import save_file

            for step, tensors in ((0, seen["before"]), (trainer.state.global_step, weights(trainer.model))):
                folder = kept / f"checkpoint-{step}"
                folder.mkdir(parents=True, exist_ok=True)
                save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / "model.safetensors")
        if seen.get("rows"):
            (artefacts / "completions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in seen["rows"]))
        if log.strip():
            (artefacts / "log.txt").write_text(log)
        versions = [f"{library}=={importlib.metadata.version(library)}" for library in LIBRARIES]
        (artefacts / "versions.txt").write_text("\n".join(versions) + "\n")
        (artefacts / "train.py").write_text(job["script"])
        (kept / "result.json").write_text(json.dumps(figures, default=str))
        os.chdir("/")


def spy(base, seen: dict) -> None:
    """Keep the trainer, its first weights, and rows of its completions at the first, a middle and the last log."""
    train, log = base.train, base.log

    def watched_train(self, *args, **kwargs):
        seen["trainer"], seen["before"] = self, weights(self.model)
        seen["logs"] = []
        if not hasattr(self, "_logs"):
            watch_rewards(self, seen)
        try:
            return train(self, *args, **kwargs)
        finally:
            picked = seen["logs"][:1] + seen["logs"][len(seen["logs"]) // 2 :][:1] + seen["logs"][-1:]
            if self.args.to_dict().get("log_completions"):
                seen["rows"] = [row for rows in picked for row in rows]

    def watched_log(self, logs, *args, **kwargs):
        if "loss" in logs:
            rows = rows_of(self, seen)
            if rows:
                seen["logs"].append(rows)
        return log(self, logs, *args, **kwargs)

    base.train, base.log = watched_train, watched_log
    with contextlib.suppress(ImportError, AttributeError):
        import trl.trainer.grpo_trainer as module

        if hasattr(module, "print_prompt_completions_sample"):
            module.print_prompt_completions_sample = lambda *_, **__: None  # tables of 64 rows, in colour
        if hasattr(module, "pd"):
            module.pd.DataFrame.to_parquet = lambda *_, **__: None


def watch_rewards(trainer, seen: dict) -> None:
    """Keep the last batch that the reward functions were asked about: trl before 0.16 keeps none."""
    functions = getattr(trainer, "reward_funcs", [])

    def watched(function):
        def reward(prompts, completions, **kwargs):
            rewards = function(prompts=prompts, completions=completions, **kwargs)
            with contextlib.suppress(TypeError):
                seen["batch"] = list(zip(prompts, completions, rewards))
            return rewards

        reward.__name__ = function.__name__
        return reward

    trainer.reward_funcs = [watched(function) for function in functions]


def rows_of(trainer, seen: dict) -> list[dict]:
    """Return the first rows of the last batch, as log_completions shows them."""
    step = trainer.state.global_step
    logs = getattr(trainer, "_logs", None)
    if logs is None:
        batch = seen.get("batch", [])[:ROWS]
        return [{"step": step, "prompt": p, "completion": c, "reward": number(r)} for p, c, r in batch]
    rewards = list(zip(*logs["rewards"].values())) or [()] * len(logs["prompt"])
    weights_ = [float(weight) for weight in trainer.reward_weights]
    batch = list(zip(logs["prompt"], logs["completion"], rewards, logs["advantages"]))
    batch = batch[-int(trainer.args.per_device_train_batch_size) * getattr(trainer.args, "steps_per_generation", 1) :]
    rows = []
    for prompt, completion, parts, advantage in batch[:ROWS]:
        total = sum(w * part for w, part in zip(weights_, parts) if part is not None and not math.isnan(part))
        row = {"step": step, "prompt": prompt, "completion": completion, "reward": number(total)}
        if len(parts) > 1:
            row |= {name: number(part) for name, part in zip(logs["rewards"], parts)}
        rows.append(row | {"advantage": number(advantage)})
    return rows


def number(value):
    """Return a number with five digits, as JSON has it."""
    try:
        return None if value is None else float(f"{float(value):.5g}")
    except (TypeError, ValueError):
        return str(value)


def weights(model) -> dict:
    """Return a copy of each parameter."""
    return {name: each.detach().clone() for name, each in model.named_parameters()}


def probe(before: dict | None, after: dict) -> dict:
    """Return what two checkpoints, the first and the last, say."""
    shared = {name: tensor for name, tensor in after.items() if before and name in before}
    changed = {name: int((tensor != before[name]).sum()) for name, tensor in shared.items()}
    elements = sum(tensor.numel() for tensor in shared.values())
    trainable = [name for name, tensor in shared.items() if "lora_" in name] or list(shared)
    return {
        "tensors": len(shared),
        "tensors_changed": sum(count > 0 for count in changed.values()),
        "elements_changed": round(sum(changed.values()) / max(elements, 1), 5),
        "adapter_elements_changed": round(
            sum(changed[name] for name in trainable) / max(sum(shared[name].numel() for name in trainable), 1), 5
        )
        if any("lora_" in name for name in shared)
        else None,
        "dtypes": sorted({str(tensor.dtype).removeprefix("torch.") for tensor in shared.values()}),
        "finite": all(bool(tensor.isfinite().all()) for tensor in shared.values()),
    }


def measure(trainer, seen: dict, history: list[dict]) -> dict:
    """Return what decides whether a run is as broken as it is meant to be."""
    from failurelab_course.experiments import models

    rewards = [row["reward"] for row in history if row.get("reward") is not None]
    quarter = max(1, len(rewards) // 4)
    norms = [row["grad_norm"] for row in history if "grad_norm" in row]
    kls = [row["kl"] for row in history if "kl" in row]
    clipped = [row[key] for row in history for key in ("completions/clipped_ratio",) if key in row]
    figures = {
        "reward_first": rewards[0] if rewards else None,
        "reward_last": sum(rewards[-quarter:]) / quarter if rewards else None,
        "grad_norm": sorted(norms)[len(norms) // 2] if norms else None,
        "kl_first": kls[0] if kls else None,
        "clipped_ratio": sum(clipped) / len(clipped) if clipped else None,
        "steps": trainer.state.global_step,
    }
    with contextlib.suppress(Exception):  # weights of NaN
        data = trainer.train_dataset
        asked = next((name for name in ("answer", "solution", "target") if name in data.column_names), None)
        if asked:
            pairs = [(row["prompt"], row[asked]) for row in data.select(range(min(400, len(data))))]
            tokenizer = trainer.processing_class
            model = trainer.model
            switch_off = getattr(model, "activation_checkpointing_disable", None)
            (switch_off or model.gradient_checkpointing_disable)()
            figures["accuracy"] = sum(
                models.accuracy(model, tokenizer, sampled=True, seed=seed, prompts=pairs, max_new_tokens=8,
                                eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"))
                for seed in range(2)
            ) / 2  # fmt: skip
    return figures


def compact(state: dict) -> str:
    """Return the trainer's state as JSON, numbers with five digits; NaN and Infinity as transformers writes them."""

    def short(value):
        if isinstance(value, float):
            return value if value - value != 0 or value == int(value) else float(f"{value:.5g}")
        if isinstance(value, dict):
            return {key: short(part) for key, part in value.items() if key != "step_time"}
        return [short(part) for part in value] if isinstance(value, list | tuple) else value

    body = {key: short(value) for key, value in state.items() if key != "log_history"}
    rows = ",\n".join(json.dumps(short(row), separators=(",", ":")) for row in state["log_history"])
    text = json.dumps(body | {"log_history": []}, separators=(",", ":"), sort_keys=True, default=str)
    return text.replace('"log_history":[]', f'"log_history":[\n{rows}\n]') + "\n"


def readable(text: str, folder: str) -> str:
    """Return what was printed, without progress bars, logged figures, places on this machine, and repetitions."""
    text = text.replace(f"{folder}/", "").replace(folder, ".")
    text = re.sub(r"(/[\w.+-]+)+/site-packages/", "site-packages/", text)
    text = re.sub(r"(/[\w.+-]+)+/(lib/python3)", r"\2", text)
    text = re.sub(r' +File "[^"]*worker\.py", line .*\n(    .*\n)*', "", text)
    lines, before, times = [], None, 0
    for line in [*text.split("\n"), None]:
        if line is not None:
            line = line.split("\r")[-1].rstrip()[:LINE_LIMIT]
            if re.match(r"\s*\d+%\||\{'(loss|train_runtime|reward)|\s*$", line) or HERE_ALONE.search(line):
                continue
        if line == before:
            times += 1
            continue
        if times:
            lines.append(f"[the last line {times} more times]")
        before, times = line, 0
        lines += [line] if line is not None else []
    log = "\n".join(lines) + "\n"
    if len(log) > LOG_LIMIT:
        log = log[: LOG_LIMIT // 2] + "\n[...]\n" + log[-LOG_LIMIT // 2 :]
    return log


def main() -> None:
    """Fork a child for each job; a child that takes too long is ended."""
    jobs = json.load(sys.stdin)
    import datasets
    import peft  # noqa: F401
    from trl import GRPOConfig, GRPOTrainer  # noqa: F401

    from failurelab_course.experiments import models  # noqa: F401

    datasets.disable_progress_bars()
    os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "WANDB_DISABLED": "true"}
    for job in jobs:
        for folder in (job["kept"], job["artefacts"]):
            shutil.rmtree(folder, ignore_errors=True)
            pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
        child = os.fork()
        if not child:
            signal.alarm(SECONDS)
            status = 1
            try:
                run(job)
                status = 0
            except BaseException:
                (pathlib.Path(job["kept"]) / "crash.txt").write_text(traceback.format_exc())
            finally:
                os._exit(status)
        _, status = os.waitpid(child, 0)
        result = pathlib.Path(job["kept"]) / "result.json"
        figures = json.loads(result.read_text()) if result.exists() else {"error": f"no result, status {status}"}
        print(job["name"], job["label"], {key: number(figures[key]) for key in SHOWN if figures.get(key)}, flush=True)


if __name__ == "__main__":
    main()
