"""Which pages of a KV cache are mapped ahead of their use, so that no forward waits for the driver (eLLM §5.1).

Note [Window]
    The layers of a cache reach the end of their pages in the same iteration, and all of their next pages at once would
    be more than may lie ahead unused. So those of the first layers are asked for in the iteration before, and each
    layer that takes its page asks for that of the layer a window behind it.
"""

from __future__ import annotations


def window(page: int, limit: int) -> int:
    """Returns how many pages of `page` bytes may lie ahead of their use: `limit` bytes in all, or one page."""
    return max(1, limit // page)


def ahead(layer: int, layers: int, width: int, *, took: bool, next_takes: bool) -> tuple[int, ...]:
    """Returns the layers, of ranges of their own, whose next page is requested once `layer` has appended a token.
    `took`: it took a new page for that; `next_takes`: it will for the next one. At most `width` pages lie ahead, while
    all layers append alike."""
    asked = []
    if took and layer + width < layers:
        asked.append(layer + width)
    if next_takes and layer < width:
        asked.append(layer)
    return tuple(asked)
