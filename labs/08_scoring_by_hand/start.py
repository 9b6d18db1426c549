"""Lab 08: a scoring function written by hand.

A scoring function for a training loop of one's own, with today's transformers: the log-probability of each completion
token, given everything before it.

"The shape is right, the numbers are between -20 and 0, and gradients flow. But a loop that trains on this function gets
worse, whatever learning rate I take; and it needs more memory than I had worked out."

`log_probs(model, input_ids, attention_mask, completion_length)`: prompts are padded on the left, completions on the
right; both tensors are (batch, sequence), and the completion is the last `completion_length` columns. What is returned
is (batch, completion_length). Scores of padding do not matter. Make it right, and let the model return no more rows of
logits than are needed.
"""


def log_probs(model, input_ids, attention_mask, completion_length):
    output = model(input_ids=input_ids, attention_mask=attention_mask, num_logits_to_keep=completion_length)
    rows = output.logits[:, -completion_length:].log_softmax(dim=-1)
    tokens = input_ids[:, -completion_length:]
    return rows.gather(-1, tokens[..., None])[..., 0]


if __name__ == "__main__":
    import pathlib

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tiny = pathlib.Path(__file__).resolve().parents[2] / "models" / "tiny-qwen2"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny), AutoTokenizer.from_pretrained(tiny)
    batch = tokenizer(["12+19=", "13+14="], return_tensors="pt")
    made = model.generate(**batch, max_new_tokens=2, do_sample=False, return_dict_in_generate=True, output_logits=True)
    print("the model wrote      ", tokenizer.batch_decode(made.sequences))
    print("with log-probability ", model.compute_transition_scores(made.sequences, made.logits, normalize_logits=True))
    with torch.no_grad():
        print("log_probs says       ", log_probs(model, made.sequences, torch.ones_like(made.sequences), 2))
