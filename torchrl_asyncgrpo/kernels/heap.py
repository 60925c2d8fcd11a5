"""Give the C heap's free pages back to the system, so that one step's holes do not add to the peak of the next."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable


@functools.cache
def _trim() -> Callable[[int], int] | None:
    """The C library's ``malloc_trim``, or None where it has none."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        trim: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except AttributeError:  # musl
        return None
    return trim


def release_free_pages() -> None:
    """Return the pages of freed tensors that the heap keeps; nothing to do outside glibc.

    PyTorch asks for aligned memory, and glibc before 2.38 does not give a freed aligned block out again for one of the
    same size: every temporary of a forward can leave a hole. Costs about 0.1 s per GB of holes.
    """
    trim = _trim()
    if trim is not None:
        trim(0)
