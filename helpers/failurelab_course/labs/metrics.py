"""Which figures a lab's checker measures, by the lab's kind: `of(kind)`. What each is stands in the table of figures.

A figure is None when the run ended before it could be measured, and then nothing is known of it.
"""

_COMMON = ("error", "error_stage", "answer", "answer_claims", "answer_wrong")
_TRAINING = (
    "checkpointing", "steps_done", "learning_rate", "momentum", "rows_foreign", "rows_at_once", "tensors_total",
    "tensors_trainable", "tensors_frozen", "tensors_without_gradient", "tensors_zero_gradient", "tensors_changed",
    "embeddings_changed", "elements_changed", "weights_bits", "frozen_changed", "warnings", "accuracy_before",
    "accuracy_after", "accuracy_gain", "finite",
)  # fmt: skip
_ROLLOUTS = ("rollouts", "reward_first", "reward_last", "accuracy_there", "overrun_first", "rollout_gap")
_LOG = ("loss_first", "loss_last", "clipped")
_ZERO3 = (
    "evaluated_first", "zero_stage", "generations", "zero3_hooks", "zero3_hooks_in_generation",
    "generates_without_hooks", "zero3_hooks_after", "partitioned_in_generation", "steps_done", "tensors_total",
    "tensors_changed", "finite",
)  # fmt: skip
PLACEMENT = (
    "placement_refused", "ranks_refused", "refusal", "tensors_elsewhere", "quantization_elsewhere", "devices_used",
    "models_loaded", "models_in_4bit",
)  # fmt: skip
NODE = (
    "processes", "devices_seen", "data_parallel", "copies", "layers_refused", "layers_refused_single",
    "layer_refusal",
)  # fmt: skip
_LOGITS = ("rows_made", "rows_needed", "positions_off")
_LOG_PROBS = ("log_prob_error", "gradient_error", "scores_from")
_POLICIES = ("temperature_off", "other_sampling", "drawn_by_policy", "policy_gap_first", "policy_gap", "foreign_tokens")
_WEIGHTS = ("effective_share", "effective_short", "weight_error", "weights_follow")
_STEP = (
    "step_cosine_first", "step_cosine", "step_size", "step_found", "beta", "other_texts", "other_options",
    "tokens_dropped",
)  # fmt: skip
_RANKS = ("ranks_cosine", "ranks_size", "ranks_found", "other_options")
_BY_KIND = {
    "trainer": _COMMON + _TRAINING + _ROLLOUTS + _LOG,
    "loop": _COMMON + _TRAINING + _ROLLOUTS,
    "zero3": _COMMON + _ZERO3,
    "logits": _COMMON + _TRAINING + _ROLLOUTS + _LOG + _LOGITS,
    "log_probs": _COMMON + _LOGITS + _LOG_PROBS,
    "placement": _COMMON + PLACEMENT,
    "node": _COMMON + PLACEMENT + NODE,
    "policies": _COMMON + _TRAINING + _ROLLOUTS + _LOG + _POLICIES,
    "step": _COMMON + _TRAINING + _ROLLOUTS + _LOG + _STEP,
    "ranks": _COMMON + _TRAINING + _ROLLOUTS + _LOG + _RANKS,
    "weights": _COMMON + _WEIGHTS,
    "launch": _COMMON + _TRAINING + _ROLLOUTS + _LOG + _LOGITS + PLACEMENT,
}
KINDS = tuple(_BY_KIND)
# What the first steps decide, and no later one changes. A wrong fix that fails by these alone is proved in so few.
EARLY = {
    "error", "error_stage", "answer", "answer_claims", "checkpointing", "learning_rate", "weights_bits", "warnings",
    "tensors_total", "tensors_trainable", "tensors_frozen", "tensors_without_gradient", "tensors_changed",
    "frozen_changed", "embeddings_changed", "reward_first", "accuracy_there", "overrun_first", "rollout_gap",
    "loss_first", "rows_made", "rows_needed", "positions_off", "temperature_off", "policy_gap_first",
    "foreign_tokens", "other_sampling", "step_cosine_first", "step_cosine", "step_size", "step_found", "clipped",
    "beta", "other_texts", "tokens_dropped",
    *_RANKS,
    *PLACEMENT,  # loaded, not trained
}  # fmt: skip
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


def of(kind: str) -> list[str]:
    """Return the figures that are measured of a lab of this kind."""
    return list(dict.fromkeys(_BY_KIND[kind]))
