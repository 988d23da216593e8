"""A caller's own tensors as the place of layers: what fits, and what is refused in one line."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvcs.errors import UsageError
from kvcs.kv import GivenMemory
from tests.unit.kv.toy import TOY, deliver, toy_descriptor

DTYPE = TOY.descriptor.numpy_dtype
ALL = range(4)


def room(tokens: int = 12, **changes: Any) -> dict[int, tuple[Any, Any]]:
    """Memory for the toy's layers, zeroed."""
    shape = (tokens, 2, 8)
    dtype = changes.pop("dtype", DTYPE)
    return {index: (np.zeros(shape, dtype), np.zeros(shape, dtype)) for index in ALL}


def given(into: Any, layers: range = ALL, tokens: int = 12, **descriptor: Any) -> GivenMemory:
    """What the toy's consumer makes of it."""
    return GivenMemory(into, toy_descriptor(**descriptor), layers, tokens)


class Copying:
    """What numpy gets a copy of each time."""

    def __init__(self, held: npt.NDArray[Any]) -> None:
        self.held, self.shape = held, held.shape

    def __array__(self, dtype: Any = None, copy: Any = None) -> npt.NDArray[Any]:
        return self.held.copy()


def bits(array: npt.NDArray[Any]) -> npt.NDArray[np.uint16]:
    """An array that can be compared."""
    return array.view(np.uint16)


def test_objects_are_put_into_the_callers_memory_and_handed_out_read_only() -> None:
    into, ledger = room(tokens=20), TOY.ledger()
    ledger.memory = given(into)
    for key, octets in TOY.objects.items():
        deliver(ledger, *key, octets)
    for index in ALL:
        layer = ledger.layer(index)
        for mine, handed, sent in zip(
            into[index], (layer.k, layer.v), (TOY.k[index], TOY.v[index]), strict=True
        ):
            assert np.array_equal(bits(mine[:12]), bits(sent))
            assert not bits(mine[12:]).any()
            assert np.shares_memory(mine, handed)
            assert mine.flags.writeable and not handed.flags.writeable
    assert ledger.held_octets == 0  # it is the caller's
    ledger.drop(1)
    assert np.array_equal(bits(into[1][0][:12]), bits(TOY.k[1]))


def test_a_shorter_publication_fills_the_first_tokens() -> None:
    into = room()
    k, v = given(into).layer(2, 8)
    assert k.shape == v.shape == (8, 2, 8)
    assert np.shares_memory(k, into[2][0])
    k[:] = 1
    assert bits(into[2][0][:8]).all() and not bits(into[2][0][8:]).any()


def test_only_the_wanted_layers_need_memory() -> None:
    into = room()
    del into[0], into[3]
    assert given(into, range(1, 3)).layer(1, 12)[0].base is not None
    with pytest.raises(UsageError, match=r"each of the layers 0\.\.3, and layer 0 has none"):
        given(into)


def test_latent_attention_has_one_tensor() -> None:
    into = {index: (pair[0], None) for index, pair in room().items()}
    k, v = given(into, v_head_dim=0).layer(0, 12)
    assert np.shares_memory(k, into[0][0])
    assert (v.shape, v.nbytes) == ((12, 2, 0), 0)


def test_a_list_of_pairs_is_indexed_by_layer() -> None:
    into = list(room().values())
    assert np.shares_memory(given(into).layer(3, 12)[1], into[3][1])


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda k: k.view(np.uint16), "into: k of layer 2: expected dtype bfloat16, got uint16"),
        (lambda k: k[:11], r"into: k of layer 2: expected shape \[12, 2, 8\], got \[11, 2, 8\]"),
        (lambda k: k[:, :1], r"expected shape \[12, 2, 8\], got \[12, 1, 8\]"),
        (lambda k: k.reshape(-1), "into: k of layer 2: expected shape"),
        (lambda k: np.zeros((24, 2, 8), DTYPE)[::2], "into: k of layer 2 is not C-contiguous"),
        (lambda k: k[::-1], "into: k of layer 2: has negative strides"),
        (lambda k: np.frombuffer(bytes(k.nbytes), DTYPE).reshape(k.shape), "is read-only"),
        (Copying, "into: k of layer 2: Copying gives copies; give the memory itself"),
        (lambda k: 7, "into: k of layer 2: expected an array or tensor, got int"),
        (lambda k: None, "into: k of layer 2: expected an array or tensor, got NoneType"),
    ],
)
def test_memory_that_does_not_fit_is_refused(change: Any, told: str) -> None:
    into = room()
    into[2] = (change(into[2][0]), into[2][1])
    with pytest.raises(UsageError, match=told):
        given(into)


@pytest.mark.parametrize("pair", [None, 5, (), "kv?"])
def test_what_is_no_pair_is_refused(pair: Any) -> None:
    with pytest.raises(UsageError, match="layer 1 has none"):
        given({**room(), 1: pair})


def test_layers_do_not_share_memory() -> None:
    into = room()
    into[3] = (into[3][0], into[1][1])
    with pytest.raises(UsageError, match=r"v of layer [13] and v of layer [13] share memory"):
        given(into)
    whole = np.zeros((23, 2, 8), DTYPE)
    into = room() | {0: (whole[:12], whole[11:])}
    with pytest.raises(UsageError, match="k of layer 0 and v of layer 0 share memory"):
        given(into)
    # One pool, side by side, is what engines have.
    pool = np.zeros((8, 12, 2, 8), DTYPE)
    given({index: (pool[index], pool[4 + index]) for index in ALL})
    # Only the tokens that are wanted count.
    shared = np.zeros((24, 2, 8), DTYPE)
    given(room() | {0: (shared, shared[12:])})
