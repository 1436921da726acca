"""Replicas of one model as actors of Ray: it chooses machines and GPUs, and the replicas do all else among themselves.

    pip install ray
    python examples/serve_on_ray.py MODEL --replicas 4 -- --budget 24GiB
    python examples/serve_on_ray.py MODEL --replicas 2 --gpus 0 -- --budget 2GiB     on CPUs

Starts `ballonet serve MODEL --replicas 0`, which has no weights, on this machine, and an actor for each replica, which
joins it. What comes behind `--` are options of `ballonet serve` for the replicas. Everything ends with the server, at
Ctrl-C; a replica that ends alone takes no answer with it.
"""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import subprocess
import sys
import threading
from typing import Any

SECRET = "BALLONET_REPLICA_SECRET"


class Replica:
    """What runs in an actor: one replica, in the process and on the GPU that Ray gave it."""

    def __init__(self, model: str, server: str, secret: str, options: list[str]) -> None:
        self._command = ["serve", model, "--join", server, *options]
        os.environ[SECRET] = secret

    def serve(self) -> int:
        """Serves until the server ends. Returns the exit code of `ballonet serve`."""
        from ballonet.__main__ import main

        try:
            return main(self._command)
        except SystemExit as ended:
            return int(ended.code or 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a name on the Hugging Face hub, or a folder, on all machines")
    parser.add_argument("--replicas", type=int, default=2, help="(default: %(default)s)")
    parser.add_argument("--gpus", type=float, default=1, help="of each replica (default: %(default)s)")
    parser.add_argument("--address", help="of a Ray cluster; none: one is started on this machine")
    parser.add_argument("--join-port", type=int, default=29400, help="where replicas join (default: %(default)s)")
    parser.add_argument("--silent", default="1s", help="after which a replica is lost (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="where clients ask (default: %(default)s)")
    given = sys.argv[1:]
    own = given.index("--") if "--" in given else len(given)
    options = parser.parse_args(given[:own])
    try:
        import ray
    except ModuleNotFoundError:
        sys.exit("this example places replicas with Ray, which is not installed: pip install ray")
    ray.init(address=options.address)
    where, secret = f"{ray.util.get_node_ip_address()}:{options.join_port}", secrets.token_hex(16)
    with served(options, where, secret) as server:
        place: Any = ray.remote(num_gpus=options.gpus)(Replica)
        actors = [place.remote(options.model, where, secret, given[own + 1 :]) for _ in range(options.replicas)]
        running = [actor.serve.remote() for actor in actors]
        ended: list[Any] = []
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            while server.poll() is None and len(ended) < len(running):
                ended, _ = ray.wait(running, num_returns=len(running), timeout=1.0)
        except KeyboardInterrupt:
            pass
        server.terminate()  # nothing if it has ended
        code = server.wait()
    print(f"the replicas ended with {ray.get(running)}", file=sys.stderr)
    ray.shutdown()
    return code


def served(options: argparse.Namespace, where: str, secret: str) -> subprocess.Popen[str]:
    """The server, as soon as replicas can join. SystemExit where it does not start."""
    command = [sys.executable, "-m", "ballonet", "serve", options.model, "--replicas", "0", "--listen", where]
    environment = {**os.environ, SECRET: secret}
    server = subprocess.Popen(
        [*command, "--port", str(options.port), "--silent", options.silent],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C comes to this program, which tells it
    )
    listens = threading.Event()

    def passed_on() -> None:
        for line in server.stderr or ():
            sys.stderr.write(line)
            if "others join at" in line:
                listens.set()
        listens.set()

    threading.Thread(target=passed_on, daemon=True).start()
    listens.wait()
    if server.poll() is not None:
        sys.exit("the server has ended")
    return server


if __name__ == "__main__":
    sys.exit(main())
