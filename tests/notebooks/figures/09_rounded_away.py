"""Notebook 09: in bfloat16 hardly a weight changes, and those that cannot move do not; in float32 all do."""


def check(result):
    rounded, fine = (result.figures(case=f"notebook 09: {name}") for name in ("bfloat16", "float32"))
    assert 0 < rounded["changed"] < 0.1 < 0.9 < fine["changed"]
    assert 0 < rounded["predicted"] < 0.1 and rounded["moved_against_it"] < 0.02
    formats = result.figures(case="notebook 09: formats")
    assert formats["then"] == "torch.float32" and formats["LoRA"] == ["torch.float32"]
    assert formats["QLoRA"] == ["torch.bfloat16"]
    assert formats["today, from_pretrained"] == formats["the same, and bf16=True"] == "torch.bfloat16"
    assert formats["today, a name for GRPOTrainer"] == "torch.float32" and formats["gain"] > 0.03
