"""Notebook 07: rank 1 is refused whatever popular cure is tried; PartialState() changes the map; scales stay behind."""

DIFFERENT = "on a different device than the one you're training on"
EDITS = ("as it was", 'device_map="auto"', "ddp_find_unused_parameters=False", 'fsdp=""')


def check(result):
    refused = {name: result.figures(case=f"notebook 07: {name}")["refused"] for name in EDITS}
    assert "`device_map='auto'` in any distributed mode" in refused.pop('device_map="auto"')
    assert all(DIFFERENT in text for text in refused.values()), refused
    assert result.figures(case="notebook 07: PartialState().device")["refused"] == ""
    processes = result.figures(case="notebook 07: two processes")
    assert processes["map_before"] == processes["calls_before"] == [0, 0]
    assert processes["map_after"] == processes["LOCAL_RANK"] == [0, 1]
    assert processes["calls"] == processes["own_device"] == ["cuda:0", "cuda:1"]
    today = result.figures(case="notebook 07: today")
    assert today["moved_to"] == ["sim:1"] and DIFFERENT in today["with_map"]
    assert today["said"] == today["failed_in"] == "model.layers.14.input_layernorm"
    replica = result.figures(case="notebook 07: replica")
    assert replica["literal"].startswith("Input tensors need to be on the same GPU, but found the following tensor")
    assert (replica["code_left_on"], replica["silent_on"]) == ("cuda:0", "cuda:1")
    assert replica["noticed"] == [False, True, False]  # a single row alone is refused
    assert replica["moved_today"] == "cuda:1"
    full, lora, saving = (
        result.figures(case=f"notebook 07: peak bytes, {name}")
        for name in ("bfloat16, all trained", "4 bit, LoRA", "4 bit, LoRA, checkpointing")
    )
    assert full["Parameter"] == 2 * 7_615_616_512 and full["Optstate"] == 2 * full["Gradient"] == 2 * full["Parameter"]
    assert lora["Parameter"] < 0.45 * full["Parameter"] and lora["Optstate"] < 0.05 * full["Optstate"]
    assert sum(lora.values()) < 0.6 * sum(full.values())
    assert lora["Activation"] > full["Activation"] > 2 * saving["Activation"]
