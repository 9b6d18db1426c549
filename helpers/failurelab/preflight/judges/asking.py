"""A reward function asked in a process of its own, so that a call that goes wrong costs one answer and nothing else.

People's reward functions print, write logs, keep caches, start processes, call services, and now and then never return.
Each call is made in a fork: what it prints or writes outside of the temporary folder goes nowhere, what it remembers is
forgotten, and when its time is over it is ended with all that it started. What a function cannot have here (a network,
a GPU, a package, a file) is told as the reason why it was not judged, and is no failure of the script.
"""

import asyncio
import builtins
import collections
import contextlib
import dataclasses
import inspect
import io
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
import traceback
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from failurelab._text import first_line
from failurelab.preflight.intercept.processes import Stopped
from failurelab.preflight.script_error import causes
from failurelab.reward_functions import source as reward_source

LIMIT = 30.0  # seconds for all that one function is asked
_SEARCH = 5.0  # of them for which completions of a call it raises
# An error of these types is the function's own. Another one comes from what is not here: a service, a file, a package.
_OWN = (KeyError, IndexError, TypeError, ValueError, AttributeError, ArithmeticError, NameError, AssertionError)
_MISSING = re.compile(r"cuda|gpu|nvidia|api.?key|credential|\btoken is required|not compiled with", re.IGNORECASE)
# Errors that are a slip of the code and not of the text that it reads, where every completion has one.
_SLIPS = (NameError, TypeError, AttributeError, ImportError)


@dataclasses.dataclass(frozen=True)
class Given:
    """What came of one call.

    Attributes:
        rewards: what the function returned: a list, a number, or the text of what else it was.
        error: of the function's own: type and message; empty if none.
        key: that was missing, of a KeyError.
        unasked: why the function could not be asked; empty if it was.
        slips: how often it raised and caught an error, by line and text, the most frequent first; where that was asked.
        raised: places of the completions that it raises for, where it answers others. The rewards of these are then the
            lowest that others of their prompt got, and `error` is of these.
    """

    rewards: Any = None
    error: str = ""
    key: str | None = None
    unasked: str = ""
    slips: dict[tuple[int, str], int] = dataclasses.field(default_factory=dict)
    raised: tuple[int, ...] = ()

    @property
    def values(self) -> list[Any]:
        """The rewards, where they are a list; empty where anything went wrong."""
        return self.rewards if isinstance(self.rewards, list) else []


class Asker:
    """One reward function, and the time that is left for it."""

    def __init__(self, function: Callable[..., Any]):
        self.function, self.left = function, LIMIT

    def ask(
        self,
        arguments: dict[str, Any],
        prepare: Callable[[], None] | None = None,
        slips: bool = False,
        part: Callable[[Sequence[int]], dict[str, Any]] | None = None,
    ) -> Given:
        """Call the function once.

        Args:
            arguments: as the trainer hands them over.
            prepare: changes something first, in that process alone.
            slips: also tell the errors that the function catches.
            part: returns the arguments for these places of the completions alone; where it is given and the function
                raises, it is looked which of them it raises for.
        """
        if self.left <= 0:
            return Given(unasked="its time is used up")
        started = time.monotonic()
        try:
            return _fork(lambda: _call(self.function, arguments, prepare, slips, part), self.left)
        finally:
            self.left -= time.monotonic() - started


def _fork(call: Callable[[], Given], limit: float) -> Given:
    """Run `call` in a fork of this process; end it, and what it started, when it answered or its time is over."""
    reading, writing = multiprocessing.Pipe(duplex=False)
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: a fork of a process with threads
        child = os.fork()
    if child == 0:
        try:
            os.setsid()
            _silence()
            writing.send(call())
        finally:
            os._exit(0)
    writing.close()
    given = None
    try:
        # A process that the function has left behind keeps the pipe open: then only the time ends.
        given = (
            reading.recv() if reading.poll(limit) else Given(unasked=f"it did not return within {limit:.0f} seconds")
        )
    except (EOFError, OSError):  # it ended, or in the middle of its answer
        pass
    finally:
        reading.close()
        for end in (os.killpg, os.kill):  # the second where it has not made its group yet
            with contextlib.suppress(ProcessLookupError, PermissionError):
                end(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    return given or Given(unasked=f"it ended its process ({os.waitstatus_to_exitcode(status)})")


def _silence() -> None:
    """Let this process print nowhere, and write nothing outside of the temporary folder."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    sys.stdout = sys.stderr = os.fdopen(nowhere, "w")  # which may have been another file than that of the terminal
    torch.set_num_threads(1)  # the threads of the pool were not forked
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    original, temporary = builtins.open, os.path.realpath(tempfile.gettempdir()) + os.sep

    def open_(file: Any, mode: str = "r", *rest: Any, **options: Any) -> Any:
        writes = isinstance(file, (str, os.PathLike)) and set(mode) & set("wax+")
        if writes and not os.path.realpath(file).startswith(temporary):
            file, mode = os.devnull, mode.replace("x", "w")
        return original(file, mode, *rest, **options)

    builtins.open = io.open = open_


def _call(
    function: Callable[..., Any],
    arguments: dict[str, Any],
    prepare: Callable[[], None] | None,
    slips: bool,
    part: Callable[[Sequence[int]], dict[str, Any]] | None,
) -> Given:
    seen: collections.Counter[tuple[int, str]] = collections.Counter()
    try:
        if prepare is not None:
            prepare()
        if slips:
            sys.settrace(_trace(_file(function), seen))
        given = _plain(call(function, arguments))
    except Stopped as error:
        return Given(unasked=f"it {first_line(error)}")
    except BaseException as error:
        sys.settrace(None)
        looks = not slips and isinstance(error, Exception) and not _is_missing(error)
        raised = _raising(function, part, len(arguments["completions"])) if looks and part is not None else ()
        return dataclasses.replace(_told(error), raised=raised)
    finally:
        sys.settrace(None)
    return Given(given, slips=dict(seen.most_common()))


def _raising(
    function: Callable[..., Any], part: Callable[[Sequence[int]], dict[str, Any]], count: int
) -> tuple[int, ...]:
    """Return the places of the completions that a function raises for, by halves; none where that is all of them."""
    raised: list[int] = []
    left, ends = [range(count)], time.monotonic() + _SEARCH
    while left and time.monotonic() < ends:
        places = left.pop()
        try:
            call(function, part(places))
        except Exception:
            half = len(places) // 2
            raised += places if not half else ()
            left += [places[:half], places[half:]] if half else []
        except BaseException:  # it ends its process
            return ()
    return tuple(sorted(raised)) if not left and len(raised) < count else ()


def call(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Call a reward function in this process, an asynchronous one too."""
    given = function(**arguments)
    return asyncio.run(_awaited(given)) if inspect.isawaitable(given) else given


async def _awaited(given: Any) -> Any:
    return await given


def _plain(given: Any) -> Any:
    """Return rewards as plain numbers; of what is no list of numbers its type and text."""
    if hasattr(given, "tolist"):
        given = given.tolist()
    if isinstance(given, (int, float)):
        return float(given)
    try:
        values = list(given)
        return [None if value is None else float(value) for value in values]
    except (TypeError, ValueError):
        return f"{type(given).__name__} {str(given)[:60]!r}"


def _told(error: BaseException) -> Given:
    """Return what an error says: of the function, or of what is not here."""
    text = f"{type(error).__name__}: {first_line(error)}" if str(error) else type(error).__name__
    if isinstance(error, ModuleNotFoundError):
        return Given(unasked=f"it needs {error.name}, which is not installed here")
    if _is_unset(error):
        return Given(unasked=f"it needs the environment variable {error.args[0]}, which is not set here")
    if not isinstance(error, _OWN) or _is_missing(error):
        return Given(unasked=text)
    key = error.args[0] if isinstance(error, KeyError) and error.args and isinstance(error.args[0], str) else None
    return Given(error=text, key=key)


def _is_missing(error: BaseException) -> bool:
    """Whether an error comes from what is not here: a package, a variable, a key, a GPU, a file or a service."""
    missing = _is_unset(error) or isinstance(error, ModuleNotFoundError)
    missing |= bool(_MISSING.search(f"{type(error).__name__}: {first_line(error)}"))
    return missing or any(isinstance(each, OSError) for each in causes(error))


def _is_unset(error: BaseException) -> bool:
    """Whether a variable of the environment was asked for that is not set."""
    return isinstance(error, KeyError) and _files(error.__traceback__)[-1:] in ([os.__file__], ["<frozen os>"])


def _file(function: Callable[..., Any]) -> str:
    return getattr(getattr(reward_source.plain_function(function), "__code__", None), "co_filename", "")


def _trace(file: str, seen: collections.Counter) -> Callable[..., Any]:
    """Return a trace function that counts slips raised in the code of one file."""

    def local(frame: Any, event: str, argument: Any) -> Any:
        if event == "exception":
            kind, value, at = argument
            # `'NoneType' object ...` is a pattern that matched nothing: it is of the text, not of the code.
            if issubclass(kind, _SLIPS) and "'NoneType'" not in str(value) and file not in _files(at.tb_next):
                seen[frame.f_lineno, f"{kind.__name__}: {first_line(value)}"] += 1
        return local

    return lambda frame, event, argument: local if frame.f_code.co_filename == file else None


def _files(at: types.TracebackType | None) -> list[str]:
    """Return the files of code that an error passed through, the innermost last."""
    return [frame.f_code.co_filename for frame, _ in traceback.walk_tb(at)]
