"""What runs the course: library stacks, experiments, notebooks and labs."""

__version__ = "0.1.0"


def load_ipython_extension(shell) -> None:
    """Make `%%era` and `%lab` known to a notebook: `%load_ext failurelab_course`."""
    from failurelab_course.labs import magic
    from failurelab_course.notebook import magics

    magics.load_ipython_extension(shell)
    magic.load_ipython_extension(shell)
