"""A script that logs in to the hub: nothing is asked, checked or stored, for a preflight uploads nothing.

What the script loads from there is loaded with the token that the machine has.
"""

import contextlib
from collections.abc import Iterator
from unittest import mock

_LOGINS = ("login", "notebook_login", "interpreter_login")


@contextlib.contextmanager
def no_logins() -> Iterator[None]:
    """Inside, the logins of huggingface_hub do nothing."""
    import huggingface_hub

    with contextlib.ExitStack() as stack:
        for name in _LOGINS:
            stack.enter_context(mock.patch.object(huggingface_hub, name, lambda *_, **__: None))
        yield
