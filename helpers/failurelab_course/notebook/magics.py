"""`%%era NAME`: run a notebook's cell in another library stack.

A failure is shown in the versions that had it, and beside it what today's do: two library stacks cannot be imported
into one process, and two notebooks would tear the story apart. So the cell runs in a kernel of that era, which stays
alive between cells, and its text, results, pictures and errors come back as if run here:

    %load_ext failurelab_course.notebook.magics

    %%era trl-0.14 -i steps -o rewards
    ...

`start` starts kernels in the background and imports trl there while the notebook goes on, for that takes seconds;
`%era_stop NAME ...` ends them. No kernel outlives the notebook's own, however that ends: see `kernel`.
An error in the cell makes the notebook's own cell fail, so that papermill and nbval see it. One that a story is about
is named by `--raises`, and then its absence fails.
"""

import atexit
import os
from collections.abc import Iterable

from IPython.core.error import UsageError
from IPython.core.magic import Magics, cell_magic, line_magic, magics_class, needs_local_scope
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring

from failurelab_course import eras
from failurelab_course.notebook.kernel import EraKernel
from failurelab_course.notebook.kernel_output import EraCellError, EraMagicError
from failurelab_course.notebook.kernel_output import EraKernelDied as EraKernelDied

# A forked child has its parent's objects, and must not end its parent's kernels: so the process id is in the key.
_kernels: dict[tuple[int, str], EraKernel] = {}


def kernel(name: str) -> EraKernel:
    """Return this process's kernel of an era, which starts at its first use.

    Raises:
        EraMagicError: there is no such era, or it has not been made.
    """
    key = (os.getpid(), name)
    if key not in _kernels:
        try:
            _kernels[key] = EraKernel(name)
        except eras.EraError as error:
            raise EraMagicError(str(error)) from None
    return _kernels[key]


def start(*names: str) -> None:
    """Start kernels of these eras in the background, and import trl's GRPOTrainer there; return at once.

    An era that a set-up is making just now is left out: the first cell that needs it waits, and starts its kernel.

    Raises:
        EraMagicError: as for `kernel`; none is started then.
    """
    being_made = {era.name for era in eras.known() if era.is_being_made}
    for era_kernel in [kernel(name) for name in names if name not in being_made]:
        era_kernel.start(preload=True)


@atexit.register
def stop(*names: str) -> None:
    """End the kernels of these eras, of all eras without a name; their variables are lost.

    Raises:
        EraMagicError: there is no such era.
    """
    for name in names:
        try:
            eras.find(name, ready=False)
        except eras.EraError as error:
            raise EraMagicError(str(error)) from None
    for (process, name), era_kernel in list(_kernels.items()):
        if process == os.getpid() and (not names or name in names):
            era_kernel.stop()


@magics_class
class EraMagics(Magics):
    """`%%era` and `%era_stop`."""

    @magic_arguments()
    @argument("name", help="the era, a pinned library stack as `failurelab eras list` names them; or several: a,b,c")
    @argument("-i", "--input", action="append", default=[], help="variables to take there: a,b or -i a -i b")
    @argument("-o", "--output", action="append", default=[], help="variables to bring back: c,d or -o c -o d")
    @argument("--raises", metavar="TEXT", help="the error in which the cell must end, or a part of it, in quotes")
    @argument(
        "--traceback", action="store_true", help="with --raises: show the whole traceback, not its last line only"
    )
    @needs_local_scope
    @cell_magic
    def era(self, line: str, cell: str, local_ns: dict | None = None) -> None:
        """Run the cell in an era's kernel, which stays alive between cells.

        Values travel as JSON: numbers (NaN and infinities too), strings, booleans, None, lists and dictionaries of
        these with strings as keys; a tuple becomes a list.

        With several eras, the cell runs in each of them, in order, and what `-o` names becomes a dictionary by era.

        A script that shows a failure stands in its cell as it is, without a `try`: `--raises` says which error it must
        end in, shows its last line, and lets the notebook go on. Another error, or none, is an error here.
        """
        options = _parse(self.era, line)
        names = list(dict.fromkeys(options.name.split(",")))
        if len(names) > 1 and options.raises:
            raise EraMagicError("--raises: the cell runs in several eras. Next: show the error in one of them.")
        variables = self.shell.user_ns | (local_ns or {})
        send = {name: variables.get(name) for name in _names("-i", options.input)}
        fetch = _names("-o", options.output)
        for name in send:
            if name not in variables:
                raise EraMagicError(f"-i: {name} does not exist here. Next: assign it in a cell before this one.")
        # Lines are counted as in the notebook's cell, so that a traceback names the line that its reader sees. A magic
        # must stay first.
        expected = (options.raises or "").strip("\"'")
        code = cell if cell.lstrip().startswith("%%") else f"# %%era {line}\n{cell}"
        try:
            found = {name: kernel(name).run(code, send, fetch) for name in names}
            several = {name: {era: found[era][name] for era in names} for name in fetch}
            self.shell.push(several if len(names) > 1 else found[options.name])
        except EraCellError as error:
            raised = f"{error.ename}: {error.evalue}"
            if not expected or expected not in raised:
                raise
            if options.traceback:
                print(kernel(options.name).last_traceback())
            print(f"{raised.strip().splitlines()[0]} (expected)")
        else:
            if expected:
                raise EraMagicError(f"--raises: the cell ended without the error that it was to show: {expected!r}")

    @magic_arguments()
    @argument("names", nargs="*", help="eras whose kernels are ended; all, if none is named")
    @line_magic
    def era_stop(self, line: str) -> None:
        """End kernels of eras and every process they have started; their variables are lost."""
        stop(*_parse(self.era_stop, line).names)


def _parse(magic, line: str):
    # IPython would print a UsageError without publishing an error: papermill and nbval look for one.
    try:
        return parse_argstring(magic, line)
    except UsageError as error:
        names = ", ".join(era.name for era in eras.known())
        raise EraMagicError(f"{error}. The eras are {names}; for the options: %{magic.__name__}?") from None


def _names(option: str, values: Iterable[str]) -> list[str]:
    """Split the values of -i or -o at their commas."""
    names = [name for value in values for name in value.split(",") if name]
    for name in names:
        if not name.isidentifier():
            raise EraMagicError(
                f"{option}: {name!r} is not a variable's name. Next: name variables, as in {option} a,b"
            )
    return list(dict.fromkeys(names))


def load_ipython_extension(ipython) -> None:
    """Make the magics known: `%load_ext failurelab_course.notebook.magics`."""
    ipython.register_magics(EraMagics)
