"""Notices of other libraries, kept out of a notebook's output. Standard library alone, so that a kernel starts fast.

Libraries talk at import and once a step: device notices, upgrade advice, progress bars. In a course's output they hide
what matters, and they differ by machine, so that no stored output could be compared. What is said here holds for
libraries that are imported later too.
"""

import contextlib
import logging
import os
import re
import sys
import types
import warnings
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader

# Loggers of other libraries that talk at import or once a step; the course says itself what matters.
TALKERS = (
    "transformers",
    "trl",
    "accelerate",
    "peft",
    "bitsandbytes",
    "deepspeed",
    "datasets",
    "torch.distributed",
    "httpx",
    "papermill",
)
_VARIABLES = {
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "BITSANDBYTES_NOWELCOME": "1",
}


def quiet() -> None:
    """Set other libraries' loggers to ERROR, and silence progress bars, upgrade advice and Python warnings.

    Python warnings of the categories DeprecationWarning, FutureWarning and UserWarning are silenced for the whole
    process. `count_warnings` sees them all the same: where a warning is the subject, the course counts it.
    """
    for name, value in _VARIABLES.items():
        os.environ.setdefault(name, value)
    for name in TALKERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    # bitsandbytes 0.45 tells of its CPU library at ERROR, with a traceback, where libstdc++ is older than it likes. On
    # a GPU that would matter; without one, transformers of its time refuses 4-bit models by itself.
    if not os.path.exists("/dev/nvidiactl"):
        logging.getLogger("bitsandbytes.cextension").setLevel(logging.CRITICAL + 1)
    # DeepSpeed sets its logger's level when it is imported, and talks at once; a filter it leaves alone.
    logging.getLogger("DeepSpeed").addFilter(_is_error)
    for category in (DeprecationWarning, FutureWarning, UserWarning):
        warnings.filterwarnings("ignore", category=category)
    if _QuietDeepSpeed not in sys.meta_path:
        sys.meta_path.insert(0, _QuietDeepSpeed)
    # tqdm's advice to install widgets, of a category of its own; it falls back to text by itself.
    warnings.filterwarnings("ignore", message="IProgress not found")
    # Those that are imported already read the variables then.
    if "transformers" in sys.modules:
        sys.modules["transformers"].logging.set_verbosity_error()
        sys.modules["transformers"].logging.disable_progress_bar()
    if "datasets" in sys.modules:
        sys.modules["datasets"].disable_progress_bars()


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


class _QuietLoader(SourceFileLoader):
    def exec_module(self, module) -> None:
        with contextlib.redirect_stderr(sys.__stderr__):
            super().exec_module(module)


class _QuietDeepSpeed:
    """An import finder for one module of DeepSpeed, whose probes of the linker would write to a notebook.

    At import DeepSpeed tries which of its operations could be built, and hides what the linker says by redirecting
    `sys.stderr.fileno()`. In a notebook's kernel that is another descriptor than the linker's. While this module is
    loaded, `sys.stderr` is the process's own, so that DeepSpeed hides what it means to hide.
    """

    @staticmethod
    def find_spec(name: str, path=None, target=None) -> ModuleSpec | None:
        """Return the module's own spec with the quiet loader; None for every other module."""
        spec = PathFinder.find_spec(name, path, target) if name == "deepspeed.git_version_info" else None
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _QuietLoader(spec.loader.name, spec.loader.path)
        return spec


@contextlib.contextmanager
def count_warnings(match: str) -> Iterator[types.SimpleNamespace]:
    """Count the Python warnings whose text `match` finds, every one, and show none of them meanwhile.

    What is yielded has their `count` when the block has ended.
    """
    seen = types.SimpleNamespace(count=0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield seen
        finally:
            seen.count = sum(bool(re.search(match, str(warning.message))) for warning in caught)
