"""A reward function asked in a process of its own, so that a call that goes wrong costs one answer and nothing else.

People's reward functions print, write logs, keep caches, start processes, call services, and now and then never return.
Each call is made in a fork: what it prints or writes outside of the temporary folder goes nowhere, what it remembers is
forgotten, and when its time is over it is ended with all that it started. What a function cannot have here (a network,
a GPU, a package, a file) is told as the reason why it was not judged, and is no failure of the script.
"""

import asyncio
import builtins
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
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from failurelab._text import first_line

LIMIT = 30.0  # seconds for all that one function is asked
_SEARCH = 5.0  # of them for which completions of a call it raises
# An error of these types is the function's own. Another one comes from what is not here: a service, a file, a package.
_OWN = (KeyError, IndexError, TypeError, ValueError, AttributeError, ArithmeticError, NameError, AssertionError)
_MISSING = re.compile(r"cuda|gpu|nvidia|api.?key|credential|\btoken is required|not compiled with", re.IGNORECASE)

ONE_NUMBER = "one number"
Make = Callable[[Sequence[int]], dict[str, Any]]  # the arguments of a call about the completions at these places


@dataclasses.dataclass(frozen=True)
class Reply:
    """What came of one call.

    Attributes:
        values: a reward for each completion; None for one that it raises for. Empty where there is no such list.
        returned: what it returned in place of such a list, in words; ONE_NUMBER where that stands in `values`.
        error: of the function's own: type and message; empty if none.
        key: that was missing, of a KeyError.
        unasked: why the function could not be asked; empty if it was.
        raised: places of the completions that it raises for, where it answers others; `error` is of these then.
        changed: the arguments whose lists, or what stands in them, are others after the call.
    """

    values: list[float | None] = dataclasses.field(default_factory=list)
    returned: str = ""
    error: str = ""
    key: str | None = None
    unasked: str = ""
    raised: tuple[int, ...] = ()
    changed: tuple[str, ...] = ()


class Asker:
    """One reward function, and the time that is left for it."""

    def __init__(self, function: Callable[..., Any]):
        self.function, self.left = function, LIMIT

    def ask(self, make: Make, count: int, prepare: Callable[[], Any] | None = None, size: int = 0) -> Reply:
        """Call the function once about all completions; where it raises, again about those that it does not raise for.

        Args:
            make: returns the arguments, as the trainer hands them over, for the completions at some places.
            count: of completions.
            prepare: changes something first, in that process alone.
            size: completions of one call; 0 for all in one.
        """
        if self.left <= 0:
            return Reply(unasked="its time is used up")
        started = time.monotonic()
        reply = in_fork(lambda: _call(self.function, make, count, prepare, size), self.left)
        self.left -= time.monotonic() - started
        return reply if isinstance(reply, Reply) else Reply(unasked=reply)


def in_fork(call: Callable[[], Any], limit: float) -> Any:
    """Return what `call` gives in a fork of this process, ended when it answered or its time is over; else why not."""
    if not hasattr(os, "fork"):
        return "this system has no fork, in which alone it is asked"
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
    answer = None
    try:
        # A process that the function has left behind keeps the pipe open: then only the time ends.
        answer = reading.recv() if reading.poll(limit) else f"it did not return within {limit:.0f} seconds"
    except (EOFError, OSError):  # it ended, or in the middle of its answer
        pass
    finally:
        reading.close()
        for end in (os.killpg, os.kill):  # the second where it has not made its group yet
            with contextlib.suppress(ProcessLookupError, PermissionError):
                end(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    return f"it ended its process ({os.waitstatus_to_exitcode(status)})" if answer is None else answer


def _silence() -> None:
    """Let this process print nowhere, and write nothing outside of the temporary folder."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    sys.stdout = sys.stderr = os.fdopen(nowhere, "w")  # which may have been another file than that of the terminal
    import torch  # not above: an answer is read where there is none

    torch.set_num_threads(1)  # the threads of the pool were not forked
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    original, temporary = builtins.open, os.path.realpath(tempfile.gettempdir()) + os.sep

    def open_(file: Any, mode: str = "r", *rest: Any, **options: Any) -> Any:
        writes = isinstance(file, (str, os.PathLike)) and set(mode) & set("wax+")
        if writes and not os.path.realpath(file).startswith(temporary):
            file, mode = os.devnull, mode.replace("x", "w")
        return original(file, mode, *rest, **options)

    builtins.open = io.open = open_


def _call(function: Callable[..., Any], make: Make, count: int, prepare: Callable[[], Any] | None, size: int) -> Reply:
    try:
        if prepare is not None:
            prepare()
        return _in_calls(function, make, range(count), size)
    except BaseException as error:
        reply = _describe(error)
        raised = _raising(function, make, count) if isinstance(error, Exception) and not _is_missing(error) else ()
    left = [place for place in range(count) if place not in raised]
    if not raised:
        return reply
    try:
        answered = _in_calls(function, make, left, size)
    except BaseException:
        return reply
    if len(answered.values) == len(left):
        values: list[float | None] = [None] * count
        for place, value in zip(left, answered.values):
            values[place] = value
        answered = dataclasses.replace(answered, values=values)
    return dataclasses.replace(answered, error=reply.error or reply.unasked, key=reply.key, raised=raised)


def _in_calls(function: Callable[..., Any], make: Make, places: Sequence[int], size: int) -> Reply:
    """Return what a function gives to the completions at some places, in calls of so many; 0 for one call."""
    replies, size = [], size or max(1, len(places))
    for start in range(0, max(1, len(places)), size):
        given = make(places[start : start + size])
        before = {name: repr(value) for name, value in given.items() if isinstance(value, list)}
        reply = _read(call(function, given))
        changed = tuple(name for name in before if repr(given[name]) != before[name])
        replies.append(dataclasses.replace(reply, changed=changed))
    if len(replies) < 2:
        return replies[0]
    returned = next(
        (each.returned for each in replies if each.returned and (each.returned, size) != (ONE_NUMBER, 1)), ""
    )
    values = [value for each in replies for value in each.values]
    return Reply(values, returned, changed=tuple(dict.fromkeys(name for each in replies for name in each.changed)))


def _raising(function: Callable[..., Any], make: Make, count: int) -> tuple[int, ...]:
    """Return the places of the completions that a function raises for, by halves; none where that is all of them."""
    raised: list[int] = []
    left, ends = [range(count)], time.monotonic() + _SEARCH
    while left and time.monotonic() < ends:
        places = left.pop()
        try:
            call(function, make(places))
        except Exception:
            half = len(places) // 2
            raised += places if not half else ()
            left += [places[:half], places[half:]] if half else []
        except BaseException:  # it ends its process
            return ()
    return tuple(sorted(raised)) if not left and len(raised) < count else ()


def call(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Call a reward function in this process, an asynchronous one too."""
    rewards = function(**arguments)
    return asyncio.run(_awaited(rewards)) if inspect.isawaitable(rewards) else rewards


async def _awaited(rewards: Any) -> Any:
    return await rewards


def _read(rewards: Any) -> Reply:
    """Return rewards as plain numbers; of what is no list of numbers its type and text."""
    if hasattr(rewards, "tolist"):
        rewards = rewards.tolist()
    if isinstance(rewards, (int, float)):
        return Reply([float(rewards)], returned=ONE_NUMBER)
    try:
        values = list(rewards)
        if any(isinstance(value, str) for value in values):  # of which torch makes no tensor, also where it is a number
            raise TypeError
        return Reply([None if value is None else float(value) for value in values])
    except (TypeError, ValueError):
        return Reply(returned=f"{type(rewards).__name__} {str(rewards)[:60]!r}")


def _describe(error: BaseException) -> Reply:
    """Return what an error says: of the function, or of what is not here."""
    text = f"{type(error).__name__}: {first_line(error)}" if str(error) else type(error).__name__
    if isinstance(error, ModuleNotFoundError):
        return Reply(unasked=f"it needs {error.name}, which is not installed here")
    if _is_unset(error):
        return Reply(unasked=f"it needs the environment variable {error.args[0]}, which is not set here")
    if not isinstance(error, _OWN) or _is_missing(error):
        return Reply(unasked=text)
    key = error.args[0] if isinstance(error, KeyError) and error.args and isinstance(error.args[0], str) else None
    return Reply(error=text, key=key)


def _is_missing(error: BaseException) -> bool:
    """Whether an error comes from what is not here: a package, a variable, a key, a GPU, a file or a service."""
    came_of: BaseException | None = error
    for _ in range(20):
        if isinstance(came_of, OSError):
            return True
        came_of = came_of and (came_of.__cause__ or came_of.__context__)
    missing = _is_unset(error) or isinstance(error, ModuleNotFoundError)
    return missing or bool(_MISSING.search(f"{type(error).__name__}: {first_line(error)}"))


def _is_unset(error: BaseException) -> bool:
    """Whether a variable of the environment was asked for that is not set."""
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    return isinstance(error, KeyError) and files[-1:] in ([os.__file__], ["<frozen os>"])
