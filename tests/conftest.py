import os
import sys
from pathlib import Path

import mlx.core as mx
import pytest

os.environ["HF_HUB_OFFLINE"] = "1"  # read when mlx-lm is imported; every model here is made by the tests
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))  # scripts import each other


def pytest_configure(config: pytest.Config) -> None:
    # What is not about the GPU says the same on every machine.
    if config.option.markexpr == "not gpu":
        mx.set_default_device(mx.cpu)
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # NumPy's threads spin on the cores that the emulator wants


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if mx.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU and MLX's CUDA build")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A quantized Qwen3-MoE of a few MB, with a tokenizer."""
    from mlx_moe_fast.modelmaker import make_model

    folder = tmp_path_factory.mktemp("models") / "tiny-qwen3-moe"
    make_model("tiny-qwen3-moe", folder)
    return folder
