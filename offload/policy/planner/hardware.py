"""What devices can do, for predictions where nobody has measured any."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Hardware:
    """A device. `memory`: bytes; `bandwidth`: bytes per second of its own memory; `flops`: dense floating point
    operations per second, by bytes of an element; `link`: bytes per second from host memory."""

    name: str
    memory: int
    bandwidth: float
    flops: Mapping[int, float]
    link: float

    def flops_of(self, itemsize: int) -> float:
        """Operations per second with elements of so many bytes: of the next wider ones where these are not listed."""
        wider = [size for size in self.flops if size >= itemsize]
        return self.flops[min(wider, default=max(self.flops))]


# The links: PCIe 5 x16 has 64 GB/s by its standard, and gave large copies 55 on an H200 (tuning.py); PCIe 4 x16 gives
# about 25 of 32, PCIe 3 x16 about 12 of 16 (what bandwidthTest shows for pinned memory).
_PCIE_5: Final = 55e9
_PCIE_4: Final = 25e9
_PCIE_3: Final = 12e9
_GB: Final = 10**9

DEVICES: Final[Mapping[str, Hardware]] = {
    # NVIDIA H100 Tensor Core GPU data sheet, SXM column: 80 GB, 3.35 TB/s, BF16 1,979 TFLOPS with sparsity (half of
    # that is dense), FP32 67.
    "h100": Hardware("NVIDIA H100 SXM", 80 * _GB, 3.35e12, {2: 989e12, 4: 67e12}, _PCIE_5),
    # The same data sheet of 2022, PCIe column: 80 GB, 2 TB/s, BF16 1,513 TFLOPS with sparsity, FP32 51.
    "h100-pcie": Hardware("NVIDIA H100 PCIe", 80 * _GB, 2.0e12, {2: 756e12, 4: 51e12}, _PCIE_5),
    # NVIDIA H200 Tensor Core GPU data sheet: 141 GB, 4.8 TB/s, as H100 otherwise.
    "h200": Hardware("NVIDIA H200 SXM", 141 * _GB, 4.8e12, {2: 989e12, 4: 67e12}, _PCIE_5),
    # NVIDIA A100 Tensor Core GPU data sheet, SXM: 80 GB, 2,039 GB/s; 40 GB, 1,555 GB/s; BF16 312 TFLOPS, FP32 19.5.
    "a100": Hardware("NVIDIA A100 80GB SXM", 80 * _GB, 2.039e12, {2: 312e12, 4: 19.5e12}, _PCIE_4),
    "a100-40": Hardware("NVIDIA A100 40GB SXM", 40 * _GB, 1.555e12, {2: 312e12, 4: 19.5e12}, _PCIE_4),
    # NVIDIA L40S data sheet: 48 GB, 864 GB/s, BF16 362 TFLOPS dense, FP32 91.6.
    "l40s": Hardware("NVIDIA L40S", 48 * _GB, 864e9, {2: 362e12, 4: 91.6e12}, _PCIE_4),
    # NVIDIA L4 data sheet: 24 GB, 300 GB/s, BF16 242 TFLOPS with sparsity, FP32 30.3.
    "l4": Hardware("NVIDIA L4", 24 * _GB, 300e9, {2: 121e12, 4: 30.3e12}, _PCIE_4),
    # NVIDIA A10 data sheet: 24 GB, 600 GB/s, BF16 125 TFLOPS, FP32 31.2.
    "a10": Hardware("NVIDIA A10", 24 * _GB, 600e9, {2: 125e12, 4: 31.2e12}, _PCIE_4),
    # NVIDIA T4 data sheet: 16 GB, 320 GB/s, FP16 65 TFLOPS, FP32 8.1.
    "t4": Hardware("NVIDIA T4", 16 * _GB, 320e9, {2: 65e12, 4: 8.1e12}, _PCIE_3),
    # NVIDIA Ada GPU architecture white paper, RTX 4090: 24 GB, 1,008 GB/s, BF16 with FP32 accumulate 165.2 TFLOPS
    # dense, FP32 82.6.
    "rtx4090": Hardware("NVIDIA GeForce RTX 4090", 24 * _GB, 1.008e12, {2: 165.2e12, 4: 82.6e12}, _PCIE_4),
}


def named(name: str) -> Hardware | None:
    """The device that a driver, or a person, calls so; None where the table has none."""
    words = name.lower().replace("_", "-")
    if words in DEVICES:
        return DEVICES[words]
    squeezed = words.replace("nvidia", "").replace("geforce", "").replace(" ", "").replace("-", "")
    if "h100" in squeezed and "pcie" in squeezed:
        return DEVICES["h100-pcie"]
    if "a100" in squeezed and "40gb" in squeezed:
        return DEVICES["a100-40"]
    longest = sorted(DEVICES, key=len, reverse=True)  # an L40S is no L4
    return next((DEVICES[key] for key in longest if key.replace("-", "") in squeezed), None)
