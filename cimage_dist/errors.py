"""The one exception a person may meet: what is wrong, where, and how to fix it."""

from __future__ import annotations

import errno

# What the owner of a disk can fix: full, over quota, forbidden, read-only, a file in the way of a
# folder.
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR)


class UserError(Exception):
    """A mistake the user can fix. The command line prints the message alone and exits with code
    2.
    """


class Interrupted(Exception):
    """Training stopped on a signal after saving; `signum` says which."""

    def __init__(self, signum: int, step: int) -> None:
        super().__init__(f"stopped by signal {signum} after step {step}")
        self.signum = signum
        self.step = step
