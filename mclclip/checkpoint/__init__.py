"""Resumable state on torch.distributed.checkpoint (DCP).

One directory per saved step, independent of engine and number of ranks::

    checkpoints/
      step_00002000/           .metadata  __0_0.distcp  __1_0.distcp ...  state.json
      .step_00004000.tmp/      being written, or left by a killed process: removed at the next start
      .damaged_step_00003000/  found damaged at a start: kept, never used again

The state is a flat mapping from names to tensors. All ranks write a step under a temporary name and
the first renames it, so a directory with the final name is complete. ``state.json`` lists every
file with size and checksum, so that later damage is found too. DCP reads its metadata with pickle,
so only checkpoints of a trusted run may be loaded.
"""

from mclclip.checkpoint.checkpoints import CheckpointConfig, Checkpoints, Stateful
from mclclip.checkpoint.step_files import path_of, steps
from mclclip.checkpoint.storage import load_model_state, trained_state

__all__ = [
    "CheckpointConfig",
    "Checkpoints",
    "Stateful",
    "load_model_state",
    "path_of",
    "steps",
    "trained_state",
]
