"""mclclip: fine-tune CLIP at scale so that it sees what it was blind to.

Public names: ``load_model``, which loads any encoder, and ``__version__``. Everything else is
reached through the command line (``mclclip --help``) or the modules that CONTRIBUTING.md lists.
"""

from typing import Any

__version__ = "0.1.0"
__all__ = ["__version__", "load_model"]


def __getattr__(name: str) -> Any:
    """Loads ``load_model`` on first use: importing mclclip must not import torch."""
    if name == "load_model":
        from mclclip.models.encoder import load_model

        return load_model
    raise AttributeError(f"module 'mclclip' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Names the public functions too that are not loaded yet."""
    return sorted({*globals(), *__all__})
