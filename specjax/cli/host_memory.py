"""Working memory that the C library keeps between calls.

XLA's CPU programs take their working memory from malloc in every call and give it back after it. glibc hands large
pieces back to the system, which clears each page of them again when it is next touched: drawing tokens from 96 rows of
49,152 logits touches 9,300 such pages, and lost 15 ms by them where the work itself took 7.
"""

import ctypes
import os
import platform

# glibc's malloc.h
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8
_MOST = 2**31 - 1


def keep() -> bool:
    """Tell glibc's malloc to give nothing back to the system, and to have one heap, which can grow to any size.

    For processes of one's own, before other threads allocate (their heaps would stay). A process's memory then stays at
    its highest point. Settings of the user's (`MALLOC_...`, `GLIBC_TUNABLES`) are left alone.

    Returns:
        Whether that was done.
    """
    if platform.libc_ver()[0] != "glibc" or any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return False
    mallopt = ctypes.CDLL(None).mallopt
    settings = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, _MOST), (_TOP_PAD, 64 << 20), (_ARENA_MAX, 1))
    done = [mallopt(option, value) for option, value in settings]  # each of them, whatever the one before said
    return all(done)
