"""mclclip: fine-tune CLIP at scale so that it sees what it was blind to.

Public names: ``finetune``, which makes a better encoder of captioned pictures, ``Run``, which opens
what a run left, ``load_model``, which loads any encoder, and its class ``Encoder``. Everything else
is reached through the command line (``mclclip --help``) or the modules that CONTRIBUTING.md lists.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Encoder", "Run", "__version__", "finetune", "load_model"]

if TYPE_CHECKING:
    from mclclip.api import Encoder, Run, finetune, load_model


def __getattr__(name: str) -> Any:
    """Loads the public names on first use: importing mclclip must not import torch."""
    if name in __all__:
        from mclclip import api

        return getattr(api, name)
    raise AttributeError(f"module 'mclclip' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Names the public functions too that are not loaded yet."""
    return sorted({*globals(), *__all__})
