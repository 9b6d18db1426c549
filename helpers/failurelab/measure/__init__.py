"""What guards, labs and preflight measure alike, once.

    scores      at which temperature tokens were scored, and against which token each row of logits
    alignment   the known-answer probe: whether log-probabilities are those of the completion's tokens
    counts      rewards by group, prompts and ends
    differences what an adapter did and what is left of it

Which gradients are there is measured by `failurelab.gradients`, the share of the weights that an update changes by
`failurelab.updates`; a whole gradient beside its definition by `failurelab.textbook`.
"""
