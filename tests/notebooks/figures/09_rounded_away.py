"""Notebook 09: in bfloat16 hardly a weight changes, and those that cannot move do not; in float32 all do."""


def check(result):
    rounded, fine = (result.figures(case=f"notebook 09: {name}") for name in ("bfloat16", "float32"))
    assert 0 < rounded["changed"] < 0.1 < 0.9 < fine["changed"]
    assert 0 < rounded["predicted"] < 0.1 and rounded["moved_against_it"] < 0.02
    formats = result.figures(case="notebook 09: formats")
    wide, narrow = "torch.float32", "torch.bfloat16"
    assert formats["then"] == formats["today, a name for GRPOTrainer"] == wide
    assert formats["today, from_pretrained"] == formats["the same, and bf16=True"] == narrow
    assert formats["LoRA"] == [f"lora_A {wide}", f"lora_B {wide}"]
    assert formats["QLoRA"] == [f"lora_A {narrow}", f"lora_B {narrow}"]
    assert set(formats["QLoRA, DoRA"]) == {*formats["QLoRA"], f"lora_magnitude_vector {wide}"}
    assert formats["grades"] == ["lost", "slowed", "lost"]  # at 1e-6, and at 3e-5 by two bounds
    assert formats["gain"] > 0.03
