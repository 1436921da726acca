"""Who is admitted as a replica: what is said at the door, and decided, without I/O.

Note [At the door]
    Who wants to join says hello with a nonce. The supervisor answers with one of its own and a proof that it knows the
    secret for both. The other proves the same, with its fingerprint in the proof, so neither number can be used again.
    Only then is the fingerprint compared, and a number given, which nobody had before. What is no such message is not
    answered; what was begun and is not gone on with is forgotten.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from .errors import JoinRefused, OtherModel, SecretRefused
from .fingerprint import Fingerprint
from .secret import nonce, proof, proves

JOIN_QUEUE: Final = "door"  # the supervisor's queue
_SECRET: Final = "secret"
_MODEL: Final = "model"


@dataclass(frozen=True, slots=True)
class Reply:
    """What the supervisor says to the queue of one who joins. `admitted`: its number, and what it runs."""

    queue: str
    text: str
    admitted: tuple[int, Fingerprint] | None = None


@dataclass(slots=True)
class AdmissionServer:
    """The supervisor's side. `served`: what all have to run; None: what the first one who joins does. `within`: seconds
    of the clock that a joiner has to answer."""

    secret: str
    served: Fingerprint | None
    clock: Callable[[], float]
    within: float
    ignored: int = 0  # texts that were no message of a joiner
    refused: int = 0
    _asked: dict[str, tuple[str, float]] = field(default_factory=dict)  # by who asks: our nonce, and until when
    _next: int = 0

    def on(self, text: str) -> Reply | None:
        """What is answered to a text that came to the door; None: nothing."""
        now = self.clock()
        self._asked = {who: (said, until) for who, (said, until) in self._asked.items() if until > now}
        try:
            said = json.loads(text)
            who = said["hello"]
            if not isinstance(who, str) or not who.isalnum():
                raise ValueError(who)
            return self._prove(who) if "proof" not in said else self._judge(who, said)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            self.ignored += 1
            return None

    def _prove(self, who: str) -> Reply:
        mine = nonce()
        self._asked[who] = mine, self.clock() + self.within
        return _reply(who, nonce=mine, proof=proof(self.secret, "supervisor", who, mine))

    def _judge(self, who: str, said: dict[str, Any]) -> Reply:
        mine, _ = self._asked.pop(who, ("", 0.0))
        text = str(said["fingerprint"])
        if not mine or not proves(str(said["proof"]), self.secret, "replica", who, mine, text):
            self.refused += 1
            return _reply(who, refused=_SECRET)
        found = Fingerprint.decode(text)
        if self.served is None:
            self.served = found
        if differences := self.served.differences(found):
            self.refused += 1
            return _reply(who, refused=_MODEL, differences=differences)
        number, self._next = self._next, self._next + 1
        reply = _reply(who, member=number, proof=proof(self.secret, "admitted", who, str(number)))
        return Reply(reply.queue, reply.text, (number, found))


@dataclass(slots=True)
class AdmissionClient:
    """The side of one who joins. `secret`: None if it has none."""

    secret: str | None
    fingerprint: Fingerprint
    who: str = field(default_factory=nonce)

    @property
    def queue(self) -> str:
        """Where it is answered."""
        return _queue(self.who)

    def hello(self) -> str:
        """The first thing that is said. SecretRefused: there is no secret."""
        if not self.secret:
            raise SecretRefused("a supervisor admits only who knows its secret, and none was given: give the same one")
        return json.dumps({"hello": self.who})

    def prove(self, text: str) -> str:
        """What is said to the first answer. SecretRefused: it is not of a supervisor with this secret."""
        said = json.loads(text)
        theirs, claimed = str(said.get("nonce", "")), str(said.get("proof", ""))
        if not proves(claimed, self.secret or "", "supervisor", self.who, theirs):
            raise SecretRefused(
                "the supervisor has another secret than this replica: give both the same one, or another address"
            )
        mine = self.fingerprint.encode()
        return json.dumps(
            {
                "hello": self.who,
                "fingerprint": mine,
                "proof": proof(self.secret or "", "replica", self.who, theirs, mine),
            }
        )

    def member(self, text: str) -> int:
        """The number that the second answer gives. OtherModel, SecretRefused, JoinRefused."""
        said = json.loads(text)
        if said.get("refused") == _SECRET:
            raise SecretRefused("the supervisor does not accept this replica's proof, or it came too late: try again")
        if said.get("refused") == _MODEL:
            raise OtherModel(tuple(map(str, said.get("differences", ()))))
        number = said.get("member")
        if not proves(str(said.get("proof", "")), self.secret or "", "admitted", self.who, str(number)):
            raise JoinRefused("what answered is not the supervisor: see who else reaches its port")
        return int(number)


def _queue(who: str) -> str:
    return f"{JOIN_QUEUE}/{who}"


def _reply(who: str, **said: object) -> Reply:
    return Reply(_queue(who), json.dumps(said))
