"""The metrics that a lab's checker measures, by name; labs and the registry write their predicates about these.

A metric is None when the run ended before it could be measured, and then nothing holds of it. Which of them are
measured depends on the lab's kind: `of(kind)`.
"""

_COMMON = {
    "error": "text: what was raised, as 'Type: first line', or empty",
    "error_stage": "text: where it was raised: import, build, train or measure; or empty",
    "answer": "text: the verdict in the script's ANSWER; empty where it gives none",
    "answer_claims": "number of figures and facts that the script's ANSWER gives to support its verdict",
    "answer_wrong": "number of these that differ from what is so: figures by more than a tenth",
}
_TRAINING = {
    "checkpointing": "boolean: every layer with a gradient was computed again in the backward pass, so none was kept",
    "steps_done": "number of optimizer steps",
    "learning_rate": "the largest learning rate of any step",
    "tensors_total": "number of parameter tensors of the model that is trained",
    "tensors_trainable": "number of these that require grad and that the optimizer holds",
    "tensors_frozen": "number of the others",
    "tensors_without_gradient": "trainable tensors whose gradient is None after the backward pass, in the worst step",
    "tensors_zero_gradient": "trainable tensors whose gradient is all zero after the backward pass, in the last step",
    "tensors_changed": "trainable tensors whose values differ after training",
    "embeddings_changed": "boolean: the input embeddings differ after training",
    "elements_changed": "share of the numbers in the trainable tensors that differ after training",
    "weights_bits": "bits that each number of the largest tensor is kept in",
    "frozen_changed": "frozen tensors whose values differ after training",
    "warnings": "how often torch's 'None of the inputs have requires_grad=True' came through the warning filters",
    "accuracy_before": "probability of a right answer before training: eval mode, temperature 1, mean of all sums",
    "accuracy_after": "the same after training, on a clean copy of the model with the trained weights",
    "accuracy_gain": "accuracy_after - accuracy_before",
    "finite": "boolean: every logged loss and every weight is a finite number",
}
_ROLLOUTS = {
    "rollouts": "number of completions that the trainer generated",
    "reward_first": "share of right completions among the trainer's own rollouts, first tenth of the steps",
    "reward_last": "share of right completions among the trainer's own rollouts, last quarter of the steps",
    "accuracy_there": "what accuracy_before is, on the prompts of the first rollouts",
    "overrun_first": "share of the first rollouts in which more follows the model's own end",
    "rollout_gap": "accuracy_there - reward_first: how much worse the rollouts are than the model",
}
_LOG = {
    "loss_first": "the first loss that the trainer logged",
    "loss_last": "mean of the losses that the trainer logged, last quarter of them",
}
_ZERO3 = {
    "evaluated_first": "number of evaluations that ended before the first optimizer step",
    "zero_stage": "stage of ZeRO that the engine runs at; -1 where there is no engine",
    "generations": "how often the trainer's model generated, whoever asked for it",
    "zero3_hooks": "ZeRO-3's hooks on the model's submodules when training began",
    "zero3_hooks_in_generation": "the most of these that were on while the model generated",
    "generates_without_hooks": "boolean: a step was trained, the model generated, and never with ZeRO-3's hooks on",
    "zero3_hooks_after": "those that were on when training had ended",
    "partitioned_in_generation": "the most tensors that a forward pass of generation found partitioned: gathered anew",
    **{name: _TRAINING[name] for name in ("steps_done", "tensors_total", "tensors_changed", "finite")},
}
PLACEMENT = {
    "placement_refused": "boolean: accelerate refused the model of at least one simulated rank",
    "ranks_refused": "number of simulated ranks whose model accelerate refused",
    "refusal": "text: the first line of the first refusal, or empty",
    "tensors_elsewhere": "tensors that are not on their rank's device, over all ranks",
    "quantization_elsewhere": "parts of quantization states among these",
    "devices_used": "number of different devices that one rank's model is on, the most of any rank",
    "models_loaded": "number of models that were loaded, over all ranks",
    "models_in_4bit": "number of these whose layers are in 4 bit",
}
NODE = {
    "processes": "number of processes that the script's command starts",
    "devices_seen": "GPUs that a process sees when its script has run, the most of any process",
    "data_parallel": "number of processes whose model the trainer wraps in nn.DataParallel",
    "copies": "models that are computed with, over all processes: nn.DataParallel makes one for each GPU",
    "layers_refused": "4-bit layers that refuse many rows, as in training, for their tensors' devices, over all copies",
    "layers_refused_single": "4-bit layers that refuse a single row, as in generation for one prompt, over all copies",
    "layer_refusal": "text: the first line of the first of these refusals, or empty",
}
_LOGITS = {
    "rows_made": "rows of logits that the model's head made for each sequence; 0 where it was not called",
    "rows_needed": "rows from the first that is used on: one for each completion token, and one more",
    "positions_off": "positions from a row's own next token on to the token that it is scored against; 0 is right",
}
_LOG_PROBS = {
    "log_prob_error": "largest difference from the truth, a float64 copy of the model with all logits, in nats",
    "gradient_error": "largest difference of a gradient from that of the truth, as a share of the largest entry",
    "scores_from": "text: what the scores equal instead of the truth, or empty",
}
_POLICIES = {
    "temperature_off": "share by which the temperature that tokens were scored at is another than they were drawn at",
    "policy_gap_first": "mean difference of the rollouts' log-probabilities from the policy's, first step, in nats",
    "policy_gap": "the same, in the mean of the last quarter of the steps",
    "foreign_tokens": "tokens that were trained on and that no generation in the process had drawn, over all steps",
}
_WEIGHTS = {
    "effective_share": "effective sample size of the weights of 64 long completions of a rounding engine, as a share",
    "effective_short": "the same for completions of 16 tokens",
    "weight_error": "largest difference of a weight from 1 where engine and policy agree",
    "weights_follow": "correlation of a token's weight with its ratio, for an engine at temperature 0.7",
}
_STEP = {
    "step_cosine_first": "cosine between the first step's gradient and that of GRPO's definition",
    "step_cosine": "the same, in the worse of two steps; 0 where its rewards leave no gradient",
    "step_size": "norm of a step's gradient over that of the definition's, in the worse of two steps",
    "step_found": "text: what is wrong with a step whatever its gradient is, such as a turn drawn behind other ids",
    "clipped": "share of the completions that were trained on without an end, by the trainer's own log",
    "beta": "weight of the KL term that the trainer was given",
    "other_texts": "boolean: the reward functions were given other texts than were drawn",
}
_RANKS = {
    "ranks_cosine": "cosine between both processes' gradient and that of GRPO's definition, in the worse of two steps",
    "ranks_size": "norm of that gradient over that of the definition's, in the worse of two steps",
    "ranks_found": "text: what is wrong with a step whatever its gradient is, such as the same prompts on every rank",
}
_BY_KIND = {
    "trainer": _COMMON | _TRAINING | _ROLLOUTS | _LOG,
    "loop": _COMMON | _TRAINING | _ROLLOUTS,
    "zero3": _COMMON | _ZERO3,
    "logits": _COMMON | _TRAINING | _ROLLOUTS | _LOG | _LOGITS,
    "log_probs": _COMMON | _LOGITS | _LOG_PROBS,
    "placement": _COMMON | PLACEMENT,
    "node": _COMMON | PLACEMENT | NODE,
    "policies": _COMMON | _TRAINING | _ROLLOUTS | _LOG | _POLICIES,
    "step": _COMMON | _TRAINING | _ROLLOUTS | _LOG | _STEP,
    "ranks": _COMMON | _TRAINING | _ROLLOUTS | _LOG | _RANKS,
    "weights": _COMMON | _WEIGHTS,
    "launch": _COMMON | _TRAINING | _ROLLOUTS | _LOG | _LOGITS | PLACEMENT,
}
KINDS = tuple(_BY_KIND)
# What the first steps decide, and no later one changes. A wrong fix that fails by these alone is proved in so few.
EARLY = {
    "error",
    "error_stage",
    "answer",
    "answer_claims",
    "checkpointing",
    "learning_rate",
    "weights_bits",
    "warnings",
}
EARLY |= {"tensors_total", "tensors_trainable", "tensors_frozen", "tensors_without_gradient", "tensors_changed"}
EARLY |= {"frozen_changed", "embeddings_changed", "reward_first", "accuracy_there", "overrun_first", "rollout_gap"}
EARLY |= {"loss_first", "rows_made", "rows_needed", "positions_off", "temperature_off", "policy_gap_first"}
EARLY |= {
    "foreign_tokens",
    "step_cosine_first",
    "step_cosine",
    "step_size",
    "step_found",
    "clipped",
    "beta",
    "other_texts",
}
EARLY |= set(_RANKS)
EARLY |= set(PLACEMENT)  # loaded, not trained
EARLY_STEPS = 8  # the later of the steps that the kind `step` compares
CAN_STOP = ("trainer", "loop", "logits", "policies", "step", "ranks", "launch")  # kinds whose training can end there
DEVICES = ("cpu", "cuda")
# Kinds that are measured on the CPU alone, and why.
CPU_ONLY = {
    "zero3": "its ZeRO-3 engine is set up for the CPU",
    "placement": "its devices are simulated, the same on every machine",
    "node": "its node and GPUs are simulated, the same on every machine",
    "ranks": "its two processes talk by gloo",
    "launch": "its ranks have simulated devices, and a process with these takes no others",
}


def agree(claimed: str | float, measured: str | float | None) -> bool:
    """Whether a claim is right: numbers to a tenth, counts of 0 exactly, texts but for case and blanks."""
    if isinstance(claimed, str) or isinstance(measured, str):
        return str(claimed).strip().casefold() == str(measured).strip().casefold()
    return measured is not None and abs(claimed - measured) <= 0.1 * max(abs(measured), abs(claimed))


def of(kind: str) -> dict[str, str]:
    """Return the metrics that are measured of a lab of this kind, and what each is."""
    return _BY_KIND[kind]
