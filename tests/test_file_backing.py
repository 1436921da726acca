"""Layers that are copied from their file: the right bytes, in few copies, and nothing left behind."""

from __future__ import annotations

import ctypes
import errno
import gc
import itertools
import mmap
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ballonet.allocator import _native
from ballonet.allocator.errors import BallonetError, DriverError, WeightsFileChanged
from ballonet.offload.policy.layout import ALIGNMENT, Block, place
from ballonet.offload.residency.backing import FileBackings, Place, runs
from ballonet.offload.residency.weights_file import FileSpan, WeightsFile

from . import weights
from .contract.driver import ALREADY_REGISTERED, NOT_REGISTERED, READ_ONLY
from .core import PAGE, Core, calls, current_context, eventually, opened
from .faulting import arm, at_each_call
from .programs import run

PIECE = 4 * PAGE


@contextmanager
def twins(path: Path, piece: int = PIECE, **options: int) -> Iterator[tuple[Core, FileBackings, WeightsFile]]:
    with opened(budget=64, **options) as core:
        made = FileBackings(core.device, piece)
        yield core, made, WeightsFile(path)
        made.close()
        assert made.registered == 0


def laid_out(file: WeightsFile, names: Sequence[str]) -> list[Place]:
    """The tensors one after the other, at multiples of 512 bytes."""
    places: list[Place] = []
    end = 0
    for name in names:
        offset = -(-end // ALIGNMENT) * ALIGNMENT
        places.append((offset, file.span(name)))
        end = offset + places[-1][1].nbytes
    return places


def fill(core: Core, parts: list[tuple[int, int, int]]) -> None:
    _native.Transfer(core.device).copy(parts, after=0, owner="weights", to="device").before(0)


def slot(core: Core, pages: int) -> _native.Range:
    made = core.range(pages, "weights")
    made.map(0, pages)
    ctypes.memset(made.address, 0xFF, pages * PAGE)
    return made


def shows(address: int, places: list[Place], path: Path) -> bool:
    data = path.read_bytes()
    return all(
        ctypes.string_at(address + offset, span.nbytes) == data[span.start : span.start + span.nbytes]
        for offset, span in places
    )


LAYER = {"down": 3 * PAGE, "gate": 2 * PAGE, "up": 2 * PAGE, "norm": 256, "k": PAGE, "o": 2 * PAGE, "q": 2 * PAGE}
LARGE = [name for name in LAYER if name != "norm"]


@pytest.mark.parametrize("first", [0, 240, 511])
def test_a_layer_comes_over_in_two_copies_wherever_its_file_s_data_begins(tmp_path: Path, first: int) -> None:
    """In the file's order, the norms between its large weights being elsewhere on the device."""
    path = weights.write(tmp_path / "w", LAYER, first)
    with twins(path, piece=256 * PAGE) as (core, made, file):
        assert file.span("down").start % ALIGNMENT == first
        places = laid_out(file, LARGE)
        there = slot(core, 13)
        twin = made.twin(places)
        parts = twin.parts(there.address)
        assert twin.registered
        assert len(parts) == 2
        assert sum(nbytes for _, _, nbytes in parts) == 12 * PAGE
        fill(core, parts)
        assert shows(there.address, places, path)
        assert core.device.snapshot()["copied"]["weights_h2d"] == 12 * PAGE


def test_a_large_layer_is_cut_where_pieces_meet_and_two_layers_share_one(tmp_path: Path) -> None:
    path = weights.write(tmp_path / "w", {"a": 10 * PAGE, "b": 10 * PAGE, "c": 3 * PAGE, "d": 20 * PAGE}, 200)
    with twins(path) as (core, made, file):
        there = slot(core, 10)
        first, second = (made.twin([(0, file.span(name))]) for name in "ab")
        assert made.registered == 6 * PIECE
        for twin, name in ((first, "a"), (second, "b"), (first, "a")):
            parts = twin.parts(there.address)
            assert len(parts) == 3 + (name == "b")
            fill(core, parts)
            assert shows(there.address, [(0, file.span(name))], path)
        registered = calls()["cuMemHostRegister"]
        made.twin([(0, file.span("a"))])
        assert calls()["cuMemHostRegister"] == registered
        made.twin([(0, WeightsFile(path).span("a"))])  # whoever has opened it again
        assert calls()["cuMemHostRegister"] == registered
        made.twin([(0, file.span("d"))])  # up to the last byte of the file
        assert made.registered == 5 * PIECE + 6 * PIECE - (-file.nbytes % PIECE)


def test_a_layer_may_lie_in_several_files(tmp_path: Path) -> None:
    paths = [weights.write(tmp_path / f"w{n}", {"a": 2 * PAGE, "b": PAGE}, 16 * n) for n in range(3)]
    with opened(budget=64) as core:
        made = FileBackings(core.device, PIECE)
        files = [WeightsFile(path) for path in paths]
        places = [(n * 4 * PAGE, file.span("a")) for n, file in enumerate(files)]
        there = slot(core, 12)
        twin = made.twin(places)
        assert twin.files == tuple(files)
        fill(core, twin.parts(there.address))
        for offset, span in places:
            assert shows(there.address, [(offset, span)], Path(span.file.path))
        os.truncate(paths[1], 100)
        with pytest.raises(WeightsFileChanged, match="w1"):
            twin.parts(there.address)
        made.close()


# -- which copies ------------------------------------------------------------------------------------------------------


@given(st.data())
def test_copies_bring_every_byte_to_its_place_and_none_elsewhere(data: st.DataObject) -> None:
    """Against a copy byte by byte; and no two of them could have been one."""
    piece = data.draw(st.sampled_from([1024, 4096]))
    sizes = data.draw(st.lists(st.sampled_from([1, 40, 512, 700, 1024, 2048]), min_size=1, max_size=8))
    starts, reached = [], data.draw(st.integers(0, 600))
    for size in sizes:
        starts.append(reached)
        reached += size
    content = bytes(i * 31 % 256 for i in range(reached))
    file: WeightsFile = object.__new__(WeightsFile)
    order = data.draw(st.permutations(range(len(sizes))))
    layout = place((Block(n, sizes[n]) for n in order), 4096).ranges[0]
    spans = {n: FileSpan(file, starts[n], sizes[n]) for n in order}
    chosen = [
        placement for placement in layout.placements if data.draw(st.integers(0, 5))
    ]  # a few have no twin in the file
    places = [(part.offset, spans[part.block.key]) for part in chosen]
    copies = runs(places, piece)

    target = [-1] * (layout.nbytes + 4096)
    for copy in copies:
        assert copy.start // piece == (copy.start + copy.nbytes - 1) // piece
        for i in range(copy.nbytes):
            assert target[copy.offset + i] == -1, "brought twice"
            target[copy.offset + i] = content[copy.start + i]
    for offset, span in places:
        assert target[offset : offset + span.nbytes] == list(content[span.start : span.start + span.nbytes])
    for placement in layout.placements:
        if placement not in chosen:
            assert set(target[placement.offset : placement.end]) == {-1}, "it would be overwritten"
    for left, right in itertools.pairwise(copies):
        beside = right.offset == left.offset + left.nbytes and right.start == left.start + left.nbytes
        assert not beside or right.start % piece == 0


def test_bytes_between_decide_whether_neighbours_are_one_copy(tmp_path: Path) -> None:
    """Equally far apart on both sides they are: over padding they come together, over a tensor of others not."""
    paths = [weights.write(tmp_path / f"w{n}", {"a": 700, "small": 324, "b": 512, "c": 512}) for n in range(2)]
    one, other = (WeightsFile(path) for path in paths)
    a, b, c = (one.span(name) for name in "abc")
    assert [(run.offset, run.nbytes) for run in runs([(0, a), (1024, b), (1536, c)], 2**20)] == [(0, 2048)]
    assert [(run.offset, run.nbytes) for run in runs([(0, a), (1536, c)], 2**20)] == [(0, 700), (1536, 512)]
    assert len(runs([(0, a), (1024, b), (2048, c)], 2**20)) == 2
    assert [run.file for run in runs([(0, b), (512, other.span("c"))], 2**20)] == [one, other]


def test_places_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    path = weights.write(tmp_path / "w", {"a": 1024, "b": 1024})
    with twins(path) as (_, made, file):
        with pytest.raises(ValueError, match="no multiple of 512"):
            made.twin([(96, file.span("a"))])
        with pytest.raises(ValueError, match="overlap"):
            made.twin([(0, file.span("a")), (512, file.span("b"))])
        with pytest.raises(ValueError, match="no multiple of 512"):
            made.twin([(0, file.span("a"))]).parts(4096 + 256)


# -- what is registered ------------------------------------------------------------------------------------------------


def registrations() -> int:
    return calls()["cuMemHostRegister"] - calls()["cuMemHostUnregister"]


@pytest.mark.parametrize("nth", [1, 2, 3, 5])
def test_where_registering_fails_nothing_stays_registered_and_the_reason_is_told(tmp_path: Path, nth: int) -> None:
    path = weights.write(tmp_path / "w", {"a": 10 * PAGE, "b": 20 * PAGE}, 200)
    with twins(path) as (core, made, file):
        before = registrations()
        arm("cuMemHostRegister", nth)
        made.twin([(0, file.span("a"))]) if nth > 3 else None
        kept = made.registered
        twin = made.twin([(0, file.span("b" if nth > 3 else "a"))])
        assert not twin.registered
        assert "cuMemHostRegister failed with CUDA_ERROR_OPERATING_SYSTEM" in twin.reason
        assert twin.parts(0) == []
        assert made.registered == kept
        assert registrations() == before + kept // PIECE + 1  # the call that failed is one too
        again = made.twin([(0, file.span("b"))])
        assert again.registered
        there = slot(core, 20)
        fill(core, again.parts(there.address))
        assert shows(there.address, [(0, file.span("b"))], path)


def test_a_file_that_cannot_be_mapped_is_no_twin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENODEV, "no such device")

    path = weights.write(tmp_path / "w", {"a": PAGE})
    with twins(path) as (_, made, file):
        with monkeypatch.context() as patch:
            patch.setattr(mmap, "mmap", refuse)
            twin = made.twin([(0, file.span("a"))])
        assert not twin.registered
        assert "cannot be mapped" in twin.reason
        assert made.twin([(0, file.span("a"))]).registered


def test_a_failure_at_any_call_is_survived(tmp_path: Path) -> None:
    path = weights.write(tmp_path / "w", {"a": 10 * PAGE})

    def use(scene: tuple[Core, FileBackings, WeightsFile]) -> bool:
        core, made, file = scene
        there = slot(core, 10)
        twin = made.twin([(0, file.span("a"))])
        if twin.registered:
            fill(core, twin.parts(there.address))
            assert shows(there.address, [(0, file.span("a"))], path)
        made.close()
        return twin.registered

    for scene, _ in at_each_call(lambda: twins(path), use):
        assert use(scene)


def test_dropped_twin_is_unregistered_even_where_the_driver_refuses_once(tmp_path: Path) -> None:
    path = weights.write(tmp_path / "w", {"a": 10 * PAGE})
    with opened() as core:
        made = FileBackings(core.device, PIECE)
        twin = made.twin([(0, WeightsFile(path).span("a"))])
        (first, *_) = [source for _, source, _ in twin.parts(0)]
        arm("cuMemHostUnregister", 2)
        del made
        gc.collect()
        with current_context() as driver:
            assert driver.result("cuMemHostUnregister", first // PAGE * PAGE) == NOT_REGISTERED
        del twin
        gc.collect()
        assert str(path) not in Path("/proc/self/maps").read_text()


def test_closing_waits_for_a_copy_that_is_on_its_way(tmp_path: Path) -> None:
    path = weights.write(tmp_path / "w", {"a": 2 * PAGE})
    with twins(path) as (core, made, file), ThreadPoolExecutor(1) as pool:
        there = slot(core, 2)
        parts = made.twin([(0, file.span("a"))]).parts(there.address)
        with core.held_copies():
            done = _native.Transfer(core.device).copy(parts, after=0, owner="weights", to="device")
            assert not done.passed()
            waits = calls()["cuStreamSynchronize"]
            closing = pool.submit(made.close)
            eventually(lambda: closing.done() or calls()["cuStreamSynchronize"] > waits)
            assert not closing.done()
        closing.result()
        assert done.passed()
        done.before(0)
        assert shows(there.address, [(0, file.span("a"))], path)


def test_host_memory_is_checked_and_keeps_what_it_registers(tmp_path: Path) -> None:
    path = weights.write(tmp_path / "w", {"a": 8 * PAGE})
    with opened() as core:
        mapping = WeightsFile(path).mapping
        for offset, nbytes in ((0, len(mapping) + 1), (len(mapping) + 1, 1), (2**63, 2**63)):
            with pytest.raises(BallonetError, match="not all in the buffer"):
                _native.HostMemory(core.device, mapping, offset, nbytes)
        with pytest.raises(BallonetError, match="not one run of bytes"):
            _native.HostMemory(core.device, memoryview(mapping)[::-1], 0, PAGE)
        memory = _native.HostMemory(core.device, mapping, PAGE, 2 * PAGE)
        assert (memory.nbytes, memory.closed) == (2 * PAGE, False)
        with pytest.raises(DriverError) as raised:
            _native.HostMemory(core.device, mapping, 2 * PAGE, PAGE)
        assert raised.value.code == ALREADY_REGISTERED
        with pytest.raises(BufferError):
            mapping.close()
        arm("cuMemHostUnregister")
        with pytest.raises(DriverError):
            memory.close()
        assert not memory.closed
        memory.close()
        memory.close()
        assert memory.closed
        mapping.close()
        with pytest.raises(DriverError):
            _native.HostMemory(core.device, b"", 0, 0)


def test_memory_outlives_the_device(tmp_path: Path) -> None:
    path = weights.write(tmp_path / "w", {"a": PAGE})
    with opened() as core:
        memory = _native.HostMemory(core.device, WeightsFile(path).mapping, 0, PAGE)
        core.device.close()
        with current_context() as driver:
            assert driver.result("cuMemHostRegister", memory.address, PAGE, READ_ONLY) == ALREADY_REGISTERED
            memory.close()
            assert driver.result("cuMemHostUnregister", memory.address) == NOT_REGISTERED


# -- memory ------------------------------------------------------------------------------------------------------------


def anonymous() -> int:
    """Bytes of the process that are no file's."""
    rows = Path("/proc/self/status").read_text().splitlines()
    return next(int(row.split()[1]) * 1024 for row in rows if row.startswith("RssAnon"))


def test_the_file_is_not_copied_into_memory(tmp_path: Path) -> None:
    size = 2**25
    path = weights.write(tmp_path / "w", {"a": size, "b": size}, 96)
    with opened(budget=size // PAGE + 16) as core:
        made = FileBackings(core.device, 2**23)
        file = WeightsFile(path)
        there = slot(core, size // PAGE)
        before = anonymous()
        for name in "abab":
            fill(core, made.twin([(0, file.span(name))]).parts(there.address))
        assert anonymous() - before < 2**22
        assert made.registered == file.nbytes
        assert ctypes.string_at(there.address, size) == path.read_bytes()[-size:]
        made.close()


# -- files that change: each in a process of its own, which a SIGBUS would end -----------------------------------------

SCENE = """
    import sys
    from pathlib import Path
    from ballonet.allocator import _native
    from ballonet.allocator.errors import BallonetError, DriverError, WeightsFileChanged
    from ballonet.offload.residency.backing import FileBackings
    from ballonet.offload.residency.weights_file import WeightsFile
    from tests import weights
    from tests.core import PAGE, opened

    folder = Path(sys.argv[1])

    def use(name, change_at):
        change = weights.CHANGES[name]
        path, steps = weights.write(folder / f"{name}{change_at}", {"a": 10 * PAGE}), iter(range(9))
        def step():
            if next(steps) == change_at:
                change(path)
        with opened(budget=64, link_latency_ns=2_000_000) as core:
            made, there, transfer = FileBackings(core.device, 4 * PAGE), core.range(10), _native.Transfer(core.device)
            there.map(0, 10)
            try:
                step()
                file = WeightsFile(path)
                step()
                twin = made.twin([(0, file.span("a"))])
                step()
                parts = twin.parts(there.address)
                step()
                done = transfer.copy(parts, after=0, owner="weights", to="device")
                step()
                try:
                    done.before(0)
                except DriverError as error:  # on CUDA these pages are pinned, and nothing is said
                    assert "found part of it gone" in str(error), error
                    twin.check()
                    return "missed"
                step()
                twin.check()
                step()
                return "used"
            except BallonetError as error:
                return type(error).__name__
            finally:
                made.close()

    for name in weights.CHANGES:
        print(name, *(use(name, change_at) for change_at in range(8)))
"""


def test_a_change_at_any_moment_is_a_typed_error_and_no_signal(tmp_path: Path) -> None:
    """Before the file is opened it is another file, after its last use it does not matter."""
    lines = run(SCENE, tmp_path).splitlines()
    assert len(lines) == len(weights.CHANGES)
    for line in lines:
        change, first, *rest = line.split()
        assert first == ("used" if change in ("rewritten", "replaced") else "WeightsFileError")
        assert rest == ["WeightsFileChanged"] * 5 + ["used", "used"], change


def test_change_that_nobody_looks_for_is_told_by_the_stand_in(tmp_path: Path) -> None:
    """The copy fails, its destination is poison, and everything works on."""
    path = weights.write(tmp_path / "w", {"a": 10 * PAGE})
    with twins(path) as (core, made, file):
        there = slot(core, 10)
        parts = made.twin([(0, file.span("a"))]).parts(there.address)
        os.truncate(path, 5 * PAGE)
        transfer = _native.Transfer(core.device)
        done = transfer.copy(parts, after=0, owner="weights", to="device")
        with pytest.raises(DriverError, match="found part of it gone"):
            done.before(0)
        assert ctypes.string_at(there.address + 8 * PAGE, PAGE) == b"\xff" * PAGE
        other = ctypes.create_string_buffer(b"o" * PAGE, PAGE)
        transfer.copy([(there.address, ctypes.addressof(other), PAGE)], after=0, owner="weights", to="device").before(0)
        assert ctypes.string_at(there.address, PAGE) == b"o" * PAGE
