"""The header of each message on a link: `WORDS` int64, so it can be received without knowing the message's size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

MAGIC: Final = 0x62616C6C30303031  # "ball0001": another number for another layout
WORDS: Final = 32  # int64 of a header
LONGEST_TAG: Final = 96  # bytes of a tag
MOST_DIMENSIONS: Final = 8
MESSAGE: Final = 1
BYE: Final = 2  # the sender closes its end
_UNCHECKED: Final = -1  # is no CRC-32
_SHAPE: Final = 9  # words before it
_TAG: Final = 18  # words before it; its 12 words and 2 unused ones follow

# Sent as indices into this table: only append to it.
DTYPES: Final = (
    "float32",
    "float64",
    "float16",
    "bfloat16",
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "bool",
    "complex64",
    "complex128",
    "float8_e4m3fn",
    "float8_e5m2",
    "uint16",
    "uint32",
    "uint64",
)


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a message. `nbytes`: of its payload, which follows; `checksum`: CRC-32 of the payload, None if it
    is not checked; `direct`: the payload goes from device to device."""

    kind: int
    epoch: int
    tag: str = ""
    dtype: str = "uint8"
    shape: tuple[int, ...] = ()
    nbytes: int = 0
    urgent: bool = False
    checksum: int | None = None
    direct: bool = False

    def encode(self) -> list[int]:
        """Returns `WORDS` numbers. ValueError where the tag, shape or dtype does not fit into a header."""
        tag = self.tag.encode()
        if len(tag) > LONGEST_TAG:
            raise ValueError(f"a tag has {LONGEST_TAG} bytes at most, and {self.tag!r} has {len(tag)}")
        if len(self.shape) > MOST_DIMENSIONS:
            raise ValueError(f"a tensor on a link has {MOST_DIMENSIONS} dimensions at most, not {len(self.shape)}")
        if self.dtype not in DTYPES:
            raise ValueError(f"a tensor of {self.dtype} cannot be sent: send its bytes as uint8")
        shape = [*self.shape, *[0] * (MOST_DIMENSIONS - len(self.shape))]
        padded = tag.ljust(LONGEST_TAG, b"\0")
        words = [int.from_bytes(padded[n : n + 8], "little", signed=True) for n in range(0, LONGEST_TAG, 8)]
        checksum = _UNCHECKED if self.checksum is None else self.checksum
        head = [MAGIC, self.kind, self.epoch, self.urgent, DTYPES.index(self.dtype), len(self.shape)]
        found = [*map(int, head), self.nbytes, checksum, len(tag), *shape, int(self.direct), *words]
        return [*found, *[0] * (WORDS - len(found))]

    @classmethod
    def decode(cls, words: list[int]) -> Self:
        """Returns the header that `encode` has encoded. ValueError where these are no header."""
        if len(words) != WORDS or words[0] != MAGIC:
            raise ValueError("what arrived is no header of a message: the other end is of another version")
        _, kind, epoch, urgent, dtype, dimensions, nbytes, checksum, length = words[:_SHAPE]
        if not (kind in (MESSAGE, BYE) and 0 <= dtype < len(DTYPES) and 0 <= dimensions <= MOST_DIMENSIONS):
            raise ValueError(f"a header says kind {kind}, dtype {dtype}, {dimensions} dimensions: it is damaged")
        if nbytes < 0 or not 0 <= length <= LONGEST_TAG:
            raise ValueError(f"a header says {nbytes} bytes, and {length} of its tag: it is damaged")
        tag = b"".join(word.to_bytes(8, "little", signed=True) for word in words[_TAG : _TAG + LONGEST_TAG // 8])
        return cls(
            kind=kind,
            epoch=epoch,
            tag=tag[:length].decode(),
            dtype=DTYPES[dtype],
            shape=tuple(words[_SHAPE : _SHAPE + dimensions]),
            nbytes=nbytes,
            urgent=bool(urgent),
            checksum=None if checksum == _UNCHECKED else checksum,
            direct=bool(words[_TAG - 1]),
        )
