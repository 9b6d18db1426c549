"""A part of a corpus as one file: folders of small text files in a `.tar.xz`, which is the same for the same files."""

import lzma
import pathlib
import tarfile


def pack(folder: pathlib.Path, archive: pathlib.Path) -> None:
    """Write the files of `folder` into `archive` under the folder's name: sorted, without times, owners or modes."""
    with lzma.open(archive, "wb", preset=9) as packed, tarfile.open(fileobj=packed, mode="w") as tar:
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            entry = tarfile.TarInfo(f"{folder.name}/{path.relative_to(folder).as_posix()}")
            entry.size = path.stat().st_size
            with path.open("rb") as file:
                tar.addfile(entry, file)


def unpack(archive: pathlib.Path, into: pathlib.Path) -> pathlib.Path:
    """Write the files of `archive` below `into`; return the folder that they lie in, named as the archive."""
    with tarfile.open(archive) as tar:
        tar.extractall(into, filter="data")
    return into / archive.name.removesuffix(".tar.xz")
