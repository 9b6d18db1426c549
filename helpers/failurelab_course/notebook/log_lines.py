"""A trainer's log as lines of text in a notebook's kernel, so that a plain TRL script says the same on every run.

In a notebook transformers draws its log as a table that is redrawn at each step, with a clock in it, and in a script as
dictionaries that end in seconds. Neither can be stored and compared. In the kernels of a course's notebook the two
callbacks that a Trainer takes by itself are replaced by one that prints a line for each log; a script need not know.
"""

from typing import Any

SHOWN = ("loss", "grad_norm", "reward", "reward_std", "kl")


def install() -> None:
    """Let every Trainer that is made in this process from now on print its log as lines; twice is as good as once.

    The patch: `PrinterCallback` and `DEFAULT_PROGRESS_CALLBACK` of `transformers.trainer`. It lives and ends with
    the kernel.
    """
    import transformers
    from transformers import trainer

    class LogLines(transformers.PrinterCallback):
        """Prints the figures of `SHOWN` of each log, and no timings; nothing where logging is off."""

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            figures = [f"{name} {logs[name]:.3g}" for name in SHOWN if isinstance((logs or {}).get(name), float | int)]
            if figures and state.is_local_process_zero and args.logging_strategy != "no":
                print("  ".join([f"step {state.global_step:>3}", *figures]))

    trainer.PrinterCallback = trainer.DEFAULT_PROGRESS_CALLBACK = LogLines
