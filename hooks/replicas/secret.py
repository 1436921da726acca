"""A shared secret, and what is believed because of it.

Note [What the secret is for]
    The store has no locks: who reaches its port reads and writes every key. So each message of the control plane
    carries a keyed hash (HMAC-SHA256), and one whose hash is wrong does not exist for who reads it. Who joins proves
    that it knows the secret, and so does the supervisor, by the hash of numbers that the other has just drawn; the
    secret itself is never sent. It keeps out who has joined the wrong supervisor, and who has no business there. It
    does not encrypt: tensors, and messages, can be read by who listens on the network, and who reaches the port can
    delete keys. Between machines it belongs on a network of its own.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import Final

_HASH: Final = hashlib.sha256


def new_secret() -> str:
    """A secret for replicas that are started by the supervisor itself."""
    return secrets.token_hex()


def nonce() -> str:
    """A number that nobody has seen before."""
    return secrets.token_hex(16)


def proof(secret: str, *said: str) -> str:
    """The keyed hash of what was said, its parts told apart."""
    text = b"".join(len(each.encode()).to_bytes(8, "little") + each.encode() for each in said)
    return hmac.new(secret.encode(), text, _HASH).hexdigest()


def proves(claimed: str, secret: str, *said: str) -> bool:
    """Whether who claims this hash knows the secret; takes the same time whatever is wrong with it."""
    return bool(secret) and hmac.compare_digest(claimed.encode(), proof(secret, *said).encode())
