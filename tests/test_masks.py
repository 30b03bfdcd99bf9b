"""Masks of batches: none where none is needed, and mlx-lm's own everywhere else."""

import copy
import gc

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.base import create_attention_mask, scaled_dot_product_attention
from mlx_lm.models.cache import BatchKVCache

from mlx_moe_fast import masks


@pytest.fixture
def held():
    """A model for which masks are left out."""
    model = nn.Linear(2, 2)
    masks.hold(model)
    yield model
    masks.release(model)
    assert BatchKVCache.make_mask is masks.ORIGINAL


def batch(padding, length=5):
    cache, key = BatchKVCache(padding), mx.random.key(0)
    cache.update_and_fetch(*mx.random.normal((2, len(padding), 2, length, 8), key=key))
    return cache


def attend(padding):
    """A decode step's attention of a batch."""
    cache = batch(padding)
    mask = create_attention_mask(mx.zeros((len(padding), 1, 16)), cache)
    q, k, v = mx.random.normal((3, len(padding), 2, 1, 8), key=mx.random.key(1))
    return scaled_dot_product_attention(q, *cache.update_and_fetch(k, v), cache, 0.3, mask), mask


def test_the_method_of_this_mlx_lm_is_known():
    assert masks.is_known()


@pytest.mark.parametrize("padding", [[0], [0, 0, 0], [0, 2], [1, 0, 3]])
def test_attention_is_the_same_with_a_mask_only_where_there_is_padding(held, padding):
    found, mask = attend(padding)
    assert (mask is None) == (not any(padding))
    masks.release(held)
    expected, mask = attend(padding)
    assert mask is not None and mx.allclose(found, expected, atol=1e-6)


def test_what_asks_for_a_mask_gets_it(held):
    cache = batch([0, 0])
    padded = {"N": 1, "right_padding": mx.array([1, 0])}
    for arguments in ({"N": 2}, {"N": 1, "return_array": True}, {"N": 1, "window_size": 3}, padded):
        assert mx.array_equal(cache.make_mask(**arguments), masks.ORIGINAL(cache, **arguments))
    assert cache.make_mask(1, window_size=6) is None and cache.make_mask(1, window_size=5) is not None


def test_inside_a_transformation_the_mask_stays(held):
    cache = batch([0, 0])

    def mask(padding):
        cache.left_padding = padding
        made = cache.make_mask(1)
        return mx.array([]) if made is None else made

    zeros = mx.array([0, 0])
    made = mx.compile(mask)(zeros)
    cache.left_padding = zeros
    assert mx.array_equal(made, masks.ORIGINAL(cache, 1))


def test_padding_that_comes_and_goes_is_noticed(held):
    cache = batch([0, 0])
    assert cache.make_mask(1) is None
    cache.prepare(right_padding=[0, 2])
    cache.finalize()  # changes `left_padding` in place
    assert cache.make_mask(1) is not None
    cache.filter(mx.array([1]))
    assert cache.make_mask(1) is None
    cache.extend(batch([0], length=9))
    assert cache.make_mask(1) is not None


def test_the_method_comes_back_with_the_last_model():
    models = [nn.Linear(2, 2), nn.Linear(2, 2)]
    for model in models:
        masks.hold(model)
        masks.hold(model)
    copy.deepcopy(models[0])
    masks.release(models[0])
    masks.release(models[0])
    assert BatchKVCache.make_mask is masks.make_mask
    del models[1], model
    gc.collect()
    assert BatchKVCache.make_mask is masks.ORIGINAL


def test_a_method_that_nobody_has_looked_at_stays(monkeypatch):
    monkeypatch.setattr(masks, "FINGERPRINT", "another")
    masks.is_known.cache_clear()
    model = nn.Linear(2, 2)
    masks.hold(model)
    assert BatchKVCache.make_mask is masks.ORIGINAL
    masks.is_known.cache_clear()
