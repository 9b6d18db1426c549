"""Lab 08, solved: a scoring function written by hand.

A scoring function for a training loop of one's own, with today's transformers: the log-probability of each completion
token, given everything before it. It returns numbers of the right shape, between -20 and 0, and gradients flow. A loop
that trains on them gets worse.

`log_probs(model, input_ids, attention_mask, completion_length)`: prompts are padded on the left, completions on the
right; both tensors are (batch, sequence), and the completion is the last `completion_length` columns. What is returned
is (batch, completion_length). Scores of padding do not matter. Make it right, and let the model return no more rows of
logits than are needed.
"""


def log_probs(model, input_ids, attention_mask, completion_length):
    # TODO: these are not the log-probabilities of the completion's tokens, and too many rows are made.
    output = model(input_ids=input_ids, attention_mask=attention_mask, logits_to_keep=completion_length + 1)
    rows = output.logits[:, -completion_length - 1 : -1].log_softmax(dim=-1)
    # ^^^ Two slips. The row of a position predicts the token after it, so the completion is predicted from one row
    #     before it to one row before its end. And today's Qwen2 knows logits_to_keep; num_logits_to_keep is swallowed.
    #     The slice stays, even so: it is right however many rows come. To know and not to hope:
    #     failurelab.logits.check_alignment(log_probs, model).
    tokens = input_ids[:, -completion_length:]
    return rows.gather(-1, tokens[..., None])[..., 0]
