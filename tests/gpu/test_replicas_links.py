"""Links between processes that have a GPU, and replicas of one server on it: the same bytes and tokens as without.

Two processes on one GPU use gloo, with memory of the host between; where there are two GPUs they use NCCL.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("msgspec", reason="ballonet[replicas] is not installed")

from ballonet.hooks.replicas.channel import Wakeup
from ballonet.hooks.replicas.link import Link
from ballonet.hooks.replicas.pair import LinkGpu, NcclConnect, Store, gpu_name, stream_of

pytest.importorskip("uvicorn", reason="ballonet[serve] is not installed")

from ..replicas.fleet import Program, Stock, drawn

SECONDS = 120.0
pytestmark = pytest.mark.gpu


def sent(device: torch.device) -> list[torch.Tensor]:
    """Tensors of all kinds of sizes, one of them with gaps."""
    torch.manual_seed(0)
    tensors = [torch.randn(257, 4096).bfloat16(), torch.randn(64, 64)[:, ::2], torch.arange(5), torch.zeros(0)]
    return [tensor.to(device) for tensor in tensors]


def ended(store: Store, me: int, peer: int, device: torch.device) -> Link:
    gpu = LinkGpu(gpu_name(device), device, stream_of(device), SECONDS)
    return Link(NcclConnect(store, 1, me, peer, SECONDS, gpu), 1, peer, Wakeup(), device=device)


def other(name: str, port: int) -> None:
    """Sends back what comes, while the device has much else to do."""
    device = torch.device(name)
    link = ended(Store.connect("127.0.0.1", port, timeout=SECONDS), 2, 1, device)
    much = torch.randn(2048, 2048, device=device)
    for _ in range(len(sent(device))):
        for _ in range(10):
            much = much @ much / 2048
        link.send(link.recv("data", SECONDS), "data")
    assert link.recv("end", SECONDS).item() == 1
    link.close()


@pytest.mark.parametrize("peer", ["cuda:0", "cuda:1"])
def test_tensors_come_back_as_they_were(peer: str) -> None:
    if int(peer[-1]) >= torch.cuda.device_count():
        pytest.skip("NCCL needs a GPU for each replica, and there is one")
    if peer != "cuda:0" and "SIMGPU_HOME" in os.environ:
        pytest.skip("NCCL has kernels of its own, which the simulated device cannot compute")
    device, store = torch.device("cuda:0"), Store.host(timeout=SECONDS)
    spawned = multiprocessing.get_context("spawn")
    process = spawned.Process(target=other, args=(peer, store.port), daemon=True)
    process.start()
    link = ended(store, 1, 2, device)
    try:
        for tensor in sent(device):
            copy = tensor.clone()
            link.send(tensor, "data", urgent=True)
            tensor.zero_()  # what is sent was copied
            received = link.recv("data", SECONDS)
            assert received.device == device
            assert torch.equal(received, copy)
        link.send(torch.ones(1, device=device), "end")
        assert link.direct == (peer != "cuda:0")
        process.join(SECONDS)
        assert process.exitcode == 0
    finally:
        link.close()
        process.kill()


class OnGPU(Program):
    """Two replicas, on one GPU each or on the same one."""

    def start(self, folder: Path, replicas: int, port: int) -> subprocess.Popen[bytes]:
        sizes = ("--budget", "2GiB", "--block-size", "16", "--batch-tokens", "256")
        command = ["-m", "ballonet", "serve", self.model, "--replicas", str(replicas), "--port", str(port), *sizes]
        return subprocess.Popen([sys.executable, *command], stderr=self._said, env=dict(os.environ))


def test_two_replicas_answer_as_stock(tmp_path: Path) -> None:
    server = OnGPU(tmp_path, 2)
    try:
        asked = drawn(8)
        assert server.burst(asked) == Stock(server.model).answers(asked)
        assert server.figure("ballonet_replicas ") == 2
        assert server.end() == 0, server.said()
    finally:
        server.process.kill()
