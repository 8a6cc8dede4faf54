"""torch's compile caches, kept between runs in the user's cache folder; and compilation that repeats.

What is cached are pickles and binaries of this machine, so they never lie in a run folder, which travels, nor in
torch's default, a name under /tmp that somebody else may have made first.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path

from fathoms.files.cache_folder import cache_folder

CACHE = "TORCHINDUCTOR_CACHE_DIR"
"""torch's own variable; where it is set, it holds."""


def compile_cache() -> Path:
    """The folder of the compile caches: torch's variable, or fathoms/inductor in the user's cache folder."""
    given = os.environ.get(CACHE)
    return Path(given) if given else cache_folder("inductor")


def keep_compiled_code() -> None:
    """Let torch keep what it compiles for the next run, with a warning if the folder cannot be written.

    Equal blocks share one entry, and so do equal models of other runs.
    """
    folder = compile_cache()
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        warnings.warn(f"{folder}: compiled code is not kept there ({error.strerror})", stacklevel=2)
        return
    os.environ[CACHE] = str(folder)


def compile_repeatably() -> None:
    """Choose kernels by rules and not by timing them, where torch can, so that the machine's load decides nothing.

    A process-wide switch of torch, read when something is compiled. TORCHINDUCTOR_DETERMINISTIC=0 leaves it off.
    """
    import torch._inductor.config

    if hasattr(torch._inductor.config, "deterministic") and "TORCHINDUCTOR_DETERMINISTIC" not in os.environ:
        torch._inductor.config.deterministic = True
