"""Learning curves of one run whose log-probabilities are right, or are other tokens', with nothing else changed.

trl 0.14.0 asks for the last rows of logits by a name that transformers 4.48 knows and 4.52 swallows. The same run in
both stacks: as released, at a quarter of the learning rate, and with the argument passed on by the name that the model
knows. Prompts of equal length, for trl 0.14.0 passes no attention mask either (TRL #2708); a KL term, as its users had
it. Five seeds each.

Beside the reward: what the gradient has trained, as the mean log-probability of each right answer (with its end token)
in its place, and at the first positions of the prompt, where the wrong run scores it.

Eras: trl-0.14, trl-0.14-tf-4.52.
"""

import pathlib

import frames
import recording
import torch

from failurelab import logits
from failurelab_course.experiments import models, observe, trainers

STEPS, SEEDS, BETA, RATE = 200, 5, 0.04, 4e-4


def as_trl_0_14(model, input_ids, attention_mask, completion_length):
    """Score as trl 0.14.0's GRPOTrainer does: the same calls, no check that the lengths agree."""
    rows = model(input_ids, num_logits_to_keep=completion_length + 1).logits[:, :-1]
    pairs = zip(rows, input_ids[:, -completion_length:])
    return torch.stack([row.log_softmax(-1).gather(1, ids[:, None])[:, 0] for row, ids in pairs])


def probe(model) -> dict:
    """Return what the known-answer probe says of that function, on this model in this stack."""
    try:
        passed = logits.check_alignment(as_trl_0_14, model, padded=False)
    except logits.MisalignedLogProbs as error:
        return {"probe_error": error.error, "probe_found": error.found}
    return {"probe_error": passed.error, "probe_found": ""}


def answers(model, tokenizer, rows) -> dict:
    """Return mean log-probabilities of the right answers, and how the trainer's own scores of them compare."""
    model.eval()
    there, early, error, same = [], [], 0.0, True
    for prompt, answer in zip(rows["prompt"], rows["answer"]):
        completion = [*tokenizer.encode(answer), tokenizer.eos_token_id]
        ids = torch.tensor([[*tokenizer.encode(prompt), *completion]], device=model.device)
        length = len(completion)
        with torch.no_grad():
            got = as_trl_0_14(model, ids, None, length)
            # in one batch, as the trainer's: slices of it are then the same numbers bit by bit
            scores = model(ids).logits[:, :-1].log_softmax(-1)
        tokens = ids[:, -length:, None]
        truth, prompts = scores[:, -length:].gather(2, tokens), scores[:, :length].gather(2, tokens)
        there.append(truth.sum().item())
        early.append(prompts.sum().item())
        error = max(error, (got - truth[..., 0]).abs().max().item())
        same = same and torch.equal(got, prompts[..., 0])
    return {
        "answers_in_place": sum(there) / len(there),
        "answers_at_prompt": sum(early) / len(early),
        "largest_error": error,
        "equal_to_prompt_positions": same,
    }


def run(seed: int, device: str, repaired: bool, **changes: float) -> tuple[str, dict]:
    """Train once; return the record's state and its metrics."""
    policy, tokenizer = models.load(device=device)
    rows = models.equal_length_rows(models.rows(), 4)
    if repaired:
        logits.repair(policy)
    before = answers(policy, tokenizer, rows) | probe(policy)
    trainer = trainers.grpo(policy, tokenizer, steps=STEPS, seed=seed, beta=BETA, rows=rows, **changes)
    trainer.train()
    after = answers(policy, tokenizer, rows)
    steps, rewards = trainers.curve(trainer)
    log = [row for row in trainer.state.log_history if "reward" in row]
    metrics = {
        "steps": steps,
        "rewards": [round(reward, 4) for reward in rewards],
        "first_loss": log[0]["loss"],
        "first_kl": log[0]["kl"],
        "last_kl": sum(row["kl"] for row in log[-20:]) / 20,
        **before,
        "answers_in_place_after": after["answers_in_place"],
        "answers_at_prompt_after": after["answers_at_prompt"],
    }
    right = metrics["largest_error"] < 1e-3
    return "right_fix" if repaired else "healthy" if right else "broken", metrics


MISALIGNED = ("trl-0.14, as released", "trl-0.14-tf-4.52, as released", "trl-0.14-tf-4.52, argument passed on")


def table_misalignment(folder: pathlib.Path) -> str:
    """One run with right and with wrong log-probabilities: the scores, the first step, and the reward."""
    runs, lines = frames.read_runs(folder, "misalignment", "misalignment: (?P<name>.+)"), []
    for name, part in frames.group_runs(runs, MISALIGNED, "era", "name").items():
        equal = ", equal to scores at the prompt bit by bit" if all(part["equal_to_prompt_positions"]) else ""
        first = frames.median(part["first_kl"].abs() + part["first_loss"].abs(), ".0f")
        said = (
            f"scores off by {part['largest_error'].max():.2g} nats{equal}; first loss and KL {first}; reward "
            f"{frames.spread(part['first'])}, then {frames.spread(part['last'])}; it fell with "
            f"{frames.count(part['last'] < part['first'])} seeds"
        )
        lines.append((name, said))
    return "\n".join(f"- {names}: {said}" for names, said in frames.fold(lines))


def main() -> None:
    """Train with every seed and record each curve."""
    arguments = recording.begin(__doc__, seeds=SEEDS, only="")
    kinds = {"as released": {"repaired": False}}
    if observe.era() != "trl-0.14":  # there the name is the right one
        kinds["argument passed on"] = {"repaired": True}
        kinds["a quarter of the rate"] = {"repaired": False, "learning_rate": RATE / 4}
    for seed in range(arguments.seeds):
        for name, changes in kinds.items():
            if not name.startswith(arguments.only):
                continue
            state, metrics = run(seed, arguments.device, **changes)
            state = "wrong_fix" if "learning_rate" in changes else state
            observe.record("F3b", state, metrics, case=f"misalignment: {name}", seed=seed, device=arguments.device)
            ends = f"{metrics['rewards'][0]:.2f} -> {metrics['rewards'][-1]:.2f}"
            print(seed, name, state, ends, f"largest error {metrics['largest_error']:.2g} nats", flush=True)


if __name__ == "__main__":
    main()
