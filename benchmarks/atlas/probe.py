"""One small training, as a person's script has it, which preflight judges in every release: see measure.py.

What a release does not have ends it with the words NOT THERE. What preflight does not judge is measured here: `--says`.
With `--each LISTS` as the only argument, this imports the libraries once, and runs once for each list of arguments in
LISTS (JSON), in a folder named by its number, where its errors are in `stderr`.
"""

import argparse
import ast
import contextlib
import copy
import dataclasses
import functools
import importlib
import inspect
import json
import os
import pathlib
import signal
import sys
import warnings

import torch
import trl
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

LONGEST = 180  # seconds of one run of several
if sys.argv[1:2] == ["--each"]:
    for number, arguments in enumerate(json.loads(sys.argv[2])):
        if process := os.fork():
            os.waitpid(process, 0)
            continue
        signal.alarm(LONGEST)
        os.mkdir(str(number))
        os.chdir(str(number))
        os.dup2(os.open("stderr", os.O_WRONLY | os.O_CREAT), 2)
        sys.argv[1:] = arguments
        break
    else:
        sys.exit()

MODEL = os.environ["ATLAS_MODEL"]
CHECKPOINTING = {
    "off": {"gradient_checkpointing": False},
    "default": {"gradient_checkpointing": True},
    "reentrant": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    "non-reentrant": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
}
LORA = LoraConfig(task_type="CAUSAL_LM", r=8, target_modules=["q_proj", "v_proj"])
LENGTHS = {"mixed": 0, "longer": 2, "long": 12}  # sentences before the question, of 66 tokens each
WIDE = 32768  # entries of the vocabulary, where memory is measured
SIZES = {
    "GRPO": {"per_device_train_batch_size": 4, "num_generations": 2, "max_completion_length": 8},
    "RLOO": {"per_device_train_batch_size": 4, "num_generations": 2, "max_completion_length": 8},
    "OnlineDPO": {"per_device_train_batch_size": 2, "max_new_tokens": 8},
}


@functools.cache
def of_trl(name):
    """Return what trl has by this name; of Online DPO, what `trl.experimental` has, where newer releases keep it."""
    for module in () if name.startswith(("GRPO", "RLOO")) else ("online_dpo", "judges"):
        with contextlib.suppress(ImportError):
            found = getattr(importlib.import_module(f"trl.experimental.{module}"), name, None)
            if found is not None:
                return found
    return getattr(trl, name, None)


def not_there(what):
    """End, for this release does not have it."""
    sys.exit(f"NOT THERE: {what}")


def value(text):
    """Return what a word of the command line stands for."""
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text


parser = argparse.ArgumentParser()
parser.add_argument("--trainer", choices=sorted(SIZES), default="GRPO")
parser.add_argument("--model", default="plain")  # frozen, lora, wrapped, ..., as they stand below
parser.add_argument("--checkpointing", choices=sorted(CHECKPOINTING), default="off")
parser.add_argument("--lengths", choices=LENGTHS, default="mixed")
parser.add_argument("--prompts", choices=("messages", "text"), default="messages")
MEASURED = ("memory", "rollouts", "generation", "zero3", "evaluation", "tools", "warnings", "adapter")
parser.add_argument("--measure", choices=MEASURED, help="what is measured here, and written into --says")
parser.add_argument("--says", type=pathlib.Path, help="a file for what was measured here, a line of JSON each time")
parser.add_argument("--defaults", help="write what each configuration's fields are by default into this file, and end")
parser.add_argument("settings", nargs="*")
asked = parser.parse_args()

if asked.defaults:
    defaults = {}
    for name in SIZES:
        config = of_trl(f"{name}Config")
        for field in dataclasses.fields(config) if config else ():
            if isinstance(field.default, (bool, int, float, str, type(None))):
                defaults.setdefault(f"{name}Config", {})[field.name] = field.default
    pathlib.Path(asked.defaults).write_text(json.dumps(defaults))
    sys.exit()

config_class, trainer_class = of_trl(f"{asked.trainer}Config"), of_trl(f"{asked.trainer}Trainer")
if config_class is None or trainer_class is None:
    not_there(f"{asked.trainer}Trainer")
fields = {field.name: field.default for field in dataclasses.fields(config_class)}
settings = {name: value(text) for name, _, text in (word.partition("=") for word in asked.settings)}
for name, given in settings.items():
    if name not in fields:
        not_there(f"{name} in {config_class.__name__}")
    if isinstance(fields[name], bool) and isinstance(given, str):  # a later release's, which this one takes for true
        not_there(f"{name}={given} in {config_class.__name__}")
sizes = SIZES[asked.trainer]
if asked.trainer == "RLOO" and "num_generations" not in fields:
    not_there("RLOOTrainer with reward functions")
usual = {
    "output_dir": "out",
    "learning_rate": 1e-5,
    "report_to": "none",
    "use_cpu": True,
    "max_steps": 3,
    "bf16": False,
}
if asked.measure in ("zero3", "evaluation"):
    from failurelab_course.experiments import deepspeed as engines

    launch = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    os.environ.update(launch | {"DS_ACCELERATOR": "cpu"})
    import deepspeed.ops  # its operation for the CPU, a minute to build, serves several processes: it does without

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    settings["deepspeed"] = engines.config(3)
if asked.measure == "tools":
    settings["max_completion_length"] = 256
args = config_class(**(usual | sizes | CHECKPOINTING[asked.checkpointing] | settings))

tokenizer = AutoTokenizer.from_pretrained(MODEL, padding_side="left")
if asked.model == "name":
    model = os.environ["ATLAS_BFLOAT16"]
elif asked.model == "qlora":
    from transformers import BitsAndBytesConfig

    in_four_bits = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )
    model = AutoModelForCausalLM.from_pretrained(
        MODEL, quantization_config=in_four_bits, torch_dtype=torch.float32, device_map={"": "cpu"}
    )
else:
    dtype = torch.bfloat16 if "bfloat16" in asked.model else torch.float32
    model = AutoModelForCausalLM.from_pretrained(MODEL, torch_dtype=dtype)
if asked.model == "frozen":
    model.get_input_embeddings().weight.requires_grad = False
if asked.model == "other_end":
    model.generation_config.eos_token_id = [tokenizer.convert_tokens_to_ids("0"), tokenizer.convert_tokens_to_ids("1")]
if asked.model == "wrapped":
    model = get_peft_model(model, LORA)


def train_adapter(model):
    """Stand for a supervised training of an adapter: it changes what the model says."""
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.05)


if asked.model == "trained_adapter":
    model = get_peft_model(model, LORA)
    train_adapter(model)
if asked.model in ("loaded_adapter", "loaded_twice", "merged_adapter"):
    trained = get_peft_model(copy.deepcopy(model), LORA)
    train_adapter(trained)
    trained.save_pretrained("adapter")
    model = PeftModel.from_pretrained(model, "adapter", is_trainable=asked.model == "loaded_twice")
if asked.model == "merged_adapter":
    model = model.merge_and_unload()
if asked.measure == "memory":  # as wide as the rows of a real model are, beside its layers
    model.resize_token_embeddings(WIDE)
more = {"peft_config": LORA} if asked.model in ("lora", "bfloat16_lora", "loaded_twice", "qlora") else {}

pad = "Add these two numbers, please, and say nothing else than the sum. " * LENGTHS[asked.lengths]
pairs = [(a, b) for a in range(0, 20, 3) for b in range(0, 20, 2)]
asks = [f"{pad}{a} + {b}" for a, b in pairs]
prompts = asks if asked.prompts == "text" else [[{"role": "user", "content": text}] for text in asks]
rows = Dataset.from_list([{"prompt": prompt, "answer": str(a + b)} for prompt, (a, b) in zip(prompts, pairs)])


def digits(completions, **kwargs):
    """Pay for digits, so that rewards differ."""
    texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
    return [sum(letter.isdigit() for letter in text) / 8 for text in texts]


def say(**figures):
    """Write down what was measured."""
    with asked.says.open("a") as file:
        file.write(json.dumps(figures) + "\n")


def note_memory(model):
    """Have the run end at the model's first training pass, of which the peak of memory is noted."""
    from failurelab_course.experiments.memory import peak_memory

    forward = model.forward

    @functools.wraps(forward)
    def measured(*args, **kwargs):
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        peak = peak_memory(lambda: forward(*args, **kwargs))
        rows, tokens = (kwargs["input_ids"] if "input_ids" in kwargs else args[0]).shape
        say(peak=peak, vocabulary=WIDE, rows=rows, tokens=tokens)
        sys.exit("measured")

    model.forward = measured


def stale_rollouts(model):
    """Return a rollout function that generates with its own copy of the model, as an engine does: nobody updates it."""
    from failurelab.logits import completion_logps

    engine = copy.deepcopy(model).eval()

    @torch.no_grad()
    def rollout(prompts, *_):
        answer = {"prompt_ids": [], "completion_ids": [], "logprobs": []}
        gaps = []
        for prompt in prompts:
            text = prompt
            if not isinstance(prompt, str):
                text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
            ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
            whole = engine.generate(ids, max_new_tokens=8, do_sample=True, pad_token_id=tokenizer.pad_token_id)
            kept = whole.shape[1] - ids.shape[1]
            scores = [completion_logps(each, whole, torch.ones_like(whole), kept)[0] for each in (engine, policy())]
            gaps.append((scores[0] - scores[1]).abs().mean().item())
            answer["prompt_ids"].append(ids[0].tolist())
            answer["completion_ids"].append(whole[0, ids.shape[1] :].tolist())
            answer["logprobs"].append(scores[0].tolist())
        say(gap=sum(gaps) / len(gaps))
        return answer

    return rollout


def policy():
    """Return the model that is trained."""
    return trainer.accelerator.unwrap_model(trainer.model)


def add(a: str, b: str) -> str:
    """Add two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return "12"


CALL = '<tool_call>\n{"name":"add","arguments":{"a":"3","b":"9"}}\n</tool_call>'  # not as a template writes it


def call_tools(model):
    """Have a model answer with a call of a tool, and after it with a number, as the ids of single letters."""
    drawn = [[*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id] for text in (CALL, "12")]

    def generate(input_ids=None, attention_mask=None, **_):
        told = "<tool_response>" in tokenizer.decode(input_ids[0])
        return torch.cat([input_ids, torch.tensor([drawn[told]] * len(input_ids))], dim=1)

    model.generate = generate
    make = trainer._generate_and_score_completions

    @functools.wraps(make)
    def made(*given):
        batch = make(*given)
        for ids, mask in zip(batch["completion_ids"].tolist(), batch["completion_mask"].tolist()):
            scored = [token for token, kept in zip(ids, mask) if kept]
            say(called=tokenizer.eos_token_id in scored[:-1], kept=scored[: len(drawn[0])] == drawn[0])
        return batch

    trainer._generate_and_score_completions = made


def count_warnings():
    """Train, and say how often the warning of checkpointing was issued in which kind of pass."""
    counts = dict.fromkeys(("generation", "scoring", "training"), 0)
    passes = []  # under way, the outermost first

    def note(message, *_, **__):
        if passes and "None of the inputs have requires_grad" in str(message):
            counts[passes[0]] += 1

    def within(name, kind):
        called = getattr(policy(), name)

        @functools.wraps(called)
        def noted(*given, **options):
            passes.append(kind())
            try:
                return called(*given, **options)
            finally:
                passes.pop()

        setattr(policy(), name, noted)

    within("generate", lambda: "generation")
    within("forward", lambda: "training" if torch.is_grad_enabled() else "scoring")
    warnings.simplefilter("always")
    warnings.showwarning = note
    try:
        trainer.train()
    finally:
        say(**counts)


def follow_adapter():
    """Train, and say how many tensors of the adapter a step may change, and how many were; or what training ends in."""
    tensors = {name: tensor for name, tensor in policy().named_parameters() if "lora_" in name}
    before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    trainable, ends = sum(tensor.requires_grad for tensor in tensors.values()), ""
    try:
        trainer.train()
    except Exception as error:
        ends = f"{type(error).__name__}: {error}"
    changed = sum(not torch.equal(before[name], tensor) for name, tensor in tensors.items())
    say(tensors=len(tensors), trainable=trainable, changed=changed, ends=ends)


@torch.no_grad()
def generate_in_train_mode():
    """Say by how many nats a token `generate` is off the policy in train mode under checkpointing, and in eval mode.

    Beside these, what each of the two ways to go wrong would do to the next token of these rows: a mask that hides
    nothing, and a cache that is lost, so that the last token alone is seen.
    """
    from failurelab import rollouts

    batch = tokenizer(asks[::8], return_tensors="pt", padding=True)
    ids, mask = batch["input_ids"], batch["attention_mask"]  # both (rows, tokens)
    model.gradient_checkpointing_enable(CHECKPOINTING[asked.checkpointing]["gradient_checkpointing_kwargs"])
    options, ends = {"max_new_tokens": 8, "use_cache": True}, ""
    even = off = rollouts.compare(model.eval(), tokenizer, ids, mask, **options)
    try:
        off = rollouts.compare(model.train(), tokenizer, ids, mask, **options)
    except RuntimeError as error:  # a mask for tokens that the layers do not have
        ends = f"{type(error).__name__}: {error}"
    model.eval()
    hidden = (1.0 - mask[:, None, None]) * torch.finfo(model.dtype).min  # (rows, 1, 1, tokens): padding alone
    square = hidden.expand(-1, -1, ids.shape[1], -1).contiguous()
    right, unmasked, alone = (
        model(**given).logits[:, -1].log_softmax(-1)  # (rows, vocabulary)
        for given in (dict(batch), {"input_ids": ids, "attention_mask": square}, {"input_ids": ids[:, -1:]})
    )
    planted = [(each - right).gather(1, right.argmax(1)[:, None]).abs().mean().item() for each in (unmasked, alone)]
    say(
        kind=asked.checkpointing,
        train=off.error,
        ends=ends,
        eval=even.error,
        rounding=even.rounding,
        cache=off.use_cache,
        lengths=len(set(mask.sum(1).tolist())),
        planted=planted,
    )


def train_in_partitions():
    """Train under ZeRO-3, after an evaluation where that is asked; note the hooks that are on in each generation."""
    from failurelab import zero3

    generate = policy().generate

    @functools.wraps(generate)
    def noted(*given, **options):
        say(hooks=zero3.hooks(policy()))
        return generate(*given, **options)

    if asked.measure == "evaluation":
        try:
            trainer.evaluate(rows.select(range(4)))
        except Exception as error:
            say(evaluate=f"{type(error).__name__}: {error}")
    else:
        policy().generate = noted
    try:
        trainer.train()
        say(train="")
    except Exception as error:
        say(train=f"{type(error).__name__}: {error}")


if asked.measure == "generation":
    generate_in_train_mode()
    sys.exit()
if asked.trainer == "OnlineDPO" and "reward_funcs" in inspect.signature(trainer_class.__init__).parameters:
    # from here on preferences come from rewards, and in some releases a judge alone ends in a TypeError
    rows = rows.remove_columns("answer")
    more |= {"reward_funcs": digits}
elif asked.trainer == "OnlineDPO":

    class FewerLettersWin(of_trl("BasePairwiseJudge")):
        """Prefer the shorter completion."""

        def judge(self, prompts, completions, shuffle_order=True):
            """Return 0 where the first is preferred, and 1 where the second is."""
            return [int(len(second) < len(first)) for first, second in completions]

    rows = rows.remove_columns("answer")
    more |= {"judge": FewerLettersWin()}
else:
    more |= {"reward_funcs": digits}
if asked.measure == "rollouts":
    if "rollout_func" not in inspect.signature(trainer_class.__init__).parameters:
        not_there("rollout_func in GRPOTrainer")
    more |= {"rollout_func": stale_rollouts(model)}
if asked.measure == "tools":
    if "tools" not in inspect.signature(trainer_class.__init__).parameters:
        not_there("tools in GRPOTrainer")
    from trl.chat_template_utils import qwen3_chat_template

    tokenizer.chat_template = qwen3_chat_template  # one of those that trl reads calls of
    model.config.max_position_embeddings = 4096
    more |= {"tools": [add]}
pathlib.Path("out").mkdir(exist_ok=True)
trainer = trainer_class(model=model, args=args, train_dataset=rows, processing_class=tokenizer, **more)
if asked.measure == "memory":
    note_memory(policy())
if asked.measure == "tools":
    call_tools(policy())
if asked.measure in ("zero3", "evaluation"):
    train_in_partitions()
elif asked.measure == "warnings":
    count_warnings()
elif asked.measure == "adapter":
    follow_adapter()
else:
    trainer.train()
if asked.says:
    asked.says.touch()  # it ended well, whatever was said
