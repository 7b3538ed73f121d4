"""The kernels as PyTorch operators: ``torch.ops.flashmoe_science``.

Eager calls on plain tensors go past the dispatcher (`flashmoe_science.direct`). All others meet these operators:
torch.compile, torch.export, modes that count or select (selective checkpointing, FLOP counters), transforms of
torch.func, tensor subclasses. Importing this package defines all of them, as a process needs that loads a program which
torch.export saved.

Every module of the folder is imported, and no list names them: an operator that was left out of one would be missing
in such a process alone, which nobody runs while writing it. `registered.operators` gives what they define.
"""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
