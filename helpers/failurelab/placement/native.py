"""Whether bitsandbytes has its native library: it imports without one, and fails in the first layer that needs it.

What goes wrong: the wheel's library does not fit the machine's CUDA or C++ runtime. Releases up to 0.45 then set
`lib = None`, so that the first 4-bit layer ends in "'NoneType' object has no attribute ..."; later ones put a stand-in
there whose every function raises. On a CPU today's release falls back on plain torch, slowly.

Source: bitsandbytes `cextension.py`.
"""

import contextlib
import importlib.metadata
import io
import logging

import torch


def native_problem(device: torch.device) -> str:
    """Return what is wrong with the native library of bitsandbytes for this device; "" if nothing is.

    bitsandbytes is imported for that, quietly: its own report is a traceback and a page of advice.
    """
    try:
        version = importlib.metadata.version("bitsandbytes")
    except importlib.metadata.PackageNotFoundError:
        return (
            "the model has layers of bitsandbytes, which is not installed here. Next: pip install bitsandbytes, or "
            "load the model without quantization"
        )
    try:
        library, said = _library()
    except Exception as error:  # an import of a broken build may end in anything
        return (
            f"bitsandbytes {version} does not import ({type(error).__name__}: {_line(error)}), and 4- and 8-bit layers "
            "need it. Next: python -m bitsandbytes"
        )
    kind = type(library).__name__
    if library is None or kind.startswith("ErrorHandler"):
        if kind.startswith("ErrorHandler") and device.type == "cpu":
            return ""  # plain torch does its work there
        why = said or "it names no reason"
        return (
            f"bitsandbytes {version} runs without its native library ({why}): every 4- or 8-bit layer fails in its "
            "first forward pass. Next: python -m bitsandbytes shows what it looked for; install the release that fits "
            "this machine's CUDA and C++ runtime"
        )
    return ""


def _library() -> tuple[object, str]:
    """Import the extension with its logger caught; return its library and the first line it had to say."""
    logger, heard = logging.getLogger("bitsandbytes.cextension"), io.StringIO()
    handler = logging.StreamHandler(heard)
    before = logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            from bitsandbytes import cextension
    finally:
        logger.removeHandler(handler)
        logger.propagate = before
    said = heard.getvalue().strip()
    if cextension.lib is None and not said:  # imported earlier: load it once more, for the reason
        try:
            cextension.get_native_library()
        except Exception as error:
            said = _line(error)
    said = said or str(getattr(cextension.lib, "error_msg", ""))
    return cextension.lib, said.splitlines()[0].removesuffix(".")[:300] if said else ""


def _line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
