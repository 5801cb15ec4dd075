"""What a trainer calls: the engine contract, its registry, and the engines behind it.

Names are imported when they are first used, since Megatron-Core takes seconds to import; they are
listed in `__init__.pyi`, which type checkers read.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
