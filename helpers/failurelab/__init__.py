"""Failures of GRPO and Online DPO training: measured and repaired in any training script.

Each module is usable alone, needs torch and transformers, and works unchanged from transformers 4.48 to 5.x. What is
meant for your own script stands behind the module's name:

    adapters    a model made ready for adapters, in the order that works: prepare_peft, is_quantized
    gradients   which parameters learn: watch, snapshot, not_optimized, checkpointed;
                inputs that require grad: require_input_grads, enable_checkpointing
    rollouts    does generation draw from the policy: check, compare; generation that does: safe_generation, repair
    logits      log-probabilities of a completion: completion_logps; are yours its tokens': check_alignment; without all
                logits: keep_argument, repair
    textbook    one optimizer step beside GRPO's definition: compare, compare_step, expected_gradient, GRPO, Definition,
                Options
    mismatch    is the engine that generates the policy that is trained: compare, read_log, importance_weights,
                effective_sample_size
    placement   on which device each tensor lies, and where it should: check, local_device_map
    updates     which share of the weights a step can change, or rounds to nothing: expected_share, shares, grade,
                to_float32
    zero3       the engine, and generation under ZeRO-3: engine_of, generation_model, repair, release_evaluation_engine
    guards      callbacks that watch a trainer for all of these: GradientGuard, RolloutGuard, LogitsGuard,
                PlacementGuard, UpdateGuard, RewardGuard, EngineMismatchGuard, Zero3Guard, StepGuard
    known_gradients  one batch with known gradients, for any implementation of the loss: check, read_cases, LossCase
    simulate    devices that are not there, models of any size: devices, model, place, ranks, four_bit, tokens
    failures    what is known of each failure: all, get, affected, upgrades
    measure     what guards, labs and preflight measure alike: scores, alignment, counts, differences
    plants      mechanisms of failures planted, and measured, as controls
    handles     a method replaced, and put back: Handle, wrap_method, eval_mode
    errors      what all errors are that a user is told in one line: FailureLabError

`import failurelab` imports none of them. The commands are `failurelab preflight`, `diagnose`, `gradients`,
`symptoms` and `doctor`.
"""

__version__ = "1.0.0"
__all__ = [
    "adapters",
    "errors",
    "failures",
    "gradients",
    "guards",
    "handles",
    "known_gradients",
    "logits",
    "measure",
    "mismatch",
    "placement",
    "plants",
    "rollouts",
    "simulate",
    "textbook",
    "updates",
    "zero3",
]
