"""Real failures of GRPO and Online DPO training, reproduced, measured and repaired.

What to take home, each in a module of its own and usable in any training script:
`gradients`, `rollouts`, `guards`, and the measurements of `observe`. They need torch and transformers only, and work
unchanged from transformers 4.48 to 5.x. The rest of the package runs the course.
"""

__version__ = "0.1.0"


def load_ipython_extension(shell) -> None:
    """Make `%%era` and `%lab` known to a notebook: `%load_ext failurelab`."""
    from . import magics

    magics.load_ipython_extension(shell)
    try:
        from . import lab_cli as lab
    except ModuleNotFoundError:  # an era's kernel: its stack has no command line
        from . import lab_remote as lab
    lab.load_ipython_extension(shell)
