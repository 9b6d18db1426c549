"""What a cell of a notebook uses. `notebook.setup()` is the first."""

from failurelab_course.notebook.display import COLUMNS, Mark, NotRun, not_run, setup, show, verdict_table

__all__ = ["COLUMNS", "Mark", "NotRun", "not_run", "setup", "show", "verdict_table"]
