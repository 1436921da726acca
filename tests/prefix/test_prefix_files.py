"""Prefix files: what is read is what was written or nothing, whoever dies, writes, removes or damages meanwhile."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from hashlib import blake2b
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from ballonet.offload.policy.prefixes import Stored, StoredPart, before, leaving
from ballonet.offload.policy.tuning import DEFAULT
from ballonet.offload.residency import prefix_files
from ballonet.offload.residency.prefix_files import Array, OtherFormat, PrefixDamaged, PrefixFiles

from ..tuned import Clock

pytestmark = pytest.mark.chaos


BLOCK = 4
SALT = b"model, bfloat16"


def key(number: int) -> bytes:
    return blake2b(b"%d" % number, digest_size=16).digest()


def array(seed: int, nbytes: int) -> Array:
    return Array("BF16", (nbytes // 2,), memoryview(bytearray(Random(seed).randbytes(nbytes))))


def run(first: int, blocks: int = 1, nbytes: int = 64) -> tuple[list[bytes], list[int], dict[str, Array]]:
    """Keys, ids and tensors of blocks that begin with this one."""
    numbers = range(first, first + blocks)
    ids = [token for number in numbers for token in range(number * BLOCK, (number + 1) * BLOCK)]
    return [key(n) for n in numbers], ids, {"0.keys": array(first, nbytes), "0.values": array(first + 1000, nbytes)}


def same(found: prefix_files.Saved | None, first: int, blocks: int = 1, nbytes: int = 64) -> bool:
    keys, ids, tensors = run(first, blocks, nbytes)
    assert found is not None
    wanted = {name: (tensor.dtype, tensor.shape, tensor.data.tobytes()) for name, tensor in tensors.items()}
    return (found.part.keys, list(found.ids), arrays(found)) == (tuple(keys), ids, wanted)


def arrays(found: prefix_files.Saved) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {name: (tensor.dtype, tensor.shape, bytes(tensor.data)) for name, tensor in found.tensors.items()}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def only(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def files(tmp_path: Path, clock: Clock) -> PrefixFiles:
    return PrefixFiles(tmp_path / "prefixes", None, SALT, clock)


def size_of_one(folder: Path, after: bytes = b"") -> int:
    """Bytes of a file of one block."""
    probe = PrefixFiles(folder / "probe", None, SALT)
    assert probe.save(*run(0), after=after)
    return probe.nbytes()


# -- what is written is read


def test_saved_blocks_are_found_by_each_key_and_by_another_process(files: PrefixFiles) -> None:
    other = PrefixFiles(files.directory, None, SALT)
    assert files.keys() == set()
    assert files.save(*run(0, 3))
    assert other.match([key(0)]) == 1
    assert files.save(*run(3), after=key(2))
    for store in (files, other):
        assert store.keys() == {key(n) for n in range(4)}
        assert all(same(store.load(key(n)), 0, 3) for n in range(3))
        assert same(store.load(key(3)), 3)
        assert store.load(key(4)) is None
        assert [store.match(map(key, numbers)) for numbers in ((0, 1, 2, 3, 4), (1,), (9, 0), ())] == [4, 1, 0, 0]
    after = files.load(key(3))
    assert after is not None
    assert (after.part.after, after.part.salt) == (key(2), SALT)
    assert len(names(files.directory)) == 2
    assert files.nbytes() == sum(path.stat().st_size for path in files.directory.iterdir())
    assert all(path.stat().st_mode & 0o077 == 0 for path in (files.directory, *files.directory.iterdir()))
    other.clear()
    assert files.keys() == set()


def test_a_file_is_one_that_safetensors_reads_with_the_header_that_is_documented(files: PrefixFiles) -> None:
    keys, ids, _ = run(7, 2)
    numbers = np.arange(6, dtype=np.float32)
    assert files.save(keys, ids, {"0.keys": Array("F32", (2, 3), memoryview(numbers).cast("B"))}, after=key(6))
    theirs = load_file(only(files.directory))
    assert theirs["ids"].tolist() == ids
    assert theirs["0.keys"].tolist() == numbers.reshape(2, 3).tolist()
    data = only(files.directory).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert list(header) == ["__metadata__", "ids", "0.keys", "checksum"]
    told = {"salt": SALT.hex(), "after": key(6).hex(), "keys": f"{key(7).hex()} {key(8).hex()}"}
    assert header["__metadata__"] == {"format": "ballonet prefix 1", **told}
    assert length % 8 == 0


def test_file_without_room_for_its_tensors_is_not_used(files: PrefixFiles) -> None:
    for wrong in (None, memoryview(bytearray(63))):
        assert files.save(*run(0))
        with pytest.warns(RuntimeWarning, match="not what is kept of this model"):
            assert files.load(key(0), lambda *_, given=wrong: given) is None
        assert files.keys() == set()


def test_another_salt_has_other_files(files: PrefixFiles) -> None:
    other = PrefixFiles(files.directory, None, b"model, float32")
    assert files.save(*run(0))
    assert other.keys() == set()
    assert other.load(key(0)) is None
    keys, ids, tensors = run(0)
    assert other.save(keys, ids, {name: array(9, 64) for name in tensors})
    assert same(files.load(key(0)), 0)
    assert not same(other.load(key(0)), 0)
    other.clear()
    assert other.keys() == set()
    assert files.keys() == {key(0)}
    assert len(names(files.directory)) == 1


def test_file_of_another_version_is_left_alone(files: PrefixFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_files, "FORMAT", "ballonet prefix 999")
    assert files.save(*run(0))
    monkeypatch.undo()
    fresh = PrefixFiles(files.directory, None, SALT)
    assert fresh.keys() == set()
    assert fresh.load(key(0)) is None
    assert files.load(key(0)) is None, "nor is it used by one who knew it"
    assert fresh.nbytes() > 0, "it counts"
    assert len(names(files.directory)) == 1


@pytest.mark.parametrize(
    ("keys", "tensors", "says"),
    [
        ([key(0)], {prefix_files.IDS: array(0, 8)}, "no tensor may be called"),
        ([key(0)], {"__metadata__": array(0, 8)}, "no tensor may be called"),
        ([key(0)], {"a": Array("BF16", (4,), memoryview(bytearray(9)))}, "the bytes 8 to 17"),
        ([], {}, "there have to be keys"),
    ],
    ids=range(4),
)
def test_save_of_impossible_tensors_is_refused(
    files: PrefixFiles, keys: list[bytes], tensors: dict[str, Array], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        files.save(keys, [1] * len(keys), tensors)
    assert names(files.directory) == []


# -- damage


def whole(nbytes: int = 24) -> bytes:
    """A file as it is written."""
    part = StoredPart(SALT, b"", (key(0), key(1)))
    fd = os.memfd_create("prefix")
    try:
        prefix_files.write(fd, prefix_files.packed(part, range(2 * BLOCK), run(0, nbytes=nbytes)[2]))
        return os.pread(fd, 2**20, 0)
    finally:
        os.close(fd)


def content(data: bytes) -> tuple[object, ...] | None:
    """What is read of a file of these bytes; None where it is refused."""
    fd = os.memfd_create("prefix")
    try:
        os.pwrite(fd, data, 0)
        entry = prefix_files.read("", fd)
        return entry.part, list(entry.ids), arrays(entry)
    except (PrefixDamaged, OtherFormat):
        return None
    finally:
        os.close(fd)


def test_a_file_that_is_cut_or_has_any_bit_flipped_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_files, "PIECE", 160)  # several of them
    data = whole()
    assert content(data) is not None
    assert all(content(data[:length]) is None for length in range(len(data)))
    assert content(data + b"\0") is None
    for place in range(len(data)):
        flipped = bytes([data[place] ^ 1 << place % 8])
        assert content(data[:place] + flipped + data[place + 1 :]) is None, place


@pytest.mark.parametrize(
    "damage", [lambda data: data[:100], lambda data: data[:-1], lambda data: data[:-40] + b"?" + data[-39:]]
)
def test_a_damaged_file_is_said_removed_and_written_again(files: PrefixFiles, damage: Callable[[bytes], bytes]) -> None:
    assert files.save(*run(0))
    path = only(files.directory)
    path.write_bytes(damage(path.read_bytes()))
    for store in (files, PrefixFiles(files.directory, None, SALT)):
        if path.exists():
            with pytest.warns(RuntimeWarning, match=r"is damaged: .*\. It is not used, and was removed"):
                assert store.load(key(0)) is None
        assert store.load(key(0)) is None
        assert store.keys() == set()
    assert names(files.directory) == []
    assert files.save(*run(0))
    assert same(files.load(key(0)), 0)


def test_a_damaged_file_that_cannot_be_removed_is_said_once(
    files: PrefixFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other files of a folder that may only be read are read."""
    assert files.save(*run(0))
    path = only(files.directory)
    path.write_bytes(path.read_bytes()[:-1])
    assert files.save(*run(1))
    for step in ("utime", "unlink", "replace"):
        monkeypatch.setattr(os, step, failing(errno.EROFS))
    for tick in (0, 10**19):  # what is remembered of the folder is believed, or not
        monkeypatch.setattr(prefix_files, "TICK", tick)
        fresh = PrefixFiles(files.directory, None, SALT)
        with pytest.warns(RuntimeWarning, match="is left alone, as it cannot be removed"):
            assert fresh.load(key(0)) is None
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert fresh.keys() == {key(1)}
            assert fresh.load(key(0)) is None
            assert same(fresh.load(key(1)), 1)
    monkeypatch.undo()
    assert path.exists()
    assert fresh.save(*run(0))
    assert same(fresh.load(key(0)), 0), "the one that took its place is used"


@pytest.mark.parametrize("part", [StoredPart(SALT, b"", (key(1),)), StoredPart(b"model, float32", b"", (key(0),))])
def test_a_file_that_says_it_holds_something_else_is_refused(files: PrefixFiles, part: StoredPart) -> None:
    """Blocks with other keys, or of another model."""
    assert files.save(*run(0))
    path = only(files.directory)
    assert PrefixFiles(files.directory, None, part.salt).save(part.keys, *run(0)[1:])
    path.write_bytes((files.directory / prefix_files._name(part)).read_bytes())
    with pytest.warns(RuntimeWarning, match="does not hold what it seemed to hold"):
        assert files.load(key(0)) is None


def test_only_files_of_this_kind_are_ever_touched(tmp_path: Path) -> None:
    others = {
        "model.safetensors": b"weights of somebody",
        "prefix-1.safetensors": b"?",
        f"prefix-{'0' * 32}.bin": b"?",
        ".prefix.part": b"?",
    }
    for name, data in others.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / f"prefix-{'1' * 32}.safetensors").symlink_to("model.safetensors")
    (tmp_path / f"prefix-{'2' * 32}.safetensors").mkdir()
    files = PrefixFiles(tmp_path, 2000, SALT)
    for number in range(9):
        files.save(*run(number))
    files.clear()
    assert {name: (tmp_path / name).read_bytes() for name in others} == others
    assert len(names(tmp_path)) == len(others) + 2


# -- who dies, and when


def failing(number: int) -> Callable[..., Any]:
    """A function of `os` that fails with this error."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


CRASH = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from ballonet.offload.policy.tuning import DEFAULT
from ballonet.offload.residency import prefix_files
from ballonet.offload.residency.prefix_files import Array
folder, steps = Path(sys.argv[1]), ("open", "pwrite", "fsync", "replace", "utime", "unlink", "close", "fstat")
real = {step: getattr(os, step) for step in steps}

def die_at(number):
    calls = iter(range(number))
    def stepping(step):
        def call(*arguments, **more):
            if next(calls, None) is None:
                os._exit(3)
            if step == "pwrite":  # half of it only, then the next call
                arguments = (arguments[0], arguments[1][: -(-len(arguments[1]) // 2)], *arguments[2:])
            return real[step](*arguments, **more)
        return call
    for step in steps:
        setattr(os, step, stepping(step))

number = 0
while True:
    child = os.fork()
    if not child:
        files = prefix_files.PrefixFiles(folder / str(number), 1200, b"salt")
        assert files.save([b"old"], [1], {"a": Array("U8", (400,), memoryview(bytes(400)))})
        die_at(number)
        assert files.save([b"new"], [2], {"a": Array("U8", (400,), memoryview(b"n" * 400))})
        os._exit(0)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0:
        break
    number += 1
print(number)
"""


def test_whenever_a_writer_dies_there_is_a_whole_file_or_none(tmp_path: Path) -> None:
    """After any system call of it. What it left aside is removed by whoever comes next."""
    source = str(Path(prefix_files.__file__).parents[3])
    command = [sys.executable, "-c", CRASH, str(tmp_path), source]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    left, seen = 0, []
    for number in range(int(done.stdout) + 1):
        folder = tmp_path / str(number)
        left += len([name for name in names(folder) if name.endswith(".part")])
        files = PrefixFiles(folder, 1200, b"salt")
        seen.append(keys := files.keys())
        assert keys in ({b"old"}, {b"new"}, set()), number
        for key in keys:
            saved = files.load(key)
            assert saved is not None
            assert bytes(saved.tensors["a"].data) == {b"old": bytes(400), b"new": b"n" * 400}[key]
        assert len(names(folder)) == len(keys), "nothing is left aside"
    assert left > 3, "some died in the middle"
    assert seen[-1] == {b"new"}
    assert {b"old"} in seen


def test_everything_is_durable_before_it_has_its_name(files: PrefixFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def noted(step: str, told: Callable[..., str]) -> None:
        real = getattr(os, step)

        def call(*arguments: Any, **more: Any) -> Any:
            done.append(told(*arguments))
            return real(*arguments, **more)

        monkeypatch.setattr(os, step, call)

    noted("pwrite", lambda *_: "write")
    noted("replace", lambda *_: "rename")
    noted("fsync", lambda fd: "sync " + ("folder" if os.path.isdir(f"/proc/self/fd/{fd}") else "file"))
    assert files.save(*run(0))
    assert [step for step in done if step != "write"] == ["sync file", "rename", "sync folder"]
    assert "write" not in done[done.index("sync file") :]


def test_a_file_that_is_being_written_is_left_to_its_writer(
    files: PrefixFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    real = os.fsync

    def slow(fd: int) -> None:
        begun.set()
        assert go_on.wait(600)
        real(fd)

    monkeypatch.setattr(os, "fsync", slow)
    writer = threading.Thread(target=files.save, args=run(0))
    writer.start()
    try:
        assert begun.wait(600)
        assert len(names(files.directory)) == 1
        assert PrefixFiles(files.directory, 10, SALT).keys() == set()
        assert len(names(files.directory)) == 1
    finally:
        go_on.set()
        writer.join()
    assert same(PrefixFiles(files.directory, None, SALT).load(key(0)), 0)


def test_a_new_file_that_was_taken_for_a_dead_writer_s_is_made_again(
    files: PrefixFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, taken = prefix_files.fcntl.flock, iter([True])

    def late(fd: int, how: int) -> None:
        if next(taken, False):
            only(files.directory).unlink()
        real(fd, how)

    monkeypatch.setattr(prefix_files.fcntl, "flock", late)
    assert files.save(*run(0))
    assert same(files.load(key(0)), 0)


# -- a folder that cannot be used


@pytest.mark.parametrize("step", ["open", "pwrite", "fsync", "replace"])
def test_a_folder_that_cannot_be_written_to_is_said_once_and_tried_again_later(
    files: PrefixFiles, clock: Clock, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    assert files.save(*run(0))
    real, fail = getattr(os, step), failing(errno.ENOSPC)
    writes = lambda *given: step != "open" or bool(given[1] & os.O_CREAT)  # noqa: E731
    monkeypatch.setattr(os, step, lambda *given, **more: (fail if writes(*given) else real)(*given, **more))
    with pytest.warns(RuntimeWarning, match="not stored in .* for now .*: what is there is still used") as said:
        assert not files.save(*run(1))
    assert len(said) == 1
    assert len(names(files.directory)) == 1, "nothing is left aside"
    monkeypatch.undo()
    assert not files.save(*run(2)), "not at once"
    assert files.keys() == {key(0)}
    assert same(files.load(key(0)), 0)
    clock.now += DEFAULT.prefixes.rest
    assert files.save(*run(2)), "there is room again"
    assert files.keys() == {key(0), key(2)}


def test_a_folder_that_is_none_or_that_goes_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.warns(RuntimeWarning, match="not stored in"):
        files = PrefixFiles(tmp_path / "file", None, SALT)
    assert files.keys() == set()
    assert not files.save(*run(0))
    assert (tmp_path / "file").read_text() == "mine"

    files = PrefixFiles(tmp_path / "deep" / "folder", None, SALT)
    assert files.save(*run(0))
    for path in files.directory.iterdir():
        path.unlink()
    files.directory.rmdir()
    assert files.keys() == set()
    assert files.load(key(0)) is None
    with pytest.warns(RuntimeWarning, match="not stored in"):
        assert not files.save(*run(0))


def test_a_disk_that_fails_is_said_once(files: PrefixFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    assert files.save(*run(0))
    monkeypatch.setattr(os, "preadv", failing(errno.EIO))
    with pytest.warns(RuntimeWarning, match="cannot be read: Input/output error"):
        assert files.load(key(0)) is None
    monkeypatch.undo()
    assert files.load(key(0)) is None
    assert len(names(files.directory)) == 1
    assert same(PrefixFiles(files.directory, None, SALT).load(key(0)), 0)


# -- more than one at once


@pytest.mark.parametrize(("when", "found"), [((prefix_files, "_opened"), False), ((prefix_files, "read"), True)])
def test_a_file_that_vanishes_is_a_miss(
    files: PrefixFiles, monkeypatch: pytest.MonkeyPatch, when: tuple[Any, str], found: bool
) -> None:
    """Who has it open has all of it."""
    assert files.save(*run(0))
    path, real = only(files.directory), getattr(*when)

    def vanishing(*given: Any) -> Any:
        path.unlink(missing_ok=True)
        return real(*given)

    monkeypatch.setattr(*when, vanishing)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        saved = files.load(key(0))
    assert same(saved, 0) if found else saved is None
    monkeypatch.undo()
    assert files.load(key(0)) is None
    assert files.keys() == set()


@pytest.mark.parametrize("later", [False, True])
def test_file_another_process_writes_is_seen(files: PrefixFiles, monkeypatch: pytest.MonkeyPatch, later: bool) -> None:
    """In the same tick of the clock, too."""
    monkeypatch.setattr(prefix_files, "TICK", 10**9 if later else 10**19)
    other = PrefixFiles(files.directory, None, SALT)
    os.utime(files.directory, (1000, 1000))
    assert files.keys() == set()
    assert other.save(*run(0))
    if not later:
        os.utime(files.directory, (1000, 1000))
    assert files.keys() == {key(0)}


def test_the_limit_is_kept_where_another_writes_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = size_of_one(tmp_path)
    files, other = (PrefixFiles(tmp_path / "shared", 2 * one, SALT) for _ in range(2))
    assert files.save(*run(0))
    real, turns = prefix_files.write, iter([True])

    def both(fd: int, packing: Any) -> None:
        if next(turns, False):
            assert other.save(*run(1))
        real(fd, packing)

    monkeypatch.setattr(prefix_files, "write", both)
    assert files.save(*run(2))
    assert files.keys() == {key(1), key(2)}


# -- the limit


def test_the_limit_is_kept_and_what_was_used_last_stays(tmp_path: Path) -> None:
    one = size_of_one(tmp_path)
    files = PrefixFiles(tmp_path / "limited", 3 * one, SALT)
    for number in range(3):
        assert files.save(*run(number))
    assert same(files.load(key(0)), 0)
    other = PrefixFiles(tmp_path / "limited", 3 * one, SALT)
    os.utime(files.directory, (1000, 1000))  # so that what is remembered of it is believed
    assert len(files.keys()) == 3
    assert same(other.load(key(1)), 1)
    assert files.save(*run(3))
    assert files.keys() == {key(0), key(1), key(3)}, "a use by another counts"
    assert files.nbytes() <= 3 * one
    assert not PrefixFiles(tmp_path / "limited", one - 1, SALT).save(*run(5))
    assert files.keys() == {key(0), key(1), key(3)}, "nothing goes for what does not fit anyway"


def test_continued_file_stays_with_those_that_continue_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = PrefixFiles(tmp_path / "limited", 3 * size_of_one(tmp_path, key(99)), SALT)
    assert files.save(*run(0))
    assert files.save(*run(1), after=key(0))
    assert files.save(*run(10))
    assert files.save(*run(2), after=key(1))
    assert files.keys() == {key(0), key(1), key(2)}, "0 is as new as 2, which continues it"
    monkeypatch.setattr(prefix_files.PrefixFiles, "_write", lambda *_: pytest.fail("it was written"))
    assert not files.save(*run(3), after=key(2)), "there is no room but that of what it continues"
    assert files.keys() == {key(0), key(1), key(2)}


def stored(tree: list[tuple[int, int, int]]) -> Iterator[Stored]:
    """Files of one block each; each continues an earlier one, or none. (which, bytes, last use)."""
    for number, (which, nbytes, used) in enumerate(tree):
        after = key(which % number) if number and which % 3 else b""
        yield Stored(f"{number}", number, nbytes, used, StoredPart(SALT, after, (key(number),)))


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9), st.integers(0, 5)), max_size=12),
    st.integers(-3, 60),
    st.integers(0, 12),
)
def test_leaving_files_are_enough_oldest_and_never_continued(
    tree: list[tuple[int, int, int]], excess: int, coming: int
) -> None:
    files = list(stored(tree))
    kept = {file.name for file in before(files, StoredPart(SALT, key(coming), (key(100),)))}
    gone = leaving(files, excess, kept)
    if gone is None:
        assert sum(file.nbytes for file in files if file.name not in kept) < excess
        return
    assert sum(file.nbytes for file in gone) >= max(0, excess)
    assert sum(file.nbytes for file in gone[:-1]) < max(1, excess), "and no more than that"
    assert not kept & {file.name for file in gone}
    left = [file for file in files if file not in gone]
    for later in left:
        assert later.part is not None
        assert not [other for other in before(files, later.part) if other in gone], "it continues what is gone"

    def last(file: Stored) -> int:
        """Use of it and of all that continue it: brute force."""
        continued = (other for other in files if other.part is not None and file in before(files, other.part))
        return max([file.used, *(other.used for other in continued)])

    if gone:
        assert max(map(last, gone)) <= min((last(file) for file in left if file.name not in kept), default=9)


def test_files_that_continue_each_other_in_a_circle_end() -> None:
    parts = [StoredPart(SALT, key(1), (key(0),)), StoredPart(SALT, key(0), (key(1),))]
    files = [Stored(f"{n}", n, 1, n, part) for n, part in enumerate(parts)]
    gone = leaving(files, 2)
    assert gone is not None
    assert {file.name for file in gone} == {"0", "1"}
