"""Models by their hub name: whether the hub can be asked is found out in seconds, and what was downloaded is used.

What goes wrong: without a network each call of `from_pretrained` tries for half a minute, even where the model lies in
the cache since yesterday. So the hub is asked once, shortly; where it does not answer, only the cache is looked at.
HF_HUB_OFFLINE, HF_ENDPOINT, HF_HOME and the proxy variables mean what they mean to huggingface_hub.
"""

import functools
import pathlib
import re
import urllib.error
import urllib.request

PATIENCE = 5.0  # seconds


def is_name(source: str) -> bool:
    """Whether `source` is written as a hub name, such as `Qwen/Qwen2-0.5B-Instruct`, and is no folder here."""
    return bool(re.fullmatch(r"[\w.-]+/[\w.-]+", source)) and not pathlib.Path(source).expanduser().is_dir()


@functools.cache
def problem() -> str:
    """Return why the hub cannot be asked from this process, asked once; empty if it answers."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        urllib.request.urlopen(urllib.request.Request(constants.ENDPOINT, method="HEAD"), timeout=PATIENCE).close()
    except urllib.error.HTTPError:
        return ""  # an answer, if a strange one
    except OSError as error:
        return f"{constants.ENDPOINT} does not answer ({getattr(error, 'reason', error)})"
    return ""


def located(source: str) -> str:
    """Return where a source is to be read from: itself, or the folder in the cache, where the hub does not answer.

    Args:
        source: a folder, or a hub name.

    Raises:
        OSError: the hub does not answer, and the cache has nothing of that name.
    """
    if not is_name(source) or not problem():
        return source
    from huggingface_hub import snapshot_download

    return snapshot_download(source, local_files_only=True)


def why(name: str, source: str, error: Exception) -> str:
    """Return the line that says why a model could not be loaded, and the next step.

    Args:
        name: as it was asked for.
        source: the folder, or the hub name, that was read.
        error: what the library raised.
    """
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if is_name(source):
        silent = f"{problem()}, and the cache has not what is needed." if problem() else first
        return (
            f"{name} is no folder here and could not be fetched from the hub: {silent} "
            "Next: check the spelling and the network; without a network use a folder, tiny or random-0.5b."
        )
    return (
        f"the model in {source} cannot be loaded, a file is corrupt or does not fit the others: "
        f"{type(error).__name__}: {first} Next: get the checkpoint again (git checkout, or a new download)."
    )
