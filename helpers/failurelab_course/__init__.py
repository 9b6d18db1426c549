"""What runs the course: library stacks, experiments, notebooks and labs."""

from failurelab import __version__ as __version__  # one version for both


def load_ipython_extension(shell) -> None:
    """Make `%%era` and `%lab` known to a notebook: `%load_ext failurelab_course`."""
    from failurelab_course.labs import magic
    from failurelab_course.notebook import magics

    magics.load_ipython_extension(shell)
    magic.load_ipython_extension(shell)
