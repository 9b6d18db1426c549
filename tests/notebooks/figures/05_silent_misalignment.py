"""Notebook 05: scores at prompt positions, a KL of 0, a reward that falls; a hook that LoRA passes by."""


def check(result):
    def figures(case):
        return result.figures(case=f"notebook 05: {case}")

    right, wrong = figures("trl-0.14"), figures("trl-0.14-tf-4.52")
    assert right["rows"] == [3, 4] and wrong["rows"] == [0, 1]
    assert right["rewards"][-1] > right["rewards"][0] + 0.15
    assert wrong["rewards"][-1] < right["rewards"][-1] - 0.2
    assert right["changes"][0] > 0.2 and wrong["changes"][0] < 0 < wrong["changes"][1] - 2
    tried = figures("tried")
    assert tried["gain"] < -0.02
    assert abs(tried["kl"]) < 1e-6 and tried["scored"].startswith("4 ahead")
    assert figures("rows that scorers use today") == {"right_name": 1, "old_name": 4, "off_by_one": 0}
    healed = figures("forward")
    assert abs(healed["first"] - right["rewards"][0]) < 0.02
    assert healed["lora"][-1] > healed["lora"][0] + 0.05
