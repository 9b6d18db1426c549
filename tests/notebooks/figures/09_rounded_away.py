"""Notebook 09: in bfloat16 hardly a weight changes and nothing is learned; in float32 the same script learns."""


def check(result):
    rounded, fine = (result.figures(case=f"notebook 09: {name}") for name in ("bfloat16", "float32"))
    assert 0 < rounded["changed"] < 0.1 and 0 < rounded["predicted"] < 0.1
    assert abs(rounded["after"] - rounded["before"]) < 0.03
    assert fine["after"] > rounded["before"] + 0.03 and fine["after"] > rounded["after"] + 0.03
    assert 0.5 < rounded["grad_norm"] / fine["grad_norm"] < 2
    dtypes = result.figures(case="notebook 09: dtypes")
    assert (dtypes["then"], dtypes["now"], dtypes["name"]) == ("torch.float32", "torch.bfloat16", "torch.float32")
    assert 0 < dtypes["float16"] < 0.5 * dtypes["bfloat16"]
