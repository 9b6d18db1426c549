"""A stand-in for vLLM in every release of trl: colocated, or behind trl's client of a server. trl's own code asks it.

It is made to be wrong in the ways in which engines are: old weights, another dtype, log-probabilities of other tokens.
"""

import copy
import sys
import types

import torch
import trl.trainer.grpo_trainer

from failurelab_course.experiments.vllm_stand_in import draw_ids

try:
    from trl.generation import vllm_generation
except ImportError:
    vllm_generation = None


class Engine:
    """Draws, with a copy of a policy: trl's `LLM`, what its client asks, or a `rollout_func`.

    Args:
        policy: is copied.
        tokenizer: of prompts that are texts.
        dtype: of its weights.
        stale: whether it keeps its first weights.
        temperature: of the sampling; None for the trainer's.
        shift: positions by which its log-probabilities are moved.
        silent: whether it gives no log-probabilities.
    """

    def __init__(self, policy, tokenizer, *, dtype=None, stale=False, temperature=None, shift=0, silent=False):
        self.model = copy.deepcopy(policy).eval().to(dtype or next(policy.parameters()).dtype)
        vars(self.model).pop("forward", None)  # of a model that GRPOTrainer was given: the copy would run the original
        self.tokenizer, self.stale, self.temperature = tokenizer, stale, temperature
        self.shift, self.silent = shift, silent
        runner = types.SimpleNamespace(model=types.SimpleNamespace(load_weights=self.load))
        worker = types.SimpleNamespace(model_runner=runner)
        config = types.SimpleNamespace(max_model_len=512)
        executor = types.SimpleNamespace(driver_worker=worker)
        self.llm_engine = types.SimpleNamespace(model_executor=executor, model_config=config)

    @torch.no_grad()
    def load(self, weights):
        named = dict(self.model.named_parameters())
        for name, weight in () if self.stale else weights:
            name = name.removeprefix("base_model.model.").replace(".base_layer", "")
            if name in named:
                named[name].copy_(weight)

    def __call__(self, prompts, trainer):
        """Answer as a `rollout_func`, with the trainer's weights of now, adapters merged."""
        adapted = hasattr(trainer.model, "merge_adapter")
        if adapted:
            trainer.model.merge_adapter()
        self.load(trainer.model.named_parameters())
        if adapted:
            trainer.model.unmerge_adapter()
        asked = [self.ids(prompt) for prompt in prompts]
        drawn, scores = self.draw(asked, 1, trainer.args.max_completion_length, trainer.args.temperature)
        return {"prompt_ids": asked, "completion_ids": drawn, "logprobs": None if self.silent else scores}

    def reset_prefix_cache(self):
        pass

    def draw(self, prompts, count, max_tokens, temperature):
        """Return `count` completions of each prompt, one prompt after another: ids, and log-probabilities."""
        rows = [ids for ids in prompts for _ in range(count)]
        end = self.tokenizer.eos_token_id
        ids, scores, _ = draw_ids(self.model, rows, max_tokens, self.temperature or temperature, end)
        return ids, [row[-self.shift :] + row[: -self.shift] for row in scores] if self.shift else scores

    def generate(self, prompts, sampling_params, use_tqdm=False):
        """Answer as vLLM's LLM does."""
        ids = [self.ids(prompt) for prompt in prompts]
        count = sampling_params.n
        drawn, scores = self.draw(ids, count, sampling_params.max_tokens, sampling_params.temperature)
        answers = []
        for number, prompt in enumerate(ids):
            own = []
            for tokens, values in list(zip(drawn, scores))[number * count : (number + 1) * count]:
                numbers = [
                    {token: types.SimpleNamespace(logprob=value, rank=1)} for token, value in zip(tokens, values)
                ]
                own.append(types.SimpleNamespace(token_ids=tokens, logprobs=numbers))
            answers.append(types.SimpleNamespace(prompt_token_ids=prompt, outputs=own))
        return answers

    def ids(self, prompt):
        prompt = prompt["prompt_token_ids"] if isinstance(prompt, dict) else prompt
        return self.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else list(prompt)


class Parameters:
    def __init__(self, temperature=1.0, max_tokens=16, n=1, **_):
        self.temperature, self.max_tokens, self.n = temperature, max_tokens, n


def colocate(monkeypatch, engine):
    """Let trl find an engine where it makes vLLM's; return the options that ask for it."""
    place = trl.trainer.grpo_trainer if vllm_generation is None else vllm_generation
    for name, value in {
        "LLM": lambda *_, **__: engine,
        "SamplingParams": Parameters,
        "GuidedDecodingParams": Parameters,
        "is_vllm_available": lambda *_, **__: True,
    }.items():
        monkeypatch.setattr(place, name, value, raising=False)
    for name in ("vllm", "vllm.worker", "vllm.worker.worker"):  # whose profiling 0.14 and 0.15 switch off
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    worker = types.SimpleNamespace(_assert_memory_footprint_increased_during_profiling=None)
    sys.modules["vllm.worker.worker"].Worker = worker
    known = trl.GRPOConfig.__dataclass_fields__
    return {"use_vllm": True} | {
        name: value for name, value in {"vllm_mode": "colocate", "vllm_device": "cpu"}.items() if name in known
    }


def serve(monkeypatch, engine):
    """Let trl find a client of an engine where it makes vLLM's; return the options that ask for it."""

    class Client:
        """Answers as trl's client does: 0.22 is given texts, and told ids alone."""

        def __init__(self, *_, **__):
            self.init_communicator = self.reset_prefix_cache = lambda *_, **__: None

        def get_server_info(self):
            return {"model_config": {"logprobs_mode": "processed_logprobs"}}

        def update_named_params(self, metadata, named):
            engine.load(named)

        def update_named_param(self, name, weight):
            engine.load([(name, weight)])

        def generate(self, prompts, n, temperature, max_tokens, **_):
            asked = [engine.ids(prompt) for prompt in prompts]
            drawn, scores = engine.draw(asked, n, max_tokens, temperature)
            if vllm_generation is None:
                return drawn
            told = {"logprobs": [[[score] for score in row] for row in scores]}
            return {"prompt_ids": asked, "completion_ids": drawn} | told

    place = trl.trainer.grpo_trainer if vllm_generation is None else vllm_generation
    monkeypatch.setattr(place, "is_vllm_available", lambda *_, **__: True)
    monkeypatch.setattr(place, "VLLMClient", Client, raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return {"use_vllm": True, "vllm_mode": "server"}
