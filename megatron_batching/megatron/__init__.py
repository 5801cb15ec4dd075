"""All that touches Megatron-Core: model chunks, planned communication, schedule, CPU mode.

Names are imported when they are first used, since Megatron-Core takes seconds to import; they are
listed in `__init__.pyi`, which type checkers read.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
