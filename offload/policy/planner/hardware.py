"""Data sheets of devices, and the time of an iteration: between points that were measured, or by the data sheet.

Note [Where the figures are from]
    Memory, bandwidth and operations per second are those that the vendor prints: `source` names the document, and the
    revision where it has one. They were compared with copies of these tables, as the vendor's site cannot be reached
    from where this was written. Figures "with sparsity" are halved. No vendor prints what a link gives: PCIe 5 x16 has
    64 GB/s by its standard, and gave large copies 55 on an H200 (tuning.py); of PCIe 4 and 3 x16, 32 and 16 GB/s by
    their standards, as much is taken as bandwidthTest shows for pinned memory: 25 and 12.

Note [Between the points]
    A record says what was measured at powers of two of batch and length, and judges SLOs by the next larger point. A
    prediction may be wrong to both sides, so it is interpolated: times are nearly powers of batch and length over a
    factor of two, that is, straight lines in logarithms. Beyond what was measured the parts of a step count that grow
    in different ways (step_costs.py), fitted to all points, and brought to the nearest point that was measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Final

from ..step_costs import Step, fitted


@dataclass(frozen=True, slots=True)
class Hardware:
    """A device. `memory`: bytes; `bandwidth`: bytes per second of its own memory; `flops`: dense floating point
    operations per second, by bytes of an element; `link`: bytes per second from host memory; `source`: the document
    that says so, but for the link."""

    name: str
    memory: int
    bandwidth: float
    flops: Mapping[int, float]
    link: float
    source: str

    def flops_of(self, itemsize: int) -> float:
        """Operations per second with elements of so many bytes: of the next wider ones where those are not listed."""
        wider = [size for size in self.flops if size >= itemsize]
        return self.flops[min(wider, default=max(self.flops))]


# See Note [Where the figures are from].
_PCIE_5: Final = 55e9
_PCIE_4: Final = 25e9
_PCIE_3: Final = 12e9
_GB: Final = 10**9

_H100: Final = "data sheet NVIDIA H100 Tensor Core GPU, of 2023"  # earlier ones had 3 TB/s and FP32 60 TFLOPS
_A100: Final = "data sheet NVIDIA A100 Tensor Core GPU, 1758950 r4"

DEVICES: Final[Mapping[str, Hardware]] = {
    # SXM: 3.35 TB/s, BF16 1,979 TFLOPS with sparsity, FP32 67. PCIe: 2 TB/s, 1,513, 51.
    "h100": Hardware("NVIDIA H100 SXM", 80 * _GB, 3.35e12, {2: 989e12, 4: 67e12}, _PCIE_5, _H100),
    "h100-pcie": Hardware("NVIDIA H100 PCIe", 80 * _GB, 2.0e12, {2: 756e12, 4: 51e12}, _PCIE_5, _H100),
    # 141 GB, 4.8 TB/s, BF16 1,979 TFLOPS with sparsity, FP32 67.
    "h200": Hardware(
        "NVIDIA H200 SXM",
        141 * _GB,
        4.8e12,
        {2: 989e12, 4: 67e12},
        _PCIE_5,
        "data sheet NVIDIA H200 Tensor Core GPU",
    ),
    # SXM: 80 GB 2,039 GB/s, 40 GB 1,555; BF16 312 TFLOPS, FP32 19.5. PCIe: 80 GB 1,935.
    "a100": Hardware("NVIDIA A100 80GB SXM", 80 * _GB, 2.039e12, {2: 312e12, 4: 19.5e12}, _PCIE_4, _A100),
    "a100-40": Hardware("NVIDIA A100 40GB SXM", 40 * _GB, 1.555e12, {2: 312e12, 4: 19.5e12}, _PCIE_4, _A100),
    "a100-pcie": Hardware("NVIDIA A100 80GB PCIe", 80 * _GB, 1.935e12, {2: 312e12, 4: 19.5e12}, _PCIE_4, _A100),
    # 48 GB, 864 GB/s, BF16 362.05 TFLOPS, 733 with sparsity, FP32 91.6.
    "l40s": Hardware("NVIDIA L40S", 48 * _GB, 864e9, {2: 362e12, 4: 91.6e12}, _PCIE_4, "data sheet NVIDIA L40S"),
    # 24 GB, 300 GB/s, BF16 242 TFLOPS with sparsity, FP32 30.3.
    "l4": Hardware(
        "NVIDIA L4", 24 * _GB, 300e9, {2: 121e12, 4: 30.3e12}, _PCIE_4, "data sheet NVIDIA L4 Tensor Core GPU"
    ),
    # 24 GB, 600 GB/s, BF16 125 TFLOPS, 250 with sparsity, FP32 31.2.
    "a10": Hardware(
        "NVIDIA A10", 24 * _GB, 600e9, {2: 125e12, 4: 31.2e12}, _PCIE_4, "data sheet NVIDIA A10 Tensor Core GPU"
    ),
    # 16 GB, 300 GB/s, FP16 65 TFLOPS, FP32 8.1.
    "t4": Hardware(
        "NVIDIA T4", 16 * _GB, 300e9, {2: 65e12, 4: 8.1e12}, _PCIE_3, "data sheet NVIDIA T4 Tensor Core GPU"
    ),
    # 24 GB, 1,008 GB/s, FP16 with FP32 accumulate 165.2 TFLOPS dense, FP32 82.6.
    "rtx4090": Hardware(
        "NVIDIA GeForce RTX 4090",
        24 * _GB,
        1.008e12,
        {2: 165.2e12, 4: 82.6e12},
        _PCIE_4,
        "white paper NVIDIA Ada GPU Architecture, its table of the GeForce RTX 4090",
    ),
}


def named(name: str) -> Hardware | None:
    """Returns the device by the name that a driver, or a person, gives it; None where the table has none."""
    words = name.lower().replace("_", "-")
    if words in DEVICES:
        return DEVICES[words]
    squeezed = words.replace("nvidia", "").replace("geforce", "").replace(" ", "").replace("-", "")
    if "h100" in squeezed and "pcie" in squeezed:
        return DEVICES["h100-pcie"]
    if "a100" in squeezed and "40gb" in squeezed:
        return DEVICES["a100-40"]
    if "a100" in squeezed and "pcie" in squeezed:
        return DEVICES["a100-pcie"]
    longest = sorted(DEVICES, key=len, reverse=True)  # an L40S is no L4
    return next((DEVICES[key] for key in longest if key.replace("-", "") in squeezed), None)


Size = tuple[int, int]  # sequences, tokens of each


def interpolated(phase: str, measured: Mapping[Size, float], batch: int, length: int) -> float | None:
    """Returns the seconds of an iteration with so many sequences and tokens, by those of its phase that were
    `measured`; None without any. See Note [Between the points]."""
    if not measured:
        return None
    inside = [_around({size[axis] for size in measured}, value) for axis, value in enumerate((batch, length))]
    if all(corner in measured for corner in product(*inside)):
        return math.exp(_bilinear(measured, inside, (batch, length)))
    return _beyond(phase, measured, batch, length)


def _around(points: Iterable[int], value: int) -> tuple[int, int]:
    """Returns the points on either side of a value, twice the same where it is one; 0 where there is none."""
    return max((at for at in points if at <= value), default=0), min((at for at in points if at >= value), default=0)


def _bilinear(measured: Mapping[Size, float], inside: Sequence[tuple[int, int]], size: Size) -> float:
    parts = [
        0.0 if low == high else math.log(value / low) / math.log(high / low)
        for (low, high), value in zip(inside, size, strict=True)
    ]
    (b0, b1), (n0, n1) = inside
    rows = [math.log(measured[b, n0]) * (1 - parts[1]) + math.log(measured[b, n1]) * parts[1] for b in (b0, b1)]
    return rows[0] * (1 - parts[0]) + rows[1] * parts[0]


def _beyond(phase: str, measured: Mapping[Size, float], batch: int, length: int) -> float:
    nearest = min(sorted(measured), key=lambda at: abs(math.log(at[0] / batch)) + abs(math.log(at[1] / length)))
    parts = fitted([(Step.in_rows(phase, *size), seconds) for size, seconds in measured.items()])
    if parts is None:
        return measured[nearest]
    asked, known = Step.in_rows(phase, batch, length), Step.in_rows(phase, *nearest)
    return measured[nearest] * parts.seconds(asked) / parts.seconds(known)


@dataclass(frozen=True, slots=True)
class ForwardWork:
    """The work of a forward. `flops`: floating point operations; `read`: bytes of weights and KV that it reads;
    `calls`: operators that it submits; `itemsize`: bytes of an element."""

    flops: float
    read: float
    calls: int
    itemsize: int

    def reading(self, less: int) -> ForwardWork:
        """Returns the work with so many bytes less to read, as far as they are read."""
        return replace(self, read=max(0.0, self.read - less))


# Parts of what a data sheet says that a model gets: of operations in a large prefill, and of the memory's bytes while
# decoding. Chosen: what large matrix products and copies have in practice.
_COMPUTE: Final = 0.6
_MEMORY: Final = 0.8
_CALL: Final = 8e-6  # seconds to submit one operator from Python, eagerly: below that no small model gets. Chosen


def by_device(work: ForwardWork, device: Hardware) -> float:
    """Returns the seconds of a forward on a device that was not measured: the longest of computing, reading its memory
    and submitting operators one by one (the roofline of Williams et al., 2009, with a floor)."""
    return max(
        work.flops / (device.flops_of(work.itemsize) * _COMPUTE),
        work.read / (device.bandwidth * _MEMORY),
        work.calls * _CALL,
    )
