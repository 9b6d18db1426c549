"""What holds on each way from a model to a trainer: plain, wrapped by trl, by hand, from a saved adapter, quantized.

Eras: trl-0.14, trl-0.14-tf-4.52, trl-0.15, trl-0.22, today.
"""

import itertools
import pathlib
import tempfile

import recording

from failurelab_course.experiments import adapter_paths, observe


def main() -> None:
    """Ask every question on every path, before the trainer is made and after, and record the answers."""
    recording.begin(__doc__)
    questions = adapter_paths.QUESTIONS
    with tempfile.TemporaryDirectory() as folder:
        folders = (pathlib.Path(folder, str(number)) for number in itertools.count())
        for path, name, before in itertools.product(adapter_paths.available(), questions, (True, False)):
            result = questions[name](lambda: adapter_paths.make(path, next(folders)), before)  # noqa: B023
            when = "before" if before else "after"
            figures = {"holds": result.holds, "needed": result.needed, "figure": result.figure}
            observe.record("ground", "measured", figures, case=f"paths: {name}, {path}, {when}", seed=0)
            print(f"{name}, {path}, {when}: {result}", flush=True)


if __name__ == "__main__":
    main()
