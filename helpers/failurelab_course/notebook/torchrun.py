"""Scripts in several processes, as `torchrun --nproc_per_node N train.py` starts them, without its imports each time.

trl's import takes longer than a short training. So a process of its own imports it once, while the notebook goes on,
and forks the ranks of each launch. They are real processes, and talk by gloo on the CPU. What torchrun tells a rank, it
is told in the same environment variables.

    torchrun = Torchrun()
    torchrun(2, "train.py", "models/tiny-qwen2")
"""

import inspect
import json
import os
import pathlib
import runpy
import signal
import subprocess
import sys
import textwrap
import traceback
from collections.abc import Callable
from typing import Any

from failurelab._meeting import free_port
from failurelab.errors import FailureLabError
from failurelab_course import processes

SHOWN_LINES = 15  # of a rank's last words, where a launch fails


class RankFailed(FailureLabError):
    """A rank of a launch has failed; the message has its last lines."""


class Torchrun:
    """Launches scripts; the libraries are imported in the background from its making on."""

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=processes.end_with_parent,
        )

    def __call__(self, count: int, script: str, *arguments: Any) -> str:
        """Run a script in `count` processes, in this folder, and print what rank 0 prints; return that too.

        Raises:
            RankFailed: a rank ended with an error. The others are ended then, for they would wait for it.
        """
        task = {"count": count, "script": script, "arguments": [str(each) for each in arguments], "folder": os.getcwd()}
        try:
            print(json.dumps(task), file=self._server.stdin, flush=True)
            answer = json.loads(self._server.stdout.readline())
        except (BrokenPipeError, ValueError):
            ended = "the process that forks the ranks has ended. Next: run the notebook from its top"
            raise RankFailed(ended) from None
        print(answer["printed"], end="")
        if answer["failed"] is not None:
            last = "\n".join(answer["error"].strip().splitlines()[-SHOWN_LINES:])
            raise RankFailed(f"rank {answer['failed']} of {count} failed:\n{last}")
        return answer["printed"]

    def close(self) -> None:
        """End the process that forks the ranks."""
        self._server.stdin.close()
        self._server.wait()


def write_function(path: str, function: Callable[..., Any], name: str) -> None:
    """Write a function of the notebook into a file that a script imports, under this name, with the modules it uses."""
    own = textwrap.dedent(inspect.getsource(function)).replace(function.__name__, name)
    known = {each: value for each, value in function.__globals__.items() if inspect.ismodule(value)}
    used = [f"import {known[each].__name__} as {each}\n" for each in function.__code__.co_names if each in known]
    pathlib.Path(path).write_text("".join(["import torch\n", *used, own]), encoding="utf-8")


def _serve() -> None:
    """Answer each line of the input, a launch, by a line."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an import prints is no answer
    from failurelab_course.experiments import quiet
    from failurelab_course.notebook import log_lines

    quiet.quiet()
    import torch
    from trl import GRPOTrainer  # noqa: F401  a rank has it by the fork

    torch.set_num_threads(1)  # before the first operation: a pool of threads does not come through a fork
    log_lines.install()
    for line in sys.stdin:
        print(json.dumps(_launch(json.loads(line))), file=answers, flush=True)


def _launch(task: dict[str, Any]) -> dict[str, Any]:
    os.chdir(task["folder"])
    with free_port() as port:
        outputs = [os.memfd_create(name) for _ in range(task["count"]) for name in ("out", "error")]
        ranks = {}
        for rank in range(task["count"]):
            child = os.fork()
            if not child:
                _be_rank(task, rank, port, *outputs[2 * rank : 2 * rank + 2])
            ranks[child] = rank
        failed = None
        while ranks:
            child, status = os.wait()
            rank = ranks.pop(child)
            if status and failed is None:
                failed = rank
                for other in ranks:
                    os.kill(other, signal.SIGKILL)
    texts = []
    for output in outputs:
        with os.fdopen(output) as file:
            file.seek(0)
            texts.append(file.read())
    return {"printed": texts[0], "failed": failed, "error": "" if failed is None else texts[2 * failed + 1]}


def _be_rank(task: dict[str, Any], rank: int, port: int, out: int, error: int) -> None:
    """Run the script as one of the ranks, and end this process."""
    status = 1
    try:
        os.dup2(out, 1)
        os.dup2(error, 2)
        count = str(task["count"])
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        sys.argv = [task["script"], *task["arguments"]]
        sys.path.insert(0, task["folder"])
        runpy.run_path(task["script"], run_name="__main__")
        from torch import distributed

        if distributed.is_initialized():  # threads of the group that outlive it end a process in SIGABRT now and then
            distributed.destroy_process_group()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    _serve()
