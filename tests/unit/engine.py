"""A stand-in for vLLM in every release of trl: colocated, or a server in a process of its own. trl's own code asks it.

It is made to be wrong in the ways in which engines are: old weights, another dtype, log-probabilities of other tokens.
"""

import copy
import http.server
import io
import json
import multiprocessing
import sys
import types
import urllib.request

import torch
import trl.trainer.grpo_trainer

from failurelab_course.experiments.vllm_stand_in import draw_ids

try:
    from trl.generation import vllm_client, vllm_generation
except ImportError:
    vllm_generation = None
    try:
        from trl.extras import vllm_client
    except ImportError:
        vllm_client = None


class Engine:
    """Draws, with a copy of a policy.

    Args:
        policy: is copied.
        tokenizer: of prompts that are texts.
        dtype: of its weights.
        stale: whether it keeps its first weights.
        spoil: changes the log-probabilities of a completion.
        scaled: whether these are those after the temperature.
    """

    def __init__(self, policy, tokenizer, *, dtype=None, stale=False, spoil=lambda scores: scores, scaled=True):
        self.model = copy.deepcopy(policy).eval().to(dtype or next(policy.parameters()).dtype)
        vars(self.model).pop("forward", None)
        self.tokenizer, self.stale, self.spoil, self.scaled = tokenizer, stale, spoil, scaled
        runner = types.SimpleNamespace(model=types.SimpleNamespace(load_weights=self.load))
        worker = types.SimpleNamespace(model_runner=runner)
        config = types.SimpleNamespace(max_model_len=512)
        executor = types.SimpleNamespace(driver_worker=worker)
        self.llm_engine = types.SimpleNamespace(model_executor=executor, model_config=config)

    @torch.no_grad()
    def load(self, weights):
        named = dict(self.model.named_parameters())
        for name, weight in () if self.stale else weights:
            if name in named:
                named[name].copy_(weight)

    def reset_prefix_cache(self):
        pass

    def draw(self, prompts, count, max_tokens, temperature):
        """Return `count` completions of each prompt, one prompt after another: ids, and log-probabilities."""
        rows = [ids for ids in prompts for _ in range(count)]
        ids, scores, raw = draw_ids(self.model, rows, max_tokens, temperature, self.tokenizer.eos_token_id)
        return ids, [self.spoil(row) for row in (scores if self.scaled else raw)]

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


class Handler(http.server.BaseHTTPRequestHandler):
    """What trl asks vLLM's server, or its own of 0.22, by HTTP; `/weights` stands for a broadcast between GPUs."""

    def log_message(self, *_):
        pass

    def answer(self, value):
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        info = {"model_config": {"logprobs_mode": "processed_logprobs"}}
        self.answer({"data": [{"id": "tiny"}], "vllm_config": info, "world_size": 1})

    def do_POST(self):
        engine, body = self.server.engine, self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.path == "/weights":
            engine.load(torch.load(io.BytesIO(body)))
        asked = json.loads(body) if self.path in ("/v1/completions", "/generate/") else {}
        if not asked:
            self.answer({})
            return
        prompts = [engine.ids(prompt) for prompt in asked.get("prompt", asked.get("prompts"))]
        drawn, scores = engine.draw(prompts, asked["n"], asked["max_tokens"], asked["temperature"])
        choices = []
        for number, (ids, values) in enumerate(zip(drawn, scores)):
            names = [f"token_id:{token}" for token in ids]
            told = [dict([pair]) for pair in zip(names, values)]
            logprobs = {"tokens": names, "token_logprobs": values, "top_logprobs": told}
            own = {"prompt_token_ids": prompts[number // asked["n"]], "token_ids": ids, "logprobs": logprobs}
            choices.append(own)
        self.answer({"completion_ids": drawn} if self.path == "/generate/" else {"choices": choices})


def serve(monkeypatch, engine):
    """Start a server in a process of its own; return that process, and the options that ask for it."""
    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    server.engine = engine
    process = multiprocessing.get_context("fork").Process(target=server.serve_forever, daemon=True)
    process.start()
    server.server_close()  # of this process
    address = f"http://127.0.0.1:{server.server_port}"

    class Client(vllm_client.VLLMClient):
        def init_communicator(self, *_, **__):
            pass

        def update_named_params(self, metadata, named):
            body = io.BytesIO()
            torch.save([(name, weight.cpu().clone()) for name, weight in named], body)
            urllib.request.urlopen(f"{address}/weights", body.getvalue()).close()

        def update_named_param(self, name, weight):
            self.update_named_params(None, [(name, weight)])

    for place in (trl.trainer.grpo_trainer, vllm_client, vllm_generation):
        if place is not None:
            monkeypatch.setattr(place, "is_vllm_available", lambda *_, **__: True, raising=False)
            monkeypatch.setattr(place, "VLLMClient", Client, raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return process, {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": address}
