"""Bring the course to a notebook that was opened alone: on Colab, on Kaggle, or in any Python with torch.

A cell before the notebook's first one gets this file and calls `fetch` (docs/hosted.md; where the course's address is
known, tools/badges.py puts that cell there). Only the standard library is needed.
"""

import importlib.util
import pathlib
import shutil
import sys
import urllib.request


def fetch(source: str) -> None:
    """Make the course importable, and install today's libraries into the Python that runs, around its torch.

    What is there already is not fetched or installed again, so that the cell can be run twice.

    Args:
        source: the address of the course's archive, or the folder where it lies.

    Raises:
        OSError: the archive did not come, was cut short, or holds no course.
        EraError: the Python that runs lacks something (see `failurelab_course.eras.hosted.prepare`).
    """
    if importlib.util.find_spec("failurelab_course") is None:
        home = pathlib.Path(source)
        if not home.is_dir():
            try:
                file, _ = urllib.request.urlretrieve(source)
                shutil.unpack_archive(file, "course", "gztar")
                home = next(pathlib.Path("course").glob("*/eras")).parent
            except (EOFError, StopIteration) as error:
                raise OSError("the archive is cut short, or is not this course's") from error
        sys.path.insert(0, str(home.resolve() / "helpers"))
    from failurelab_course.eras import hosted

    hosted.prepare()
