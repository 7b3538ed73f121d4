"""Other people's packages, which are never a dependency: raced where they are installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable


def needs(module: str, package: str) -> Callable[[str], str | None]:
    """``Implementation.unavailable`` for one that imports ``module``, which comes with ``package``."""

    def unavailable(device: str) -> str | None:
        try:
            importlib.import_module(module)
        except Exception as error:  # noqa: BLE001 - a broken binary package may raise anything on import
            if isinstance(error, ModuleNotFoundError) and error.name and module.startswith(error.name):
                return f"{module} is not installed; pip install {package}"
            return f"importing {module} failed: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        return None

    return unavailable
