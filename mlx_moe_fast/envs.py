"""Every environment variable that the package reads, in one place."""

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Variable:
    """An environment variable: its name, what it does, and the value that an unset one stands for."""

    name: str
    help: str
    default: str = ""

    def get(self) -> str:
        """The value now: read at each use, so that tests and notebooks may change it."""
        return os.environ.get(self.name, self.default)


MODE = Variable("MLX_MOE_FAST_MODE", "`auto`, `off` or `require`: what the command line does by default.", "auto")
CACHE_DIR = Variable("MLX_MOE_FAST_CACHE_DIR", "Where compiled kernels are kept; default: the user's cache directory.")
TILE = Variable(
    "MLX_MOE_FAST_TILE",
    "Token tile of the prefill kernel, whatever the problem and even if MLX is faster: 16, 32, 64 or 128; "
    "`wgmma`: that of sm_90 instead.",
)
COMMIT = Variable("MLX_MOE_FAST_COMMIT", "Commit that benchmark results name where there is no git checkout.")

ALL = (MODE, CACHE_DIR, TILE, COMMIT)
