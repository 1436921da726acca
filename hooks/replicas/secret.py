"""Authentication by a shared secret: keyed hashes of messages.

Note [What the secret is for]
    The store has no access control: any client of its port reads and writes every key. So each message of the control
    plane carries a keyed hash (HMAC-SHA256), and a message with a wrong hash is ignored. A joining replica and the
    supervisor each prove that they know the secret by the hash of a nonce of the other; the secret itself is never
    sent. This keeps out replicas of other supervisors, and strangers. Nothing is encrypted: tensors and messages can be
    read on the network, and any client of the port can delete keys. Between machines, use a private network.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import Final

_HASH: Final = hashlib.sha256


def new_secret() -> str:
    """Returns a random secret, for replicas that the supervisor itself starts."""
    return secrets.token_hex()


def nonce() -> str:
    """Returns a random number of 128 bits, as hexadecimal digits."""
    return secrets.token_hex(16)


def proof(secret: str, *said: str) -> str:
    """Returns the keyed hash of these texts, each hashed with its length."""
    text = b"".join(len(each.encode()).to_bytes(8, "little") + each.encode() for each in said)
    return hmac.new(secret.encode(), text, _HASH).hexdigest()


def proves(claimed: str, secret: str, *said: str) -> bool:
    """Returns whether `claimed` is the keyed hash of these texts, in constant time. False for an empty secret."""
    return bool(secret) and hmac.compare_digest(claimed.encode(), proof(secret, *said).encode())
