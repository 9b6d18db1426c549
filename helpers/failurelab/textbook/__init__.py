"""One optimizer step beside the textbook: the gradient that a definition gives, GRPO's for one, and the trainer's.

    with textbook.compare(trainer) as comparison:
        trainer.train()
    print(comparison.report)

A judge that looks for one known mistake passes by all others. This one needs no list: it takes the tokens that were
drawn and the rewards that were returned, computes the policy gradient of the definition in plain torch, and compares it
with the gradient that the trainer computed, before it is clipped: cosine and size. Log-probabilities with the wrong
sign are cosine -1, advantages divided by 10,000 are size 0.0001, a mask shifted by one is a cosine well below 1.
"""

from failurelab.textbook.algorithms import no_textbook
from failurelab.textbook.apart import Apart, Floor
from failurelab.textbook.comparison import Comparison, compare_step, why_not_here
from failurelab.textbook.definition import GRPO, Definition
from failurelab.textbook.definition_online_dpo import ONLINE_DPO
from failurelab.textbook.definition_rloo import RLOO
from failurelab.textbook.fields import NOT_HERE, Options, unlisted
from failurelab.textbook.gradient import OutOfMemory, expected_gradient
from failurelab.textbook.ledger import Ledger, ledger
from failurelab.textbook.queued import recorder_of
from failurelab.textbook.recorder import Evidence, Recorder
from failurelab.textbook.rows import Row, Scoring
from failurelab.textbook.scores import without_adapters
from failurelab.textbook.watch import Watch, compare
from failurelab.textbook.weights import Weight

__all__ = [
    "GRPO",
    "NOT_HERE",
    "ONLINE_DPO",
    "RLOO",
    "Apart",
    "Comparison",
    "Definition",
    "Evidence",
    "Floor",
    "Ledger",
    "Options",
    "OutOfMemory",
    "Recorder",
    "Row",
    "Scoring",
    "Watch",
    "Weight",
    "compare",
    "compare_step",
    "expected_gradient",
    "ledger",
    "no_textbook",
    "recorder_of",
    "unlisted",
    "why_not_here",
    "without_adapters",
]
