"""A training script judged before the GPU hours are spent: `failurelab preflight train.py`."""
