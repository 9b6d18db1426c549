"""A second engine in a process of its own, reached over HTTP: a stand-in for a vLLM server, of transformers' generate.

    with engine_process.running(model_path, dtype="bfloat16") as url: ...

    POST /generate  {"prompts": [text], "max_tokens": 4, "temperature": 1.0, "seed": 0}
                    -> {"prompt_ids": [[int]], "completion_ids": [[int]], "logprobs": [[float]]}
    POST /load      {"path": folder}  takes the weights of a checkpoint

It has weights and a dtype of its own, as vLLM has, and answers with the log-probabilities of the tokens that it drew,
after the temperature. It ends when whoever started it closes its input, or is gone.
"""

import contextlib
import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any


class Engine:
    """The model behind the server."""

    def __init__(self, path: str, dtype: str, device: str = "cpu"):
        import torch
        from transformers import AutoTokenizer

        self.dtype, self.device = getattr(torch, dtype), device
        self.tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
        self.load(path)

    def load(self, path: str) -> dict[str, Any]:
        """Take the weights of a folder."""
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(path).to(self.device, self.dtype).eval()
        return {}

    def generate(self, prompts: Sequence[str], max_tokens: int, temperature: float, seed: int = 0) -> dict[str, Any]:
        """Draw a completion for each prompt."""
        import torch

        from failurelab_course.experiments.second_engine import draw

        torch.manual_seed(seed)
        asked, ids, scores, _ = draw(self.model, self.tokenizer, prompts, max_tokens, temperature)
        return {"prompt_ids": asked, "completion_ids": ids, "logprobs": scores}


def serve(engine: Engine) -> None:
    """Answer until the input is closed; the first line printed is the address."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            answer = json.dumps({"/generate": engine.generate, "/load": engine.load}[self.path](**asked)).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    sys.stdin.read()  # ends with the process that started this one


@contextlib.contextmanager
def running(path: str, dtype: str = "bfloat16", device: str = "cpu") -> Iterator[str]:
    """Start an engine; yield its address, and end it.

    Raises:
        RuntimeError: it ended before it answered; its last lines are in the message.
    """
    environment = os.environ | {"NO_PROXY": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", __spec__.name, path, dtype, device],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        url = process.stdout.readline().strip()
        if not url:
            raise RuntimeError(f"the engine did not start: {process.stderr.read()[-400:]}")
        threading.Thread(target=process.stderr.read, daemon=True).start()  # or a full pipe would stop it
        yield url
    finally:
        process.stdin.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


if __name__ == "__main__":
    serve(Engine(*sys.argv[1:]))
