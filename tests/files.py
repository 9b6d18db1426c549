"""Files that tests write: scripts that they change, and stand-ins for programs."""


def edit(source, *edits):
    """Return the script with each text replaced, which stands in it once."""
    for old, new in edits:
        assert source.count(old) == 1, f"{old!r} stands {source.count(old)} times in the script"
        source = source.replace(old, new)
    return source


def write_program(path, text):
    """Write a program, and the folder that it lies in; return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path
