"""Failures of GRPO and Online DPO training: measured and repaired in any training script.

Each module is usable alone, needs torch and transformers (`rewards`: hypothesis too), and works unchanged from
transformers 4.48 to 5.x:

    gradients   which parameters learn; inputs that require grad (adapters: PEFT in the order that works)
    rollouts    does generation draw from the policy; generation that does
    logits      log-probabilities of a completion without all logits; are they the completion's?
    textbook    one optimizer step beside GRPO's definition: direction and size of its gradient
    mismatch    is the engine that generates the policy that is trained
    placement   on which device each tensor lies, and where it should
    measure     what guards, labs and preflight measure alike: of scores, and the known-answer probe
    updates     which share of the weights a step can change, or rounds to nothing
    zero3       the engine, and generation under ZeRO-3
    rewards     what reward functions pay for right, wrong and odd completions, as a table
    guards      callbacks that watch a trainer for all of these
    simulate    devices that are not there: placement and memory of models of any size
    failures    what is known of each failure: symptoms, causes, affected versions
    handles     a method replaced, and put back

`import failurelab` imports none of them.
"""

__version__ = "1.0.0"
__all__ = [
    "adapters",
    "failures",
    "gradients",
    "guards",
    "handles",
    "logits",
    "measure",
    "mismatch",
    "placement",
    "rewards",
    "rollouts",
    "simulate",
    "textbook",
    "updates",
    "zero3",
]
