"""A fleet on a real Ray: whatever is killed, requests go on, and nobody comes in who has no token.

One Ray serves all pytest workers; the scene of what is left has its own.
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from .. import programs
from .fleet import ENVIRONMENT, Asked, Program, Stock, drawn, free_port, given_costs, text_of, wait, wait_gone

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="pip install 'ballonet[replicas]'")

NOBODY = 65534  # a user that owns nothing
# Starts the Ray, says where it is, and ends it once nobody holds the file any more.
HOLDS = """
import fcntl, json, os, sys
from ballonet.hooks.replicas.ray_node import RayNode
node = RayNode(None, 4, 0, 60.0)
import ray
with open(sys.argv[1] + ".new", "w") as file:
    json.dump([ray.get_runtime_context().gcs_address, os.environ["RAY_AUTH_TOKEN"]], file)
os.rename(file.name, sys.argv[1])
with open(sys.argv[2]) as held:
    fcntl.flock(held, fcntl.LOCK_EX)
    os.unlink(sys.argv[1])
node.close()
"""

# Tries what a user of this machine may try at a Ray, and says what became of it; as another user with modules that are
# imported before, as such a one may not read them
VISITS = """
import contextlib, importlib, json, os, pathlib, sys
address, secret, user, names = json.load(sys.stdin)
for name in names:
    with contextlib.suppress(Exception):  # some are no modules of their own
        importlib.import_module(name)
import ray
if user:
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
try:
    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    outcome = "ran as %d" % ray.get(ray.remote(num_cpus=0)(lambda: os.getuid()).remote())
except BaseException as error:
    outcome = f"{type(error).__name__}: {error}"
def is_small(path):
    return path.is_file() and path.stat().st_size < 2**16
def readable():
    yield from pathlib.Path("/proc").glob("[0-9]*/cmdline")
    yield from pathlib.Path("/proc").glob("[0-9]*/environ")
    for folder in "/tmp", "/dev/shm":
        for place, folders, files in os.walk(folder):
            yield from filter(is_small, (pathlib.Path(place, name) for name in files))
def has_secret(path):
    try:
        with path.open("rb") as file:
            return secret.encode() in file.read()
    except OSError:
        return False
told = {"outcome": outcome, "read in": [str(path) for path in readable() if has_secret(path)]}
print(json.dumps([told, [name for name in sys.modules if name.partition(".")[0] != "__main__"]]))
"""


class Cluster(NamedTuple):
    address: str
    token: str


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    said, held, begun = base / "ray", base / "ray.held", base / "ray.begun"
    with held.open("w") as holding:
        fcntl.flock(holding, fcntl.LOCK_SH)
        with begun.open("a") as first:
            fcntl.flock(first, fcntl.LOCK_EX)
            if not said.exists():
                command = [sys.executable, "-c", HOLDS, str(said), str(held)]
                holder = subprocess.Popen(command, env={**os.environ, **ENVIRONMENT}, start_new_session=True)
                wait(said.exists, holder.poll)
        yield Cluster(*json.loads(said.read_text()))


class OnRay(Program):
    """A server whose replicas are actors. `cluster`: None: a Ray of its own."""

    def __init__(self, folder: Path, replicas: int, cluster: Cluster | None = None) -> None:
        self.cluster = cluster
        super().__init__(folder, replicas)
        self.wait(lambda: "ready: " in self.said())

    def options(self, folder: Path) -> list[str]:
        where = [] if self.cluster is None else ["--ray", self.cluster.address]
        return [*super().options(folder), *given_costs(folder), *where]

    RAY = ()

    def start(self, folder: Path, replicas: int, port: int) -> subprocess.Popen[bytes]:
        """Starts it; not as a fork, whose environment is another's."""
        command = [sys.executable, "-m", "ballonet", "serve", self.model, "--replicas", str(replicas)]
        token = {} if self.cluster is None else {"RAY_AUTH_TOKEN": self.cluster.token}
        return self.popen([*command, "--port", str(port), *self.sizes, *self.options(folder)], **token)

    @property
    def supervisor(self) -> int:
        """The process of the supervisor when it began."""
        return int(re.findall(r"the supervisor is process (\d+)", self.said())[0])


class AnotherFront(OnRay):
    """One more front end of a fleet, which ends with this one."""

    def __init__(self, first: OnRay, said: Path) -> None:
        self.cluster, self.model, port = first.cluster, first.model, free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._said = said.open("w+")
        self.process = self.start(Path(self.model), 2, port)
        self.wait(lambda: "ready: " in self.said())


def killed_in_requests(server: OnRay, process: int) -> None:
    """The answers are those of stock, whatever is killed while they are computed."""
    asked = drawn(12)
    right = Stock(server.model).answers(asked)
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(server.burst, asked)
        server.wait(lambda: server.figure("ballonet_replica_requests") > 0)
        os.kill(process, signal.SIGKILL)
        assert answers.result() == right


@pytest.fixture(scope="module")
def server(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OnRay]:
    on_ray = OnRay(tmp_path_factory.mktemp("model"), 2, cluster)
    try:
        yield on_ray
        assert on_ray.end() == 0, on_ray.said()
        wait_gone([*on_ray.processes(), on_ray.supervisor])
    finally:
        if on_ray.process.poll() is None:
            on_ray.kill()


def test_killed_replica_is_replaced_and_its_requests_go_on(server: OnRay) -> None:
    killed_in_requests(server, server.processes()[0])
    server.wait(lambda: server.figure("ballonet_replicas_replaced_total") and server.figure("ballonet_replicas ") == 2)
    assert "another one is started" in server.said()


def test_killed_supervisor_asks_its_replicas_and_goes_on(server: OnRay) -> None:
    before = server.processes()
    killed_in_requests(server, server.supervisor)
    server.wait(lambda: server.said().count("has joined") >= len(before) + 2)
    assert {*server.processes()[len(before) :]} <= {*before}, "no replica was started again"
    assert "the supervisor was started again" in server.said()


def test_requests_of_a_killed_front_end_are_those_of_another(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    first = OnRay(tmp_path / "model", 2, cluster)
    long = Asked(drawn(1)[0].prompt, 1500)
    with ThreadPoolExecutor(1) as pool:
        broken = pool.submit(named, first, long)
        first.wait(lambda: first.figure("ballonet_replica_requests") > 0)
        signal_all(first.processes(), signal.SIGSTOP)  # else it may have ended before there is another
        first.process.kill()
        assert broken.exception() is not None
    first.process.wait()
    second = AnotherFront(first, tmp_path / "said")
    try:
        assert second.supervisor == first.supervisor
        assert second.figure("ballonet_replica_requests") == 1, "the ledger has it"
        signal_all(first.processes(), signal.SIGCONT)
        second.wait(lambda: named(second, long) == Stock(second.model).answer(long))
        assert "has joined" not in second.said()
        assert second.end() == 0, second.said()
        wait_gone([*first.processes(), first.supervisor])
    finally:
        if second.process.poll() is None:
            second.kill()


def signal_all(processes: list[int], number: signal.Signals) -> None:
    for process in processes:
        os.kill(process, number)


def named(server: OnRay, asked: Asked) -> str:
    """The answer to a request that has a name."""
    import openai

    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=1800)
    completion = client.completions.create(
        model=server.model,
        prompt=text_of(asked),
        max_tokens=asked.new,
        temperature=0,
        extra_headers={"x-request-id": "of a client"},
    )
    return completion.choices[0].text


@pytest.mark.parametrize(
    ("token", "why"), [("", "no token for that"), ("another", "see that it runs, and that the token is its own")]
)
def test_without_the_token_nobody_comes_in(cluster: Cluster, token: str, why: str, tmp_path: Path) -> None:
    variables = {**os.environ, **ENVIRONMENT, "RAY_AUTH_TOKEN": token, "HOME": str(tmp_path)}
    command = ["-m", "ballonet", "serve", "/no/model", "--port", str(free_port()), "--ray", cluster.address]
    done = programs.python(*command, variables=variables)
    assert done.returncode == 1, done.stderr
    assert why in done.stderr


@pytest.mark.skipif(os.getuid() != 0, reason="only root becomes another user")
def test_another_user_of_the_machine_neither_runs_a_task_nor_reads_the_token(cluster: Cluster) -> None:
    def visit(user: int, token: str, imported: list[str]) -> tuple[dict[str, Any], list[str]]:
        at_loopback = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
        variables = {**os.environ, **ENVIRONMENT, **at_loopback, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
        asked = json.dumps([cluster.address, cluster.token, user, imported])
        done = subprocess.run(
            [sys.executable, "-c", VISITS], input=asked, env=variables, stdout=subprocess.PIPE, text=True, check=True
        )
        told, modules = json.loads(done.stdout.splitlines()[-1])
        return told, modules

    own, modules = visit(0, cluster.token, [])
    assert own["outcome"] == "ran as 0"
    assert any(path.endswith("/environ") for path in own["read in"])
    other, _ = visit(NOBODY, "another", modules)
    assert "ran as" not in other["outcome"]
    assert not other["read in"]


def test_killed_server_leaves_no_process_of_its_ray(tmp_path: Path) -> None:
    server = OnRay(tmp_path, 2)
    asked = drawn(4)
    try:
        assert server.burst(asked) == Stock(server.model).answers(asked)
        started = descendants(server.process.pid)
        assert {*server.processes(), server.supervisor} < started
    finally:
        server.process.kill()
        server.process.wait()
    wait_gone([*started])


def descendants(process: int) -> set[int]:
    """The processes that one has started, and those that these have."""
    processes = set[int]()
    for thread in Path(f"/proc/{process}/task").iterdir():
        for child in map(int, (thread / "children").read_text().split()):
            processes |= {child, *descendants(child)}
    return processes


def test_a_front_end_that_was_heard_before_it_asks_for_news_is_there() -> None:
    from ballonet.hooks.replicas.on_ray import _Caller

    caller = _Caller(session=1)
    assert not caller.is_gone(time.monotonic(), patience=600.0)
    assert caller.is_gone(caller.called + 11.0, patience=10.0)
