"""The kind `weights`: a script's own `importance_weights(policy_logps, engine_logps, mask)`.

It is given log-probabilities as they are measured: of the small model in float32 and of a copy in bfloat16 that drew
the tokens, of short and long completions; of two that agree; and of two that differ by another amount in each row, in
its later tokens alone, of few and of many tokens: a small difference counts too, each row's is its own, and none counts
for more because a completion is longer.
"""

import copy
import types

import torch

from failurelab import mismatch
from failurelab_course.labs.checker.base import CheckRun, Refused

SHORT, LONG, COUNT = 16, 448, 64
GAPS, LENGTHS = (0.05, 0.3), (8, 64)  # nats a token, on average; tokens
SHARES = (1.0, -1.0, 0.5, 0.0)  # of a gap, that the rows of a batch have


def measure(script: types.ModuleType, run: CheckRun) -> None:
    """Ask the script's function, and fill in `run.metrics`.

    Raises:
        Refused: there is no such function, or its weights are not one for each sequence or each token.
    """
    weigh = run.function(script, "importance_weights(policy_logps, engine_logps, mask)")
    run.stage = "measure"

    def weights(policy: torch.Tensor, engine: torch.Tensor) -> torch.Tensor:
        got = weigh(policy.clone(), engine.clone(), torch.ones_like(policy))
        shapes = [(len(policy), 1), tuple(policy.shape)]
        if not isinstance(got, torch.Tensor) or tuple(got.shape) not in shapes:
            shape = tuple(got.shape) if isinstance(got, torch.Tensor) else type(got).__name__
            raise Refused(f"importance_weights returned {shape}, and not one for a sequence or token: {shapes}")
        return got.detach().expand_as(policy)

    def effective(pair: tuple[torch.Tensor, torch.Tensor]) -> float:
        return min(mismatch.effective_sample_size(column) for column in weights(*pair).T)

    long = _drawn(run, LONG)
    slopes = []
    for gap in GAPS:
        for length in LENGTHS:
            policy = long[0].new_zeros(len(SHARES), length)
            policy[:, length // 2 :] = 2 * gap * policy.new_tensor(SHARES)[:, None]
            said = weights(policy, torch.zeros_like(policy)).log().mean(1)  # (rows,)
            slopes += [
                float(each) / (gap * share) if share else 1 - abs(float(each)) / gap
                for each, share in zip(said, SHARES)
            ]
    run.metrics |= {
        "effective_share": effective(long),
        "effective_short": effective(_drawn(run, SHORT)),
        "weight_error": float((weights(long[0], long[0]) - 1).abs().max()),
        "weights_follow": min(min(slope, 1 / slope) if slope > 0 else 0.0 for slope in slopes),
    }


@torch.no_grad()
def _drawn(run: CheckRun, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both log-probabilities, (sequences, tokens), of what a bfloat16 copy draws."""
    engine = copy.deepcopy(run.clean).to(torch.bfloat16)
    torch.manual_seed(0)
    ids = torch.randint(3, run.clean.config.vocab_size, (COUNT, 8), device=run.clean.device)
    out = engine.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=length, do_sample=True, top_k=0,
        eos_token_id=None, pad_token_id=0, output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    new = out.sequences[:, 8:, None]
    theirs = torch.stack(out.logits, 1).float().log_softmax(-1).gather(-1, new)[..., 0]
    return run.clean(out.sequences).logits[:, 7:-1].log_softmax(-1).gather(-1, new)[..., 0], theirs
