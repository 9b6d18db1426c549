"""The timetables of docs/teaching.md, from the minutes that each notebook's first cell and each `lab.toml` name."""

import re

from tools.site_pages import OPENING

from failurelab_course.labs import definition
from failurelab_course.notebook_runs import notebooks

# What follows what, from 09:00 on: notebooks and labs by their numbers, anything else with its minutes before it.
DAYS = {
    "One hour": "5 welcome; notebook 00; notebook 01; lab 01; 20 your own run: `failurelab preflight train.py`",
    "Half a day": "5 welcome; notebook 00; notebook 01; labs 01, 17; 15 *break*; notebook 02; lab 02; 10 *break*; "
    "notebook 03; lab 04; notebook 05; lab 07; 10 discussion: which would your dashboards have shown",
    "Day 1 of two": "10 welcome; notebook 00; notebook 01; labs 01, 17, 13; 15 *break*; notebook 02; labs 02, 03, 14; "
    "60 *lunch*; notebook 03; labs 04, 28; 15 *break*; notebook 04; labs 06, 16; "
    "15 discussion: which of these raise an error",
    "Day 2 of two": "10 each names one measurement from yesterday; notebook 05; labs 07, 08; 15 *break*; notebook 06; "
    "labs 09, 39, 29; notebook 07; lab 11; 60 *lunch*; labs 34, 21, 15; 15 *break*; labs 33, 18; notebook 08; lab 19; "
    "15 close: `failurelab preflight train.py` on your own script",
}


def read_card(number: str) -> re.Match:
    """Return what a notebook's first cell says of its minutes and seconds."""
    (notebook,) = notebooks.find([number])
    return OPENING.search(notebook.content.cells[0].source.splitlines()[-1])


def count_minutes(item: str) -> int:
    """Return how long one item of a plan takes."""
    kind, rest = item.split(" ", 1)
    if kind == "notebook":
        return int(read_card(rest)["reads"])
    return sum(lab.minutes for lab in definition.find(rest.split(", "))) if kind in ("lab", "labs") else int(kind)


def timetables() -> str:
    """When each notebook and lab begins, for a morning, a day and two."""
    runs = [int(read_card(each.name)["runs"].split()[0]) for each in notebooks.notebooks()]
    lines = [
        f"A notebook's minutes are those of reading it; on two cores it runs in {min(runs)} to {max(runs)} seconds."
    ]
    for title, plan in DAYS.items():
        clock, told = 9 * 60, []
        for item in plan.split("; "):
            told.append(f"{clock // 60:02}:{clock % 60:02} {re.sub(r'^[0-9]+ ', '', item)}")
            clock += count_minutes(item)
        lines.append(f"**{title}**: {'; '.join(told)}. To {clock // 60:02}:{clock % 60:02}.")
    return "\n\n".join(lines)
