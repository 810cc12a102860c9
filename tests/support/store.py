"""A store that fails or stands still for one process: its ``fsync`` does what a file says."""

import os
import subprocess

_SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

int fsync(int descriptor) {
    const char *place = getenv("STORE_SAYS");
    for (;;) {
        FILE *file = place ? fopen(place, "r") : NULL;
        int said = 0;
        if (file == NULL) break;
        if (fscanf(file, "%d", &said) != 1) said = 0;
        fclose(file);
        if (said == 0) break;
        if (said > 0) { errno = said; return -1; }
        usleep(10000);
    }
    return ((int (*)(int))dlsym(RTLD_NEXT, "fsync"))(descriptor);
}
"""

HANGS = -1


class Store:
    """What processes that are started inside of ``with store.preloaded()`` write to."""

    def __init__(self, folder):
        self._library, self._says = folder / "store.so", folder / "store-says"
        self._preload = {"LD_PRELOAD": str(self._library), "STORE_SAYS": str(self._says)}
        if not self._library.exists():
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "store.c").write_text(_SOURCE)
            hidden = folder / f"store-{os.getpid()}.so"
            build = ["cc", "-shared", "-fPIC", "-o", hidden, folder / "store.c", "-ldl"]
            subprocess.run(build, check=True)
            hidden.rename(self._library)

    def load(self):
        """Have the processes that this one starts from now on write to it."""
        os.environ |= self._preload

    def fail(self, number):
        """Fail with an error of the system, or stand still with ``HANGS``."""
        hidden = self._says.with_suffix(f".{os.getpid()}")
        hidden.write_text(str(number))
        hidden.rename(self._says)

    def heal(self):
        self._says.unlink(missing_ok=True)
