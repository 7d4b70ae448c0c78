"""A disk that is full, which safetensors and torch report in ways of their own."""

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError


FULL = {errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC)}


@contextlib.contextmanager
def writing(path: Path, then: str) -> Iterator[None]:
    r"""
    Inside the block a file or folder is written. Errors other than a full disk's pass.

    Args:
        path (`Path`): It, for the message.
        then (`str`): What to do once there is room, for the message.

    Raises:
        OSError: If the disk is full, or a file too large, whichever library finds out.
    """
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        if not _is_full(error):
            raise
        raise OSError(f"{path} could not be written: {error}. Make room, then {then}.") from error


def _is_full(error: Exception) -> bool:
    if isinstance(error, OSError):
        return error.errno in FULL
    if isinstance(error, SafetensorError):
        return any(f"(os error {number})" in str(error) for number in FULL)
    return "inline_container" in str(error) or "iostream error" in str(error)  # torch.save's, which do not say why
