"""What is measured of streaming: peers by name, and what their processes are given.

Peers
    resident        managed, nothing streams
    interval N      managed with `interval=N`: the last of every N layers streams
    accelerate      stock, every second layer on the host, `dispatch_model`
    diffusers       stock, all layers on the host, group offloading with a stream
    link            large copies from pinned memory to the device, and nothing else

This module imports neither torch nor transformers: of a benchmark's process itself no more is needed.
"""

from __future__ import annotations

from collections.abc import Mapping

from common import Options

LINK = {"BALLONET_LINK": "2GB/s"}  # of the stand-in: to copy a layer of the 135M shape takes longer than to compute it
WARM = 3  # tokens before the first that is timed: the first pass fills the slots


def interval_of(peer: str) -> int | None:
    """The interval of a managed peer, None where nothing streams."""
    return int(peer.removeprefix("interval ")) if peer.startswith("interval ") else None


def is_managed(peer: str) -> bool:
    return peer == "resident" or interval_of(peer) is not None


def environment(chosen: Options) -> Mapping[str, str]:
    """What a peer's process is given: the stand-in's copies are as slow as a link."""
    return {} if chosen.cuda else LINK


def page_size(chosen: Options) -> int | None:
    """Bytes; tiny layers have small pages on the stand-in."""
    return 65536 if chosen.tiny and not chosen.cuda else None


def titled(chosen: Options, title: str) -> str:
    """The title of what is measured over the link."""
    return title if chosen.cuda else f"{title}, link of the stand-in slowed to 2 GB/s"
