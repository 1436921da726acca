"""What a server answers while its models load."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from .connections import Connections, raise_files
from .ending import Listening


class Anteroom:
    """Answers requests at some sockets with 503 and the progress, on a thread of its own, until `leave()`."""

    def __init__(self, sockets: list[socket.socket], say: Callable[[str], None] = lambda line: None) -> None:
        """`say`: is called with each line of the progress, too."""
        self._progress = "starting"
        self._say = say
        self._sockets = sockets
        self._listening = Listening(self._answer, Connections(raise_files()), lifespan="off")
        served = [listener.dup() for listener in sockets]
        self._thread = threading.Thread(target=self._listening.run, args=[served], daemon=True)
        self._thread.start()

    def say(self, line: str) -> None:
        """Answers with this line from now on."""
        self._progress = line
        self._say(line)

    def leave(self) -> list[socket.socket]:
        """Ends, and returns the sockets. What comes meanwhile waits in them for whoever listens next."""
        self._listening.should_exit = True
        self._thread.join()
        return self._sockets

    def close(self) -> None:
        """Ends, and listens no more."""
        for listener in self.leave():
            listener.close()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = {
            "message": f"not ready yet: {self._progress}",
            "type": "server_error",
            "code": "loading",
            "param": None,
        }
        await JSONResponse({"error": error}, 503, {"retry-after": "5"})(scope, receive, send)
