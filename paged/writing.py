"""Writing files: whatever keeps a file from being written is one kind of error, whose text names the file."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_NO_ROOM: Final = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}


class UnwritableError(OSError):
    """A file, a folder or a stream cannot be written; its text is a sentence that says which and why."""

    @classmethod
    def of(cls, error: OSError, place: object) -> UnwritableError:
        """What ``error`` means for ``place``, a path or a word for it."""
        return cls(error.errno, error.strerror or str(error), str(place))

    def __str__(self) -> str:
        return f"{self.filename} cannot be written ({self.strerror})"


def is_no_room(error: OSError) -> bool:
    """Whether the disk is full, over a quota or broken: nothing that another path in a config is to blame for."""
    return error.errno in _NO_ROOM


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """While entered, an ``OSError`` is raised as ``UnwritableError`` of the file that it names, or else of ``path``."""
    try:
        yield
    except UnwritableError:
        raise
    except OSError as error:
        # Of two files, as in a copy, the second is the one that is written.
        raise UnwritableError.of(error, error.filename2 or error.filename or path) from error
