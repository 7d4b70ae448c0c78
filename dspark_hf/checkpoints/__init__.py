"""Readers of other tools' drafter packagings: each turns a config and a list of tensors into a `CheckpointFormat`.

A reader looks at fields and tensor shapes, never at `architectures` alone, and returns `None` for a checkpoint that is
not its own; the first that does not decides. What no reader knows is refused by name; any weight missing or left over
fails the load.
"""

from dspark_hf.checkpoints import deepspec, dflash_config, gemma4, ornith, refused, speculators
from dspark_hf.modeling.modeling_dspark import CHECKPOINT_READERS


# The order matters: several packagings share names, and the more particular mark comes first.
READERS = [
    refused.refuse_known,
    speculators.read,
    ornith.read,
    dflash_config.read_marked,
    gemma4.read,
    deepspec.read,
    dflash_config.read_named,
]


def register_readers() -> None:
    """Let `DSparkDraftModel.from_pretrained` read every packaging known here."""
    CHECKPOINT_READERS[:] = READERS
