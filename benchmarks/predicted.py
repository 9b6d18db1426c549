"""Peak memory of a training step: by simulation, and as the device says it was.

Full, kept and chunked logits; checkpointing off, reentrant, non-reentrant; weights in 4 bit. On a CPU small shapes, in
float32; on a GPU Qwen2-0.5B's in bfloat16, 1,024 to 8,192 tokens. Each figure is what a forward and backward pass adds
to the weights that were there (for weights: what loading them adds). Measured is `observe.peak_memory`, after one step
that is not counted, as cuBLAS keeps its workspace from the first on. A record has the tier of the measured side.

The prediction is that of a GPU, made in a process of its own, on simulated devices (see `simulate`), before anything is
measured, and with attention as a GPU's fused kernel keeps it; a CPU's keeps the same. bfloat16 is not compared on a
CPU: what its kernels hold meanwhile is a matter of the processor. A case that is predicted not to fit is NOT RUN.

Eras: today.
"""

import dataclasses
import gc
import json
import os
import subprocess
import sys

import recording
import torch
import transformers
from predicted_steps import HALF_BILLION, Case, step, trained

from failurelab import simulate
from failurelab.placement import problems
from failurelab_course.experiments import devices, observe

MIB = 2**20
BLOCK = 512  # bytes to which CUDA's caching allocator rounds up
HEAD = {
    "vocab_size": 32_000,
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
DEEP = HEAD | {"vocab_size": 1000, "num_hidden_layers": 8}
WIDE = HEAD | {"vocab_size": 1000, "hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8}
KINDS = ("off", "reentrant", "non-reentrant")


def cases(device: str) -> list[Case]:
    """Return what is asked on a device: small shapes in float32 on a CPU, a real one in bfloat16 on a GPU."""
    if torch.device(device).type == "cpu":
        small = [
            Case(HEAD, batch, prompt, 64, way)
            for batch, prompt in ((2, 192), (4, 64))
            for way in ("full", "kept", "chunked")
        ]
        deep = [Case(DEEP, 2, 192, 64, kind=kind) for kind in KINDS]
        lora = [Case(WIDE, 2, 192, 64, adapters=True, bits=bits) for bits in (0, 4)]
        return small + deep + lora
    lengths = (1024, 2048, 4096, 8192)
    ways = [
        Case(HALF_BILLION, 1, length - 512, 512, way, "reentrant", "bfloat16", rows=256)
        for length in lengths
        for way in ("full", "kept", "chunked")
    ]
    kinds = [
        Case(HALF_BILLION, 1, length - 512, 512, "chunked", kind, "bfloat16", rows=256)
        for length in lengths
        for kind in ("off", "non-reentrant")
    ]
    lora = [
        Case(HALF_BILLION, 1, 1536, 512, "kept", "non-reentrant", "bfloat16", adapters=True, bits=bits)
        for bits in (0, 4)
    ]
    return ways + kinds + lora


def simulated(case: Case, block: int) -> dict:
    """Predict one case on simulated devices, which must be registered; allocations are whole blocks of bytes."""
    dtype = getattr(torch, case.dtype)

    def bare():
        model = simulate.model(case.config(), dtype)
        return simulate.four_bit(model, compute_dtype=dtype) if case.bits else model

    held = simulate.place(bare(), {"": 0})
    weights = simulate.peak_memory(lambda: simulate.tokens(1, 1), held, block=block).before
    model = simulate.place(trained(bare(), case), {"": 0})
    ids = simulate.tokens(case.batch, case.length)
    peak = simulate.peak_memory(lambda: step(model, ids, case), model, block=block)
    return {"weights": weights, "step": peak.beyond, "kinds": dict(peak.kinds)}


def predictions(asked: list[Case], device: str) -> list[dict]:
    """Return the simulation of every case, made in a process of its own that sees no GPU."""
    done = subprocess.run(
        [sys.executable, __file__, "--predict", str(1 if device == "cpu" else BLOCK)],
        input=json.dumps([dataclasses.asdict(case) for case in asked]),
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        text=True,
    )
    if done.returncode == recording.STATUS_NOT_RUN:
        print(done.stdout.splitlines()[-1])
    if done.returncode:
        raise SystemExit(done.returncode)
    return json.loads(done.stdout.splitlines()[-1])


def build(case: Case, device: str):
    """Return the real model, random weights, without adapters."""
    torch.manual_seed(0)
    dtype = getattr(torch, case.dtype)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # or float32 weights would be there for a moment
    try:
        with torch.device("cpu" if case.bits else device):
            model = transformers.Qwen2ForCausalLM(case.config())
    finally:
        torch.set_default_dtype(before)
    return quantized(model, dtype).to(device) if case.bits else model


def quantized(model, dtype: torch.dtype):
    """Replace linear layers but the head by bitsandbytes' in 4 bit; they quantize when the model is moved."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is torch.nn.Linear and name != "lm_head":
                layer = Linear4bit(
                    child.in_features, child.out_features, child.bias is not None, dtype, False, quant_type="nf4"
                )
                layer.weight = Params4bit(
                    child.weight.data, requires_grad=False, quant_type="nf4", compress_statistics=False
                )
                layer.bias = child.bias
                setattr(module, name, layer)
    model.is_loaded_in_4bit = True
    return model.requires_grad_(False)


def measure(case: Case, device: str) -> dict:
    """Return the bytes that weights and a step take on the device itself."""
    model, weights = observe.held_memory(lambda: build(case, device), device)
    model = trained(model, case).to(device)
    ids = torch.randint(0, case.shape["vocab_size"], (case.batch, case.length), device=device)
    step(model, ids, case)
    model.zero_grad(set_to_none=True)
    return {"weights": weights, "step": observe.peak_memory(lambda: step(model, ids, case), device)}


def not_run(case: Case, predicted: dict, device: str) -> str:
    """Return why a case cannot be measured here; empty if it can."""
    if case.bits and (problem := problems.find_native_problem(torch.device(device))):
        return problem
    try:
        devices.require_memory(1.05 * (predicted["weights"] + predicted["step"]) / devices.GIB, device, "this step")
    except devices.TierError as error:
        return str(error)
    return ""


def compare(case: Case, predicted: dict, device: str) -> list[dict]:
    """Measure a case; record and return its metrics, for its step and, with adapters, for its weights."""
    measured = {}
    reason = not_run(case, predicted, device)
    if not reason:
        try:
            measured = measure(case, device)
        except torch.cuda.OutOfMemoryError as error:
            reason = str(error).splitlines()[0]
    gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()
    rows = []
    for what in ("weights", "step") if case.adapters else ("step",):
        metrics = {"predicted_mib": predicted[what] / MIB}
        if measured:
            metrics["measured_mib"] = measured[what] / MIB
            metrics["ratio"] = predicted[what] / measured[what]
        else:
            metrics["not_run"] = reason
        about = "weights of " if what == "weights" else ""
        observe.record("F3a", "measured", metrics, case=f"predicted: {about}{case}", seed=0, device=device)
        rows.append(metrics | {"what": f"{about}{case}"})
    return rows


def show(rows: list[dict]) -> None:
    """Print the rows, one a line."""
    for row in rows:
        metrics = {key: round(value, 3) for key, value in row.items() if isinstance(value, float)}
        print(row["what"], row.get("not_run", ""), metrics, sep="; ", flush=True)


def main() -> None:
    """Predict all, then measure all."""
    options = recording.begin(
        __doc__, predict={"type": int, "metavar": "BLOCK", "help": "only predict cases, read as JSON"}
    )
    torch.set_num_threads(1)
    if options.predict:
        try:
            simulate.devices(1)
        except simulate.SimulationError as error:
            recording.end_not_run(str(error))
        print(json.dumps([simulated(Case(**case), options.predict) for case in json.load(sys.stdin)]))
        return
    asked = cases(options.device)
    for case, predicted in zip(asked, predictions(asked, options.device), strict=True):
        show(compare(case, predicted, options.device))


if __name__ == "__main__":
    main()
