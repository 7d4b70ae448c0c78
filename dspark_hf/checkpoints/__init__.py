"""Readers of other tools' drafter packagings: each turns a config and a list of tensors into a `CheckpointFormat`.

A reader looks at fields and tensor shapes, never at `architectures` alone, and returns `None` for a checkpoint that is
not its own. What no reader knows is refused by name; any weight missing or left over fails the load.
"""

from dspark_hf.checkpoints import deepspec
from dspark_hf.modeling.modeling_dspark import CHECKPOINT_READERS


READERS = [deepspec.read]


def register_readers() -> None:
    """Let `DSparkDraftModel.from_pretrained` read every packaging known here."""
    CHECKPOINT_READERS[:] = READERS
