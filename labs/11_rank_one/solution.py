"""Lab 11, solved: rank one.

A 4-bit Qwen2 is trained by two processes, one for each device. Rank 0 starts. Rank 1 stops with a ValueError: the model
is on a different device than the one it is trained on. The advice in the message is the line that is already there.

Make every rank load its model where it trains. The model stays in 4 bit.
"""

import torch
from accelerate import PartialState
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

FOUR_BIT = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)


def load_model(model_path, rank):
    # TODO: rank 1 is refused. Where should each process's model be, and when can it know?
    device_map = {"": PartialState().local_process_index}
    # ^^^ In a fresh process the current device is number 0, whatever its rank. accelerate's state knows the rank, and
    #     selects its device; so ask that, and ask when the model is loaded. In every version:
    #     failurelab.placement.local_device_map().
    return AutoModelForCausalLM.from_pretrained(model_path, quantization_config=FOUR_BIT, device_map=device_map)
