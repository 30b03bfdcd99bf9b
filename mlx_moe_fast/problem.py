"""What a layer asks for, as plain data: no arrays, no device, nothing to launch."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple


@dataclass(frozen=True)
class Quantization:
    """How a weight is stored: MLX's `mode` with `bits` per element and one scale per `group_size` elements."""

    bits: int
    group_size: int
    mode: str = "affine"

    def __str__(self) -> str:
        return f"{self.mode}{self.bits}g{self.group_size}"


@dataclass(frozen=True)
class Projection:
    """One quantized expert matrix stack: `experts` matrices of `n` output by `k` input features.

    `dtype` is that of activations, scales and biases: "bf16" or "fp16".
    """

    experts: int
    n: int
    k: int
    quantization: Quantization
    dtype: str
    has_bias: bool = False

    @cached_property
    def _hash(self) -> int:
        return hash((self.experts, self.n, self.k, self.quantization, self.dtype, self.has_bias))

    def __hash__(self) -> int:  # asked at every call of a layer
        return self._hash

    def __getstate__(self) -> dict:  # another process hashes strings otherwise
        return {name: value for name, value in vars(self).items() if name != "_hash"}

    def __str__(self) -> str:
        return f"{self.experts}x{self.n}x{self.k} {self.quantization} {self.dtype}"


class RouterForm(NamedTuple):
    """How a token's experts and their weights come out of its router logits; a tuple, for it is made and hashed at
    every call of a block.

    A score is an expert's part of the softmax over all experts, or the sigmoid of its logit. The `top_k` largest are
    chosen, after a bias has been added where the router has one, and weigh their scores without it times `scale`:
    with `normalise`, divided by the sum of them and `eps`.

    With `top_groups` less than `groups`, neighbours among the experts form groups, each as good as the sum of its
    `best` best choices, and the choices of all but the top groups become `dropped`.
    """

    top_k: int
    score: str = "softmax"  # or "sigmoid"
    normalise: bool = True
    eps: float = 0.0
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    best: int = 2
    dropped: float = 0.0


@dataclass(frozen=True)
class Device:
    """A CUDA device."""

    name: str
    compute_capability: tuple[int, int]

    @property
    def arch(self) -> str:
        """The architecture that kernels are compiled for, with its specific instructions where it has some."""
        major, minor = self.compute_capability
        return f"sm_{major}{minor}" + ("a" if major >= 9 else "")
