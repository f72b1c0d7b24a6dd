"""Become a child that dies with its launcher, then become the service.

Run by path, before any package can be imported: `python -I -S child.py LAUNCHER_PID ARGV...`.
Owns nothing but these three steps: ask the kernel for SIGKILL on the parent's death (Linux; other
systems rely on the service's own look at its parent), make sure the parent is still there, exec.
A wrapper and not `preexec_fn`, because the launcher has threads and a fork may not run Python.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> None:
    """Bind this process's life to the launcher's and replace it by the service."""
    launcher = int(sys.argv[1])
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
            sys.exit(f"prctl: errno {ctypes.get_errno()}")
    if os.getppid() != launcher:
        sys.exit("the launcher died before its child started")
    os.execv(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
