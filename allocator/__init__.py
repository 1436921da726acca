"""Memory: pages, their owners, and the allocator under torch. Knows nothing of models.

Called as a function, `ballonet.allocator()`, it gives what `torch.cuda.memory.change_current_allocator` takes; why the
package can be called: src/ballonet/__init__.py, Note [One name for two things].
"""

import sys
from types import ModuleType
from typing import Any


class _Room(ModuleType):
    def __call__(self) -> Any:
        from .install import allocator

        return allocator()


sys.modules[__name__].__class__ = _Room
