"""What is trusted: whose folders and files are used, what another user can do to them, and what is said of it."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from ballonet.__main__ import main
from ballonet.allocator import _native, companion, control, findings, torch_parts, trusted
from ballonet.allocator.config import ledger_dir
from ballonet.allocator.errors import CompanionUnavailable, ControlError, NotTrusted
from ballonet.allocator.shared_ledger import SharedLedger
from ballonet.allocator.torch_parts import TorchBuild, TorchPart
from ballonet.allocator.trusted import TrustedFolder
from ballonet.offload.record import record
from ballonet.offload.residency.prefix_files import PrefixFiles

from .foreign import OTHER, gives_away
from .prefix.test_prefix_files import SALT, key, only, run, same
from .programs import gone, python
from .sharing import share_in

ME = os.getpid()
Spoil = Callable[[Path], None]  # has another user own a file, or be able to write to it
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.fixture
def told() -> Iterator[list[warnings.WarningMessage]]:
    """What is warned of. What was said in tests before is said again."""
    trusted.tell.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught


@pytest.fixture(params=["another's", "writable"])
def spoil(request: pytest.FixtureRequest) -> Spoil:
    if request.param == "writable":
        return lambda path: path.chmod(0o666)
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    return lambda path: os.chown(path, OTHER, OTHER)


def one(told: list[warnings.WarningMessage], *words: str) -> None:
    """What is warned of is one thing, in which these words are."""
    (text,) = (str(warning.message) for warning in told)
    assert all(word in text for word in words), text


# -- folders and files


def test_a_folder_is_made_for_its_user_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        folder = TrustedFolder(tmp_path / "deep" / "folder")
        folder.write("file", b"content")
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder.path / "file").stat().st_mode) == 0o600
    assert (folder.names(), folder.read("file")) == (["file"], b"content")


@pytest.mark.parametrize(
    ("mode", "private", "after"), [(0o777, True, 0o700), (0o755, True, 0o700), (0o777, False, 0o755)]
)
def test_a_folder_of_ours_that_is_wider_is_narrowed_and_that_is_said_once(
    tmp_path: Path, told: list[warnings.WarningMessage], mode: int, private: bool, after: int
) -> None:
    if os.getegid() == os.geteuid() and not private:
        after |= 0o020  # the user's own group
    (tmp_path / "wide").mkdir()
    for _ in range(2):
        (tmp_path / "wide").chmod(mode)
        TrustedFolder(tmp_path / "wide", private=private)
        assert stat.S_IMODE((tmp_path / "wide").stat().st_mode) == after
    one(told, "narrowed to its user")


@pytest.mark.parametrize("how", ["another's", "everybody's", "link"])
def test_a_folder_that_another_user_may_have_made_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    path = tmp_path / "folder"
    if how == "link":
        (tmp_path / "real").mkdir(0o700)
        path.symlink_to(tmp_path / "real")
    else:
        path.mkdir()
        path.chmod(0o1777)
    if how == "another's":
        gives_away(path, monkeypatch)
    mode = path.stat().st_mode
    with pytest.raises(NotTrusted, match=f"{path} is not used, .*BALLONET_TRUST_FOLDER={path}"):
        TrustedFolder(path)
    assert path.stat().st_mode == mode


@pytest.mark.parametrize("how", ["link", "pipe"])
def test_what_is_no_file_is_refused(tmp_path: Path, how: str) -> None:
    folder = TrustedFolder(tmp_path / "folder")
    (tmp_path / "file").write_text("of somebody")
    if how == "link":
        (folder.path / "name").symlink_to(tmp_path / "file")
    else:
        os.mkfifo(folder.path / "name")
    with pytest.raises(NotTrusted, match=r"it is a link|it is no file"):
        folder.read("name")


def test_a_file_that_another_user_may_have_written_is_refused(tmp_path: Path, spoil: Spoil) -> None:
    folder = TrustedFolder(tmp_path / "folder")
    folder.write("name", b"")
    spoil(folder.path / "name")
    with pytest.raises(NotTrusted, match=r"it belongs to user|others can write to it"):
        folder.read("name")


@as_root
def test_the_group_of_the_same_number_may_write_and_no_other(tmp_path: Path) -> None:
    folder = TrustedFolder(tmp_path / "folder")
    folder.write("name", b"content")
    (folder.path / "name").chmod(0o660)
    assert folder.read("name") == b"content"
    os.chown(folder.path / "name", -1, OTHER)
    with pytest.raises(NotTrusted, match="others can write to it"):
        folder.read("name")


def test_what_was_checked_is_used_whatever_has_its_name_by_then(tmp_path: Path) -> None:
    folder = TrustedFolder(tmp_path / "folder")
    folder.write("name", b"checked")
    assert folder.is_in_place
    folder.path.rename(tmp_path / "aside")
    assert not folder.is_in_place
    folder.path.mkdir()
    (folder.path / "name").write_text("exchanged")
    assert not folder.is_in_place
    assert folder.read("name") == (folder.here / "name").read_bytes() == b"checked"


def test_a_volume_of_several_users_is_taken_where_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: list[warnings.WarningMessage]
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real").chmod(0o777)
    (tmp_path / "volume").symlink_to(tmp_path / "real")
    (tmp_path / "real" / "name").write_text("of a friend")
    (tmp_path / "real" / "name").chmod(0o666)
    gives_away(tmp_path / "real", monkeypatch)
    monkeypatch.setenv("BALLONET_TRUST_FOLDER", f"/nowhere:{tmp_path / 'volume'}/")
    assert TrustedFolder(tmp_path / "volume").read("name") == b"of a friend"
    with pytest.raises(NotTrusted):
        TrustedFolder(tmp_path / "real")
    assert not told


def test_a_command_is_told_which_volumes_are_trusted(tmp_path: Path) -> None:
    code = "from ballonet.allocator.config import trust_folders; print(*trust_folders())"
    command = ("run", "--trust-folder", "a", "--trust-folder", "/b", "-c", code)
    done = python("-m", "ballonet", *command, folder=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"{tmp_path / 'a'} /b\n"), done.stderr


# -- the companion


@pytest.fixture(scope="module")
def compiled() -> Path:
    """The companion, compiled before."""
    return companion.build(TrustedFolder(Path(os.environ["BALLONET_CACHE_DIR"]))).path


@pytest.fixture
def compiles(compiled: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path]]:
    """Compiling takes what was compiled before, and is noted."""
    outputs = list[Path]()

    def copy(part: TorchPart, build: TorchBuild, output: Path, begin: Callable[[], None]) -> None:
        torch_parts.required_compiler()
        outputs.append(output)
        shutil.copy(compiled, output)

    monkeypatch.setattr(companion, "compile_part", copy)
    with tempfile.TemporaryDirectory() as name:
        monkeypatch.setattr(companion, "_temporary_folder", lambda: SimpleNamespace(name=name))
        yield outputs


def loaded(folder: Path) -> companion.Companion:
    return companion.load(folder, _native.core_table(), 0)


@pytest.mark.parametrize("wide", [True, False])
def test_a_library_that_another_user_may_have_put_there_is_not_loaded(
    tmp_path: Path, compiled: Path, compiles: list[Path], told: list[warnings.WarningMessage], spoil: Spoil, wide: bool
) -> None:
    """What is loaded instead was compiled in a folder of this process alone, and that is said."""
    folder = tmp_path / "cache"
    folder.mkdir(0o700)
    planted = Path(shutil.copy(compiled, folder / compiled.name))
    planted.chmod(0o666)
    if wide:
        spoil(planted)
        folder.chmod(0o777)
    else:
        spoil(planted)
    library = loaded(folder)
    assert compiles
    assert folder not in library.path.parents
    assert stat.S_IMODE(library.path.parent.stat().st_mode) == 0o700
    assert planted.exists()
    refused = [warning for warning in told if "is not used" in str(warning.message)]
    one(refused, str(planted), "BALLONET_TRUST_FOLDER")


def test_a_cache_folder_of_another_user_is_not_used(
    tmp_path: Path,
    compiled: Path,
    compiles: list[Path],
    told: list[warnings.WarningMessage],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    shutil.copy(compiled, folder)
    folder.chmod(0o777)
    with monkeypatch.context() as patch:
        gives_away(folder, patch)
        for _ in range(2):
            assert findings.load(folder, {}) is None
        with pytest.raises(NotTrusted):
            TrustedFolder(folder)
        if os.geteuid() == 0:
            assert folder not in loaded(folder).path.parents
            assert compiles
    one(told, str(folder), "it belongs to user")
    assert [path.name for path in folder.iterdir()] == [compiled.name]


@pytest.mark.usefixtures("compiles")  # not what a test before has compiled into the folder of this process
def test_without_a_compiler_only_a_trusted_library_is_taken(
    tmp_path: Path, compiled: Path, told: list[warnings.WarningMessage], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "cache"
    folder.mkdir(0o700)
    kept = Path(shutil.copy(compiled, folder))
    monkeypatch.setattr(torch_parts, "COMPILERS", ("no-such-compiler",))
    assert loaded(folder).path == kept
    kept.chmod(0o666)
    with pytest.raises(CompanionUnavailable, match="there is no C\\+\\+ compiler"):
        loaded(folder)
    one(told, str(kept), "others can write to it")


def test_a_library_without_the_companions_function_is_replaced(
    tmp_path: Path, compiled: Path, compiles: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "cache"
    folder.mkdir(0o700)
    command = [str(torch_parts.compiler()), "-shared", "-x", "c++", "/dev/null", "-o", str(folder / compiled.name)]
    subprocess.run(command, check=True)
    with pytest.raises(OSError, match="lacks ballonet_companion_init: it was not compiled from"):
        companion.Companion(companion.build(TrustedFolder(folder)), _native.core_table(), 0)
    assert loaded(folder).path.parent != folder
    assert loaded(folder).path == folder / compiled.name
    assert len(compiles) == 2
    subprocess.run(command, check=True)
    (Path(companion._temporary_folder().name) / compiled.name).unlink()
    monkeypatch.setattr(torch_parts, "COMPILERS", ("no-such-compiler",))
    with pytest.raises(CompanionUnavailable, match="there is no"):
        loaded(folder)


def test_two_libraries_are_not_taken_for_one_another(tmp_path: Path, compiled: Path) -> None:
    """The loader knows a library by the name of the descriptor."""
    folder = TrustedFolder(tmp_path / "cache")
    for number in range(3):
        source = f'extern "C" int number() {{ return {number}; }}'
        output = str(folder.path / f"{number}.so")
        command = [str(torch_parts.compiler()), "-shared", "-fPIC", "-x", "c++", "-", "-o", output]
        subprocess.run(command, input=source, text=True, check=True)
    for _ in range(2):
        names = [f"{number}.so" for number in range(3)]
        libraries = [companion.CompiledPart(folder.path / name, folder.open(name)).load("number") for name in names]
        assert [library.number() for library in libraries] == [0, 1, 2]


# -- what was measured


def test_findings_that_another_user_may_have_written_are_not_used(
    tmp_path: Path, told: list[warnings.WarningMessage], spoil: Spoil
) -> None:
    key = {"device": "a", "memory": "1", "driver": "b"}
    path = findings.save(tmp_path / "cache", key, {"settings": {"graphs": False}, "reasons": {}, "when": "now"})
    assert findings.load(tmp_path / "cache", key) is not None
    spoil(path)
    for _ in range(2):
        assert findings.load(tmp_path / "cache", key) is None
    one(told, str(path))


def test_a_record_that_another_user_may_have_written_is_measured_anew(
    tmp_path: Path, told: list[warnings.WarningMessage], spoil: Spoil
) -> None:
    path, key = tmp_path / "cache" / "record.json", {"model": "m"}
    record.save(record.Record(key, 1e9), path)
    assert record.load(path, key).bandwidth == 1e9
    spoil(path)
    for _ in range(2):
        with pytest.raises(record.Unusable, match="is not trusted"):
            record.load(path, key)
    one(told, str(path))


# -- prefixes


def test_prefixes_that_another_user_may_have_written_are_not_used(
    tmp_path: Path, told: list[warnings.WarningMessage], spoil: Spoil
) -> None:
    files = PrefixFiles(tmp_path / "prefixes", None, SALT)
    assert files.save(*run(0))
    assert same(files.load(key(0)), 0)
    path = only(files.directory)
    spoil(path)
    other = PrefixFiles(files.directory, None, SALT)
    assert other.keys() == set()
    assert other.load(key(0)) is None
    assert files.load(key(0)) is None, "it was looked at before"
    one(told, str(path))
    assert path.exists()


def test_a_folder_of_prefixes_of_another_user_is_neither_read_nor_written(
    tmp_path: Path, told: list[warnings.WarningMessage], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "prefixes"
    assert PrefixFiles(folder, None, SALT).save(*run(0))
    gives_away(folder, monkeypatch)
    files = PrefixFiles(folder, None, SALT)
    assert files.keys() == set()
    assert not files.save(*run(1))
    assert files.load(key(0)) is None
    one(told, str(folder), "it belongs to user")
    assert len(list(folder.iterdir())) == 1


# -- ledgers and sockets


def test_a_ledger_in_a_folder_that_another_user_made_first_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    share_in(tmp_path, monkeypatch)
    ledger_dir().mkdir()
    ledger_dir().chmod(0o777)
    if os.geteuid() == 0:
        os.chown(ledger_dir(), OTHER, OTHER)
    else:
        ledger_dir().rmdir()
        ledger_dir().symlink_to(tmp_path)
    with pytest.raises(NotTrusted):
        SharedLedger("cpu")
    assert main(["budget", "--shared"]) == 1
    assert f"{ledger_dir()} is not used, as another user may have put it there" in capsys.readouterr().err


def test_a_ledger_that_another_user_may_have_written_is_refused(tmp_path: Path, spoil: Spoil) -> None:
    ledger = SharedLedger("cpu", tmp_path / "own")
    ledger.join(ME, 0, 100, 0)
    spoil(ledger.path)
    with pytest.raises(NotTrusted, match=f"{ledger.path} is not used"):
        ledger.raise_to(ME, 10, 10)


@pytest.mark.parametrize("what", ["file", "lock", "folder"])
def test_a_ledger_that_goes_while_it_is_used_is_that_of_all_afterwards(tmp_path: Path, what: str) -> None:
    first, second = (SharedLedger("cpu", tmp_path / "own", patience=60) for _ in range(2))
    first.join(ME, 0, 100, 0)
    if what == "folder":
        shutil.rmtree(first.path.parent)
    else:
        (first.path if what == "file" else first.path.with_suffix(".lock")).unlink()
    if what != "lock":
        assert not second.read().parts
        second.join(ME, 0, 100, 0)
    assert second.raise_to(ME, 60, 10) == 60
    assert first.read().parts[ME].nbytes == 60
    assert first.raise_to(ME, 200, 10) == 100


def test_sockets_of_another_user_and_in_a_folder_of_another_user_stay(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever looks for a process removes what the dead have left, but only where that is ours."""
    own, another = (tmp_path_factory.mktemp("s") for _ in range(2))
    dead = gone()
    left = [own / f"{dead}.sock", another / f"{dead}.sock"]
    for path in left:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(path))
    gives_away(another, monkeypatch)
    gives_away(left[0], monkeypatch)
    with pytest.raises(ControlError):
        control.ask(ME, None, 1, [own, another])
    assert control.listening([own, another]) == []
    assert [path.exists() for path in left] == [True, True]
