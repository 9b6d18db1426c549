"""Lab 16: worse since Tuesday.

"Since Tuesday the loop that trains on these scores gets worse, without an error. Run by hand, the file shows it: the
scores are not the log-probabilities that the model wrote with. On Tuesday we upgraded transformers, and somebody
wrapped the policy so that its logits come in float32. The names of all arguments are right, I have checked."

`log_probs(model, input_ids, attention_mask, completion_length)`: prompts are padded on the left, completions on the
right; both tensors are (batch, sequence), and the completion is the last `completion_length` columns. What is returned
is (batch, completion_length). Scores of padding do not matter. Logits stay in float32, and no more rows of them are
made than are needed. Repair it, and fill in ANSWER.
"""

import torch

ANSWER = {
    "verdict": "",  # where it goes wrong: "transformers", "wrapper" or "loop", the one in log_probs
    # of the run by hand, before any repair: rows of logits for each sequence
    "rows_asked": None,
    "rows_returned": None,
}


class InFloat32(torch.nn.Module):
    """The same model, with logits in float32."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask=None, **kwargs):
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


if __name__ == "__main__":
    import pathlib

    from transformers import AutoModelForCausalLM, AutoTokenizer

    tiny = pathlib.Path(__file__).resolve().parents[2] / "models" / "tiny-qwen2"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny), AutoTokenizer.from_pretrained(tiny)
    batch = tokenizer(["12+19=", "13+14="], return_tensors="pt")
    made = model.generate(**batch, max_new_tokens=2, do_sample=False, return_dict_in_generate=True, output_logits=True)
    print("the model wrote      ", tokenizer.batch_decode(made.sequences))
    print("with log-probability ", model.compute_transition_scores(made.sequences, made.logits, normalize_logits=True))
    with torch.no_grad():
        print("log_probs says       ", log_probs(model, made.sequences, torch.ones_like(made.sequences), 2))
