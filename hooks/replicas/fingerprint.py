"""A fingerprint of what all replicas have to share: the weights, their dtypes, and the versions of packages."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import asdict, dataclass

from torch import nn

from ...allocator._native import Device
from ..device.key import key_of
from ..prefix.fingerprint import samples


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The model and versions of one replica. `weights`: a hash of the configuration and of samples of all weights;
    `dtype`: number of tensors per dtype, "bfloat16 x 291"; the others: versions of packages."""

    weights: str
    dtype: str
    ballonet: str
    torch: str
    transformers: str

    def differences(self, other: Fingerprint) -> tuple[str, ...]:
        """Returns how `other` differs, one line each: "torch is 2.12.0, not 2.13.0". Leaves out the weights where their
        dtype differs, as then their bytes do, too."""
        mine, its = asdict(self), asdict(other)
        if self.dtype != other.dtype:
            mine["weights"] = its["weights"] = ""
        return tuple(f"{name} is {its[name]}, not {mine[name]}" for name in mine if mine[name] != its[name])


def fingerprint_of(model: nn.Module, device: Device) -> Fingerprint:
    """Returns the fingerprint of a model, from samples of its weights (hooks/prefix/fingerprint.py, Note [Sampled])."""
    facts = key_of(model, device)
    weights = hashlib.blake2b(facts["model"].encode(), digest_size=16)
    for sample in samples(model):
        weights.update(sample.cpu().numpy().data)
    types = Counter(str(tensor.dtype).removeprefix("torch.") for tensor in model.parameters())
    return Fingerprint(
        weights=weights.hexdigest(),
        dtype=", ".join(f"{name} x {count}" for name, count in sorted(types.items())),
        ballonet=facts["ballonet"],
        torch=facts["torch"],
        transformers=facts["transformers"],
    )
