"""Data sheets of devices, for predictions without measurements.

Note [Where the figures are from]
    Memory, bandwidth and operations per second are those that the vendor prints: `source` names the document, and the
    revision where it has one. They were compared with copies of these tables, as the vendor's site cannot be reached
    from where this was written. Figures "with sparsity" are halved. No vendor prints what a link gives: PCIe 5 x16 has
    64 GB/s by its standard, and gave large copies 55 on an H200 (tuning.py); of PCIe 4 and 3 x16, 32 and 16 GB/s by
    their standards, as much is taken as bandwidthTest shows for pinned memory: 25 and 12.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


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
