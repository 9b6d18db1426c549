"""Real processes that train together by gloo: each runs cases one after another, a line of JSON for each.

Each case is a way of training or a mistake, by its name in CASES. It is run with and without StepGuard where the name
ends in "=": then the weights of both are compared. Processes are forked from one that has imported the libraries, which
takes longer than a case does.
"""

import contextlib
import copy
import dataclasses
import datetime
import functools
import hashlib
import json
import multiprocessing
import os
import random
import signal
import sys
import traceback
import warnings

import torch
import torch.distributed as dist
import transformers
import trl
from steps import OnlineDPOTrainer, online_dpo, right, rloo, trainer
from transformers import TrainerCallback

from failurelab import errors, guards
from failurelab._meeting import free_port
from failurelab.textbook import comparison, ranks, recorder, suspects
from failurelab_course.experiments import deepspeed as engines
from failurelab_course.experiments import models

RANK, COUNT = 0, 1  # of a process that `launch` has started
PATIENCE = 300  # seconds, a limit against hanging
LIMIT = 30  # seconds that calls of all processes have, where one of them is hurt
ZERO = {
    "zero_force_ds_cpu_optimizer": False,
    "zero_allow_untested_optimizer": True,
    "bf16": {"enabled": "auto"},
    "train_micro_batch_size_per_gpu": "auto",
    "train_batch_size": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
}


def lengths(completions, **_):
    """Reward ones, and punish length, with no two alike, so that no group has equal rewards."""
    return [text.count("1") - 0.3 * len(text) + 0.01 * sum(map(ord, text)) for text in completions]


def changed(loss=None, step=None):
    """Return a trainer with a mistake in its loss, or before its steps."""

    class Changed(trl.GRPOTrainer):
        calls = 0

        def compute_loss(self, model, given, *rest, **options):
            self.calls += 1
            value = super().compute_loss(model, given, *rest, **options)
            return value if loss is None else loss(value, self.calls)

        def training_step(self, *given, **options):
            if step is not None:
                step(self)
            return super().training_step(*given, **options)

    return Changed


def scored(change):
    """Return a trainer with a mistake in what it makes of a generation, before that is cut into micro-batches."""

    class Scored(trl.GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            made = super()._generate_and_score_completions(inputs)
            return made | change(made)

    return Scored


def of_rank_0(made):
    """Count the tokens of rank 0, times the number of ranks, in the place of those of all."""
    own = made["completion_mask"].sum()
    dist.broadcast(own, 0)
    return {"num_items_in_batch": own * COUNT}


def of_own(made):
    return {"num_items_in_batch": made["completion_mask"].sum() * COUNT}


def of_other_rank(made):
    own = made["advantages"].clone()
    dist.broadcast(own, 0)
    return {"advantages": own}


def drift(made):
    if made.state.global_step == 0 and RANK == 1:
        with torch.no_grad():
            next(made.model.parameters()).mul_(1.001)


def same_numbers(made):
    torch.manual_seed(7)


class SamePrompts(trl.GRPOTrainer):
    """Hands every rank the first rank's batch, as a sampler does that knows of no others."""

    def training_step(self, model, inputs, *rest):
        if isinstance(inputs, list):
            inputs = [inputs]
            dist.broadcast_object_list(inputs, 0)
            inputs = inputs[0]
        return super().training_step(model, inputs, *rest)


class Unaveraged(trl.GRPOTrainer):
    """Computes its loss on the model below DDP, whose gradients nobody adds up."""

    def compute_loss(self, model, *rest, **options):
        return super().compute_loss(self.accelerator.unwrap_model(model), *rest, **options)


class Unpaired(OnlineDPOTrainer):
    """Gives the pairs of rank 1 no gradient."""

    def _forward(self, *given):
        return super()._forward(*given) * (RANK != 1)


class Sharded(trl.GRPOTrainer):
    """A model that is sharded by hand: accelerate takes FSDP for accelerators alone, and would wrap it in DDP."""

    def __init__(self, *given, **options):
        super().__init__(*given, **options)
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (COUNT,))
        inner = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
        for layer in inner.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(inner, mesh=mesh)  # which generation calls, below PEFT's wrapper
        self.accelerator.prepare_model = lambda model, **_: model

    def _clip_grad_norm(self, model):
        return torch.nn.utils.clip_grad_norm_(model.parameters(), self.args.max_grad_norm)


def zero(stage, **more):
    spread = {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
    return {"deepspeed": copy.deepcopy(ZERO) | {"zero_optimization": {"stage": stage} | spread}} | more


def lora():
    import peft

    names = ["q_proj", "v_proj"]
    config = peft.LoraConfig(r=2, target_modules=names, task_type="CAUSAL_LM", init_lora_weights="gaussian")
    return {"config": config}


LARGE = {"max_grad_norm": 1e9}
FSDP = {"kind": Sharded}
SPREAD = {"per_device_train_batch_size": 2, "num_generations": 4}
ONLINE_DPO = functools.partial(online_dpo, reward=lengths)
MOVED = {"max_steps": 2, "learning_rate": 1e-3, "beta": 0.2}
PAIRS = {"build": ONLINE_DPO, "gradient_accumulation_steps": 1} | MOVED
RLOO = {"build": functools.partial(rloo, rewards=[right, lengths])} | MOVED
CASES = {
    "online dpo": PAIRS,
    "online dpo lora": lambda: PAIRS | lora(),
    "online dpo rank left out": PAIRS | {"kind": Unpaired},
    "rloo": RLOO,
    "rloo groups on both ranks": RLOO | SPREAD | {"num_iterations": 2},
    "ddp": {},
    "groups on both ranks": SPREAD,
    "bnpo": {"loss_type": "bnpo"},
    "scaled by the batch": {"scale_rewards": "batch"},
    "two steps from a generation": {"steps_per_generation": 6, "max_steps": 2, "learning_rate": 1e-3},
    "beta": {"beta": 0.1, "max_steps": 2, "learning_rate": 1e-3},
    "an epoch's rest": {"rows": 12, "num_train_epochs": 1, "max_steps": -1, "gradient_accumulation_steps": 2},
    "bf16": {"bf16": True},
    "lora": lora,
    "entropy": {"entropy_coef": 1.0, "temperature": 1.5, "max_completion_length": 6},
    "zero2": zero(2),
    "zero3": zero(3),
    "zero3 two steps from a generation": zero(3, steps_per_generation=6, max_steps=2, learning_rate=1e-3),
    "zero3 lora": lambda: zero(3) | lora(),
    "zero3 bf16": zero(3, bf16=True),
    "zero3 beta": zero(3, beta=0.1, max_steps=2, learning_rate=1e-3),
    "zero2 rank left out": zero(2, kind=changed(lambda loss, _: loss * (RANK != 1))),
    "zero3 rank left out": zero(3, kind=changed(lambda loss, _: loss * (RANK != 1))),
    "fsdp2": FSDP,
    "fsdp2 two steps from a generation": FSDP | {"steps_per_generation": 6, "max_steps": 2, "learning_rate": 1e-3},
    "fsdp2 lora": lambda: FSDP | lora(),
    "fsdp2 rank left out": {"kind": type("Both", (changed(lambda loss, _: loss * (RANK != 1)), Sharded), {})},
    "rank left out": {"kind": changed(lambda loss, _: loss * (RANK != 1))},
    "summed": {"kind": changed(lambda loss, _: loss * COUNT)},
    "divided twice": {"kind": changed(lambda loss, _: loss / COUNT)},
    "tokens of rank 0": {"kind": scored(of_rank_0)},
    "own tokens": {"kind": scored(of_own)},
    "same prompts": {"kind": SamePrompts},
    "same numbers": {"kind": changed(step=same_numbers)} | SPREAD,
    "advantages of rank 0": {"kind": scored(of_other_rank)},
    "weights apart": {"kind": changed(step=drift)},
    "batch dropped": {"kind": changed(lambda loss, call: loss * (not (RANK == 1 and call == 2)))},
    "not averaged": {"kind": Unaveraged},
    "another temperature": {"generation_kwargs": {"temperature": 0.5}},
    "a guard on rank 0 alone": {},
}


def digest(made):
    """Return a number for the weights that this rank has after training."""
    total = hashlib.sha256()
    for parameter in made.model.parameters():
        value = parameter.ds_tensor if hasattr(parameter, "ds_tensor") else parameter
        value = value.to_local() if hasattr(value, "to_local") else value
        total.update(value.detach().float().numpy().tobytes())
    return total.hexdigest()


# Where rank 1 is hurt, as it comes there for the first time; the last ones while a mistake is searched for, and while
# weights that are spread are gathered.
PHASES = {
    "before the meeting": (recorder.Recorder, "begin", {}),
    "before a comparison": (recorder.Recorder, "_evidence", {}),
    "in a pass": (comparison, "expected_gradient", {}),
    "in a reduction": (ranks.Ranks, "_reduce", {}),
    "in the search": (suspects, "read_rows", CASES["rank left out"]),
    "as weights are gathered": (ranks, "_full", CASES["zero3"]),
}
HOWS = ("dies", "hangs", "raises")
# What is told of other processes before training.
UNLIKE = ("a guard on rank 0 alone", "another step", "no evidence")


class Release(TrainerCallback):
    """Says that this rank's guard is done with an event; a rank that hangs goes on then."""

    def on_train_begin(self, *_, **__):
        ranks._store().set("begun", "")

    def on_pre_optimizer_step(self, *_, **__):
        ranks._store().set("stepped", "")


def hurt(name):
    """End or stop this process where a phase begins."""
    how, _, phase = name.partition(" ")
    owner, attribute, _ = PHASES[phase]
    method = getattr(owner, attribute)

    @functools.wraps(method)
    def hurting(*args, **kwargs):
        setattr(owner, attribute, method)
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "raises":
            raise ArithmeticError("of this rank alone")
        event = "begun" if phase == "before the meeting" else "stepped"
        ranks._store().wait([event], datetime.timedelta(seconds=PATIENCE))
        return method(*args, **kwargs)

    setattr(owner, attribute, hurting)


def unlike(name):
    """Make this process another one than rank 0's."""
    if name == "another step":
        recorder.Recorder._first_wanted = lambda self: 2
    if name == "no evidence":
        recorder.Recorder.listen_to_rewards = lambda self: None


def run(name, guarded=True):
    """Train by a case; return what its guard said."""
    how, _, phase = name.partition(" ")
    hurts = how in HOWS and phase in PHASES
    options = PHASES[phase][2] | {"ddp_timeout": LIMIT} if hurts else CASES.get(name, {})
    options = dict(options() if callable(options) else options)
    if name in UNLIKE:
        options["ddp_timeout"] = LIMIT
    rows = options.pop("rows", None)
    given = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3, "max_completion_length": 4, "seed": 1}
    given |= LARGE | options
    random.seed(RANK)
    transformers.integrations.deepspeed.unset_hf_deepspeed_config()
    model = transformers.AutoModelForCausalLM.from_pretrained(models.path("tiny"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(models.path("tiny"), padding_side="left")
    if rows:
        given["rows"] = [(f"{a}+{a}=", str(2 * a)) for a in range(rows)]
    build = given.pop("build", functools.partial(trainer, rewards=[right, lengths]))
    if build is ONLINE_DPO:
        given["max_new_tokens"] = given.pop("max_completion_length")
    made = build(model, tokenizer, "out", **({"lengths": (4, 5)} | given))
    guard = None
    if guarded and (RANK == 0 or name != "a guard on rank 0 alone"):
        guard = guards.StepGuard(made, every=1)
        made.add_callback(guard)
    if guarded and hurts and RANK == 0:
        made.add_callback(Release())
    if how == "raises":
        os.environ.pop(errors.OWN_ERRORS, None)
    if guarded and RANK == 1 and hurts:
        hurt(name)
    if guarded and RANK == 1 and name in UNLIKE:
        unlike(name)
    error = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            made.train()
        except RuntimeError as problem:  # of the launch itself, where a rank is gone
            if not hurts:
                raise
            error = str(problem)
    report = guard.report if guard else None
    return {
        "case": name,
        "rank": RANK,
        "verdict": report and report.verdict,
        "named": report and report.named,
        "blind": report and list(report.blind),
        "apart": dataclasses.asdict(report.apart) if report and report.apart else None,
        "reason": report and report.reason,
        "told": [str(each.message) for each in caught if issubclass(each.category, guards.GuardWarning)],
        "ended in": error,
        "weights": digest(made),
    }


def run_cases(names):
    """Run cases in this process; write their answers."""
    with contextlib.ExitStack() as stack:
        limit = datetime.timedelta(seconds=LIMIT if any(name.startswith(HOWS) for name in names) else PATIENCE)
        if any("zero" in name or "gathered" in name for name in names):
            stack.enter_context(engines.ready())
            import deepspeed

            deepspeed.init_distributed("gloo", timeout=limit)
        else:  # on a CPU transformers does not hand its `ddp_timeout` on
            dist.init_process_group("gloo", timeout=limit)
        for name in names:
            try:
                plain = run(name.rstrip("="), guarded=False)["weights"] if name.endswith("=") else None
                answer = run(name.rstrip("=")) | {"plain": plain}
            except Exception as error:
                traceback.print_exc()
                answer = {"case": name, "error": repr(error)}
            with open(f"answers-{RANK}", "a") as stream:
                stream.write(json.dumps(answer) + "\n")


def enter(rank, count, port, folder, work, args):
    """Do work as one of the processes of a launch."""
    global RANK, COUNT
    RANK, COUNT = rank, count
    os.chdir(folder)
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in numbers.items()} | {"MASTER_ADDR": "127.0.0.1"}
    with open(f"log-{rank}", "wb") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    work(*args)
    if dist.is_initialized():
        dist.destroy_process_group()


def launch(folder, work, *args, count=2, patience=PATIENCE):
    """Do work in so many processes of a launch, in a folder; return their exit codes."""
    os.environ["PYTHONPATH"] = os.pathsep.join([*sys.path, os.environ.get("PYTHONPATH", "")])  # of what is forked from
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ranks_child"])
    with free_port() as port:
        started = [context.Process(target=enter, args=(rank, count, port, folder, work, args)) for rank in range(count)]
        for process in started:
            process.start()
        try:
            for process in started:
                process.join(patience)
        finally:
            for process in started:
                process.kill()
                process.join()
    return [process.exitcode for process in started]
