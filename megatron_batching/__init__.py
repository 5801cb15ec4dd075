"""Plans micro-batches for Megatron-Core pipelines and runs them.

The names of a first script stand here; all others are in the packages below. They are imported when
they are first used, and listed in `__init__.pyi`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
