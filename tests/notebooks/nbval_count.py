"""A pytest plugin for the process that runs nbval: it writes down what became of each cell, and what was compared."""

import json
import os
import pathlib

_cells = []


def pytest_runtest_logreport(report):
    if report.when == "call" or report.failed or report.skipped:
        _cells.append(
            {"cell": report.nodeid.rpartition("::")[2], "outcome": report.outcome, **dict(report.user_properties)}
        )


def pytest_runtest_setup(item):
    # nbval compares a cell that is marked and was run when it was stored; without a stored output it compares nothing.
    compared = bool(item.options["check"]) and item.cell.execution_count is not None and bool(item.cell.outputs)
    item.user_properties.append(("compared", compared))


def pytest_sessionfinish():
    pathlib.Path(os.environ["NBVAL_COUNT"]).write_text(json.dumps(_cells))
