"""Notebook 04: memory follows the prompt; one renamed object breaks the KL; the class changed makes it flat."""


def check(result):
    def figures(case):
        return result.figures(case=f"notebook 04: {case}")

    broken = figures("as released")
    assert broken["rows_made"] == 250
    assert broken["peaks"] == sorted(broken["peaks"]) and broken["peaks"][-1] > 3 * broken["peaks"][0]
    assert figures("as released, LoRA")["peaks"][-1] > 3 * figures("as released, LoRA")["peaks"][0]
    for name in ("the class changed", "the class changed, LoRA"):
        short, long = figures(name)["peaks"]
        assert long < 1.2 * short and long < broken["peaks"][-1] / 3, name
    short, long = figures("in trl-0.22")["peaks"]
    assert long < 1.2 * short
    short, long = figures("in today")["peaks"]  # the fused head of trl 1.15 and later, where Triton does not run
    assert long > 3 * short
    cost = figures("what a token costs today")  # MiB
    assert cost["logits_to_keep"] < 0.1 < 0.8 < cost["fused_lm_head"]
    assert abs(cost["num_logits_to_keep"] / (2 * 151_936 * 4 / 2**20) - 1) < 0.05  # a row, and its slice's gradient
    kl = figures("the reference")
    assert abs(kl["one_model"]) < 1e-9 < kl["changed_class"], kl
