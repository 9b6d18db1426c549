"""Lab 12: the reference model.

The policy is where it should be, on each rank's own device; lab 11 has seen to that. GRPO here wants a reference model,
to keep the policy near it, and both must fit. Every rank stops all the same, and the message has changed.

Make both models load where their rank trains. Both stay in 4 bit, and both are loaded.
"""

import torch
from accelerate import PartialState
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

FOUR_BIT = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)


def load(model_path, device_map, **options):
    return AutoModelForCausalLM.from_pretrained(model_path, device_map=device_map, **options)


def load_models(model_path, rank):
    own = {"": PartialState().local_process_index}
    policy = load(model_path, own, quantization_config=FOUR_BIT)
    # TODO: a reference model is never trained, so why is its placement refused? Put it where it belongs.
    reference = load(model_path, "auto", quantization_config=FOUR_BIT)
    return policy, reference


if __name__ == "__main__":  # few machines have two GPUs, so this one asks the lab's simulated node
    from failurelab_course.labs.checker import by_hand

    by_hand.show(__file__, "placement", "load_models")
