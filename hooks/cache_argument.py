"""The argument with which callers give a model its cache. Imports no transformers: a plain module's forwards are looked
at, too.

Note [Names of the cache]
    From transformers 5.24 on, models and `generate()` call it `cache`. They rename what a caller still gives under an
    older name, but inside the call, behind hooks and wrappers. So arguments are searched for all names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

CACHE_NAMES: Final = ("cache", "past_key_values", "cache_params", "state")


def given_cache(arguments: Mapping[str, Any]) -> Any:
    """Returns the cache among keyword arguments of a model, of one of its layers or of `generate()`; None where there
    is none."""
    for name in CACHE_NAMES:
        if (cache := arguments.get(name)) is not None:
            return cache
    return None
