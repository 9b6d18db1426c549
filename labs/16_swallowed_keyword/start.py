"""Lab 16: a keyword that nobody heard.

Somebody wrapped the policy, so that its logits come in float32 whatever it computes in: three lines, harmless, tested.
Since then the loop that trains on these scores gets worse, without an error. The names of all arguments are right.

`log_probs(model, input_ids, attention_mask, completion_length)`: prompts are padded on the left, completions on the
right; both tensors are (batch, sequence), and the completion is the last `completion_length` columns. What is returned
is (batch, completion_length). Scores of padding do not matter. The wrapper stays, and does what it was written for.
"""

import torch


class InFloat32(torch.nn.Module):
    """The same model, with logits in float32."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask=None, **kwargs):
        # TODO: the scores are other tokens', and too many rows are made. Who was asked for fewer, and who heard it?
        output = self.model(input_ids=input_ids, attention_mask=attention_mask)
        output.logits = output.logits.float()
        return output


def log_probs(model, input_ids, attention_mask, completion_length):
    policy = InFloat32(model)
    output = policy(input_ids, attention_mask=attention_mask, logits_to_keep=completion_length + 1)
    logits = output.logits[:, :-1]  # the last row predicts what comes after the end
    scores = []
    for rows, tokens in zip(logits, input_ids[:, -completion_length:]):
        scores.append(rows.log_softmax(dim=-1).gather(1, tokens[:, None])[:, 0])
    return torch.stack(scores)
