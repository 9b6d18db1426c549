"""What runs the course: library stacks, experiments, notebooks, labs, the ledger of what was measured."""

__version__ = "0.1.0"


def load_ipython_extension(shell) -> None:
    """Make `%%era` and `%lab` known to a notebook: `%load_ext failurelab_course`."""
    from failurelab_course.notebook import magics

    magics.load_ipython_extension(shell)
    try:
        from failurelab_course.labs import cli as lab
    except ModuleNotFoundError:  # an era's kernel: its stack has no command line
        from failurelab_course.labs import remote as lab
    lab.load_ipython_extension(shell)
