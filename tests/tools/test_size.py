"""The ceilings hold what is counted: packing, moving and renaming save nothing."""

import io
import tarfile

import pytest
from tools import size

ROOM = {"tokens": 10, "strings": 20, "words": 30, "archives": 0}


def count(path, text):
    return size.count_file(path, text.encode())


def test_packed_lines_save_nothing():
    long, packed = "a = 1\nb = 2\n", "a = 1; b = 2\n"
    assert count("a.py", packed)["lines"] < count("a.py", long)["lines"]
    assert count("a.py", packed)["tokens"] > count("a.py", long)["tokens"]


def test_comments_are_free_and_strings_are_not():
    bare = count("a.py", "a = 1\n")
    assert count("a.py", "a = 1  # why\n") == bare
    assert count("a.py", 'a = "code"\n')["strings"] == 4
    assert count("a.py", 'a = f"co{b}de"\n')["strings"] == 4


def test_an_fstring_is_one_token_in_every_python():
    assert count("a.py", "a = f\"co{b + 1}de {f'{c}'}\"\n")["tokens"] == 3


def test_json_in_one_line_counts_as_in_many():
    assert count("a.json", '{"a":[1,2]}') == count("b.toml", '{"a": [\n 1,\n 2]}') == {"words": 3}


def test_an_archive_counts_with_what_it_holds():
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:xz") as tar:
        member = tarfile.TarInfo("a.py")
        member.size = 50_000
        tar.addfile(member, io.BytesIO(bytes(50_000)))
    assert len(packed.getvalue()) < 1000
    assert size.count_file("a.tar.xz", packed.getvalue()) == {"archives": 50_000}


def test_each_file_counts_once_in_all():
    files = {"tools/a.py": b"a = 1\n", "helpers/failurelab/rewards/b.py": b"b = 2\n", "docs/c.md": b"two words\n"}
    rooms, _ = size.count_rooms(files | {size.CEILINGS: b"a = 1\n", "evidence/cpu/d.json": b"1"})
    assert rooms["tools and benchmarks"]["tokens"] == rooms["failurelab_preflight"]["tokens"] == 3
    assert rooms[size.ALL] == {"lines": 2, "tokens": 6, "strings": 0, "words": 2}


@pytest.mark.parametrize("column", size.HELD)
def test_what_is_above_is_told_with_its_room_and_both_numbers(column):
    more = ROOM | {column: ROOM[column] + 1}
    assert not list(size.find_raised({"a": ROOM}, {"a": ROOM}))
    assert list(size.find_raised({"a": more}, {"a": ROOM})) == [
        f"a: {column}: ceiling {ROOM[column]}, now {more[column]}"
    ]


def test_a_room_that_nobody_knows_has_no_room():
    assert len(list(size.find_raised({"a": ROOM, "new": ROOM}, {"a": ROOM}))) == 3


def test_ceilings_are_lowered_and_never_raised():
    now = {"a": ROOM | {"tokens": 5, "words": 40}, "new": ROOM}
    assert size.lower(now, {"a": ROOM}) == {"a": ROOM | {"tokens": 5}}
    assert size.lower(now, {}) == now  # without the file they begin anew


def test_the_file_is_read_as_it_is_written():
    numbers = {"a": ROOM, size.ALL: ROOM}
    read = size.read_ceilings({size.CEILINGS: size.as_toml(numbers).encode()})
    assert size.lower(numbers, read) == numbers
