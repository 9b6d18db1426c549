"""Notebook 05: scores at prompt positions, first loss and KL of 0, a reward that falls, a KL that runs away."""


def check(result):
    runs = {each["era"]: each["figures"] for each in result.records if each["case"] == "notebook 05: as released"}
    right, wrong = runs["trl-0.14"], runs["trl-0.14-tf-4.52"]
    assert abs(wrong["first_loss"]) < 1e-6 and abs(wrong["first_kl"]) < 1e-6
    assert right["error"] < 1e-5 and not right["at_prompt"]
    assert wrong["error"] > 1 and wrong["at_prompt"]
    assert right["last"] > right["first"] + 0.2 and right["in_place"] > 0.5
    assert wrong["last"] < wrong["first"] and wrong["in_place"] < -0.2
    assert wrong["kl_last"] > 2 * right["kl_last"] > 0
    for name in ("a quarter of the learning rate", "beta = 0.5"):
        assert result.figures(case=f"notebook 05: {name}")["last"] < right["first"]
    flipped = result.figures(case="notebook 05: flipped sign")
    assert flipped["last"] < flipped["first"] < right["first"] and flipped["last"] < 0.5 * right["first"]
    repaired = result.figures(case="notebook 05: argument passed on")
    assert repaired["last"] > right["first"] + 0.2 and repaired["in_place"] > 0.5
