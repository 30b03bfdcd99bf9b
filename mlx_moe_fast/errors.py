"""Exceptions. Each message says what was wrong and with what; `hint` says what to do about it."""


class MlxMoeFastError(RuntimeError):
    """Base class: a message, and a remedy where there is one."""

    def __init__(self, message: str, hint: str = ""):
        super().__init__(f"{message} {hint}".strip())
        self.hint = hint


class NotAccelerated(MlxMoeFastError):
    """`strict` was asked for and a layer, or every layer, would have run on MLX's own kernels."""


class KernelBuildError(MlxMoeFastError):
    """A CUDA kernel could not be compiled or loaded."""
