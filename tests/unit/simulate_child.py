"""What the tests of simulated devices ask, in a process of its own: registering them holds for the whole process.

Prints one JSON object.
"""

import json
import threading

import torch
from transformers import Qwen2Config

from failurelab import placement, simulate
from failurelab_course.experiments import observe

SHAPE = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MOVED = [
    [],
    ["model.embed_tokens"],
    ["model.layers.2.mlp.up_proj"],
    ["model.layers.3"],
    ["model.layers.1", "model.layers.0.self_attn.k_proj"],
    ["lm_head"],
]


def shape(**more):
    return simulate.model(Qwen2Config(**SHAPE | {"tie_word_embeddings": False} | more))


def said(function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def fails_in(model):
    """Run the model; return the innermost module that was running when it failed."""
    inside = []
    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda *_, name=name: inside.append(name))
        module.register_forward_hook(lambda *_: inside.pop() and None)
    with simulate.fake():
        error = said(model, simulate.tokens(2, 8), use_cache=False)
    return (inside[-1] if inside else ""), error.splitlines()[0] if error else ""


def four_bit_step():
    """Run a step of a 4-bit model with adapters; older releases of bitsandbytes cannot on simulated devices."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(simulate.four_bit(shape()), LoraConfig(r=4, target_modules="all-linear"))
    simulate.place(model, {"": 0})
    model.train()
    with simulate.fake():
        model(simulate.tokens(2, 32), use_cache=False).logits.float().logsumexp(-1).mean().backward()
    grads = [parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad]
    report = placement.check(model, "sim:0")
    return {"grads": [sum(grads), len(grads)], "local": not report.elsewhere}


def backward_thread():
    """Say on which thread a backward pass on a simulated device runs Python: the main one, or another."""
    ran = []
    weight = torch.nn.Parameter(torch.empty(4, 4, device="sim:1"))
    weight.register_hook(lambda _: ran.append(threading.current_thread() is threading.main_thread()))
    (weight @ weight).sum().backward()
    return ran


def main():
    observe.quiet()
    torch.get_device_module()  # asked before, its answer is kept: the CPU
    found = {"few": said(simulate.ranks(2, 0).__enter__), "none": said(simulate.devices, 0)}
    found["devices"] = [str(each) for each in simulate.devices(2)]
    found["again"] = said(simulate.devices, 2), said(simulate.devices, 3)
    with simulate.fake():
        found["main thread"] = backward_thread()
    found["module"] = torch.get_device_module().device_count()
    found["absent"] = said(simulate.place, shape(), {"": 2})
    found["order"] = []
    for moved in MOVED:
        model = simulate.place(shape(), {"": 0, **dict.fromkeys(moved, 1)})
        report = placement.check(model, "sim:0")
        found["order"].append([moved, report.first_to_fail, *fails_in(model)])
    try:
        found["four_bit"] = four_bit_step()
    except (ImportError, RuntimeError, AttributeError, NotImplementedError) as error:
        found["four_bit"] = f"{type(error).__name__}: {error}"
    print(json.dumps(found))


if __name__ == "__main__":
    main()
