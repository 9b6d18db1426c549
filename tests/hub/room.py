"""A room for a class: a hub with users of its own, in a mount namespace, so that nothing of the machine is changed.

    unshare --mount --propagation private python room.py ROOM PYTHON COURSE COMMAND...

What the hub sees there, and nobody else: the user list of ROOM/etc, and the course with every file of it read-only, for
root too. That is how "the eras are shared read-only" is proved: whatever wanted to write there would fail.
"""

import os
import pathlib
import subprocess
import sys


def mount(*arguments: object) -> None:
    """Run mount."""
    subprocess.run(["mount", *map(str, arguments)], check=True)


def reach(path: pathlib.Path, spare: pathlib.Path) -> None:
    """Let other users reach a folder of libraries that lies in a closed one, such as a Python below /root.

    Its closed parent is covered by an empty folder that is open, and only the path is put back into that.
    """
    closed = next((each for each in reversed(path.parents) if not each.stat().st_mode & 0o001), None)
    if closed is None:
        return
    spare.mkdir()
    mount("--bind", path, spare)
    mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", closed)
    path.mkdir(parents=True)
    mount("--move", spare, path)


def main() -> None:
    """Furnish the room, and become the hub."""
    room, python, course = map(pathlib.Path, sys.argv[1:4])
    for name in ("passwd", "group", "shadow"):
        mount("--bind", room / "etc" / name, pathlib.Path("/etc") / name)
    for number, folder in enumerate((course, python)):
        reach(folder, room / f"spare{number}")
    mount("--rbind", course, course)
    points = (
        line.split()[1].replace("\\040", " ") for line in pathlib.Path("/proc/self/mounts").read_text().splitlines()
    )
    for point in {each for each in points if pathlib.Path(each).is_relative_to(course)}:
        mount("-o", "remount,bind,ro", point)
    os.chdir("/")
    os.execv(sys.argv[4], sys.argv[4:])


if __name__ == "__main__":
    main()
