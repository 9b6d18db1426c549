"""A training script judged before the GPU hours are spent: `failurelab preflight`, `python -m failurelab_preflight`."""
