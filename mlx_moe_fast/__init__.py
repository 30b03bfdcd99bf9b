"""Fast quantized mixture-of-experts layers for mlx-lm on NVIDIA GPUs.

model, tokenizer = mlx_lm.load(...)
mlx_moe_fast.patch(model)
"""

from ._version import __version__
from .errors import KernelBuildError, MlxMoeFastError, NotAccelerated
from .patching import LayerReport, PatchReport, patch, patched, report, unpatch

__all__ = [
    "KernelBuildError",
    "LayerReport",
    "MlxMoeFastError",
    "NotAccelerated",
    "PatchReport",
    "__version__",
    "patch",
    "patched",
    "report",
    "unpatch",
]
