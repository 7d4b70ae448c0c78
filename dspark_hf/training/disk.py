"""A disk that is full, which safetensors and torch report in ways of their own."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError


SAYS_TORCH_SAVE = ("inline_container", "iostream error")
"""What a `RuntimeError` says when torch.save could not write."""


@contextlib.contextmanager
def writing(path: Path, then: str) -> Iterator[None]:
    r"""
    Inside the block a file or folder is written.

    Args:
        path (`Path`): It, for the message.
        then (`str`): What to do once there is room, for the message.

    Raises:
        OSError: If writing fails, whichever library finds out.
    """
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not any(words in str(error) for words in SAYS_TORCH_SAVE):
            raise
        raise OSError(f"{path} could not be written: {error}. Make room, then {then}.") from error
