"""Notebook 07: rank 1 is refused whatever popular cure is tried; scales stay behind; today is silent."""

DIFFERENT = "on a different device than the one you're training on"


def check(result):
    refused = {}
    for name in ("early map", 'device_map="auto"', "ddp_find_unused_parameters=False", 'fsdp=""', "local_device_map()"):
        (made,) = [each for each in result.records if each["case"] == f"notebook 07: {name}"]
        assert (made["era"], made["tier"]) == ("trl-0.14", "simulated")
        refused[name] = made["figures"]["refused"]
    assert "`device_map='auto'` in any distributed mode" in refused.pop('device_map="auto"')
    assert refused.pop("local_device_map()") == ""
    assert all(DIFFERENT in text for text in refused.values()), refused
    today, one_process = [each["figures"] for each in result.records if each["case"] == "notebook 07: today"]
    assert today["moved_to"] == ["sim:1"] and DIFFERENT in today["with_map"]
    assert (one_process["silent_on"], one_process["behind"]) == ("cuda:1", 0)
    assert one_process["said"] == one_process["failed_in"] == "model.layers.14.input_layernorm"
    replica = result.figures(case="notebook 07: replica")
    assert replica["literal"].startswith("Input tensors need to be on the same GPU, but found the following tensor")
    assert (replica["code_left_on"], replica["quantization_elsewhere"]) == ("cuda:0", 2)
    full = result.figures(case="notebook 07: peak bytes, bf16, all trained")
    lora = result.figures(case="notebook 07: peak bytes, 4 bit, LoRA")
    assert full["Parameter"] == 2 * 7_615_616_512
    assert lora["Parameter"] < 0.45 * full["Parameter"]
    assert lora["Activation"] > 0.8 * full["Activation"]
