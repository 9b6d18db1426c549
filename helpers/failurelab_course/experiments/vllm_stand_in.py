"""vLLM's names over transformers' `generate`: what trl calls under `use_vllm`, in colocate mode, where there is no GPU.

    vllm_stand_in.install()      # before a trainer is made

trl's own code runs: it makes the engine, sends it the weights, draws from it, and compares its log-probabilities with
the policy's. The engine has weights of its own, in bfloat16, and loses them when it sleeps. `install(eight_bits=True)`
lets it round each matrix to float8 (e4m3, with one scale for a matrix) when it is loaded; it computes in bfloat16 then
too. Nothing of vLLM's speed, cache or kernels is here.

`install(reloads=True)` puts two lines back that trl had from 0.28 to 1.9 (#5312), and 1.10 took out (#5313): under
`vllm_enable_sleep_mode` the engine read its weights from the first checkpoint again, after it had got the new ones.
"""

import dataclasses
import functools
import importlib.machinery
import os
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

from failurelab._unwrap import input_device


class SamplingParams:
    """Those of vLLM's that are used here; others are taken and have no effect."""

    def __init__(self, temperature: float = 1.0, max_tokens: int = 16, ignore_eos: bool = False, **_: Any):
        self.temperature, self.max_tokens, self.ignore_eos = temperature, max_tokens, ignore_eos


@dataclasses.dataclass(frozen=True)
class Logprob:
    """A token's log-probability, and its rank among those that were asked for."""

    logprob: float
    rank: int = 1


class LLM:
    """An engine in this process, with a copy of the weights in bfloat16, or of what 8 bits leave of them."""

    eight_bits = reloads = False
    watch: Callable[[str], None] | None = None  # told the name of each call, after it

    def __init__(self, model: str, **_: Any):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        # trl has chosen a port, often 29500, on which vLLM would listen from here on. Nothing does, and accelerate
        # opens it at the next trainer, when another run on this machine may have it: 0 is any free one.
        if os.environ.get("WORLD_SIZE") == "1":
            os.environ["MASTER_PORT"] = "0"
        self._path = model
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
        self._end = AutoTokenizer.from_pretrained(model).eos_token_id
        self._load(list(self._model.named_parameters()))
        runner = types.SimpleNamespace(model=types.SimpleNamespace(load_weights=self._send))
        worker = types.SimpleNamespace(model_runner=runner)
        executor = types.SimpleNamespace(driver_worker=worker)
        self.llm_engine = types.SimpleNamespace(model_executor=executor)

    @torch.no_grad()
    def _load(self, weights: Sequence[tuple[str, torch.Tensor]]) -> None:
        for name, weight in weights:
            self._model.get_parameter(name).copy_(round_to_float8(weight) if self.eight_bits else weight)

    def _send(self, weights: Sequence[tuple[str, torch.Tensor]]) -> None:
        self._load(weights)
        self._tell("load_weights")

    def _tell(self, call: str) -> None:
        if self.watch:
            self.watch(call)

    @torch.no_grad()
    def sleep(self, level: int = 1) -> None:
        """Give the memory back; at level 2 the weights are lost."""
        if level == 2:
            for weight in self._model.parameters():
                weight.fill_(torch.nan)
        self._tell("sleep")

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take memory again. What the weights were is not known."""
        self._tell(f"wake_up {' '.join(tags or ())}".strip())

    def reset_prefix_cache(self) -> None:
        """There is none."""

    def collective_rpc(self, method: str) -> None:
        """`reload_weights` reads the checkpoint that the engine was made of."""
        from transformers import AutoModelForCausalLM

        if method != "reload_weights":
            raise NotImplementedError(method)
        self._load(list(AutoModelForCausalLM.from_pretrained(self._path, dtype=torch.bfloat16).named_parameters()))
        self._tell(method)

    def generate(self, prompts: Sequence[dict], sampling_params: SamplingParams, use_tqdm: bool = False) -> list[Any]:
        """Draw one completion for each prompt, up to its end; log-probabilities are those after the temperature."""
        rows, end = [row["prompt_token_ids"] for row in prompts], None if sampling_params.ignore_eos else self._end
        self._model.generation_config.eos_token_id = end
        drawn = draw_ids(self._model, rows, sampling_params.max_tokens, sampling_params.temperature, end)
        answers = []
        for row, tokens, values, _ in zip(rows, *drawn):
            numbers = [{token: Logprob(value)} for token, value in zip(tokens, values)]
            completion = types.SimpleNamespace(token_ids=tokens, logprobs=numbers)
            answers.append(types.SimpleNamespace(prompt_token_ids=row, outputs=[completion]))
        self._tell("generate")
        return answers


def round_to_float8(weight: torch.Tensor) -> torch.Tensor:
    """Return a matrix as float8 (e4m3) keeps it, with one scale for the whole; vectors, such as norms', as they are."""
    if weight.dim() < 2:
        return weight
    scale = weight.float().abs().max() / torch.finfo(torch.float8_e4m3fn).max
    return (weight.float() / scale).to(torch.float8_e4m3fn).float() * scale


def install(eight_bits: bool = False, reloads: bool = False) -> None:
    """Let trl find these classes where it looks for vLLM's, in this process; from here on it is as this call says.

    Args:
        eight_bits: how an engine that is made keeps its weights.
        reloads: trl reloads the checkpoint before each generation under sleep mode, as trl 0.28 to 1.9 did.
    """
    from trl.generation import vllm_generation  # imported without vLLM

    LLM.eight_bits, LLM.reloads = eight_bits, reloads
    if "vllm" not in sys.modules:
        module = sys.modules["vllm"] = types.ModuleType("vllm")
        module.__spec__, module.__version__ = importlib.machinery.ModuleSpec("vllm", None), "0.29.0"
        vllm_generation.LLM, vllm_generation.SamplingParams = LLM, SamplingParams
        generate = vllm_generation.VLLMGeneration.generate

        @functools.wraps(generate)
        def reloading(self: Any, *args: Any, **kwargs: Any) -> Any:
            if LLM.reloads and self.mode == "colocate" and self.enable_sleep_mode:
                self.llm.wake_up(tags=["weights"])
                self.llm.collective_rpc("reload_weights")
                self._llm_weights_sleeping = False  # what 1.10 looks at
            return generate(self, *args, **kwargs)

        vllm_generation.VLLMGeneration.generate = reloading


def record_calls(trainer: Any) -> list[tuple[int, str, str]]:
    """Let a trainer's engine note, from here on, what trl asks of it, and whose weights it holds after each call.

    Returns:
        A list that grows: the optimizer steps that were taken, the call, and `lost`, `first` (the policy's as they are
        now), `trained` (the policy's at that time) or `other`. Calls that repeat are one line.
    """
    llm, policy = trainer.vllm_generation.llm, trainer.model
    first = [weight.detach().to(torch.bfloat16) for weight in policy.parameters()]
    lines: list[tuple[int, str, str]] = []

    def note(call: str) -> None:
        held = list(llm._model.parameters())
        trained = [weight.detach().to(torch.bfloat16) for weight in policy.parameters()]
        if all(map(torch.equal, held, trained)):
            holds = "trained"
        elif all(map(torch.equal, held, first)):
            holds = "first"
        else:
            holds = "lost" if any(weight.isnan().any() for weight in held) else "other"
        line = (trainer.state.global_step, call, holds)
        if lines and lines[-1][:2] == line[:2]:
            lines.pop()
        lines.append(line)

    llm.watch = note
    return lines


@torch.no_grad()
def draw_ids(
    model: Any, prompts: Sequence[Sequence[int]], max_tokens: int, temperature: float, end: int | None
) -> tuple[list[list[int]], list[list[float]], list[list[float]]]:
    """Draw a completion for each prompt, up to the first token `end`, which is part of it.

    Returns:
        Of each row: the completion's ids, their log-probabilities, and these without the temperature.
    """
    width = max(map(len, prompts))
    device = input_device(model)
    out = model.generate(
        input_ids=torch.tensor([[0] * (width - len(row)) + list(row) for row in prompts], device=device),
        attention_mask=torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in prompts], device=device),
        max_new_tokens=max_tokens,
        do_sample=True,
        temperature=temperature,
        top_k=0,
        output_scores=True,
        output_logits=True,
        return_dict_in_generate=True,
    )
    drawn = out.sequences[:, width:]  # (rows, tokens)
    both = (torch.stack(rows, 1).float().log_softmax(-1) for rows in (out.scores, out.logits))
    scores, raw = (rows.gather(-1, drawn[..., None])[..., 0].tolist() for rows in both)
    lengths = [row.index(end) + 1 if end in row else len(row) for row in drawn.tolist()]
    ids, scores, raw = ([row[:n] for row, n in zip(rows, lengths)] for rows in (drawn.tolist(), scores, raw))
    return ids, scores, raw
