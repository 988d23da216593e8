"""Arrays to bytes, tensors to arrays, and conversions that never reread bits unasked."""

from __future__ import annotations

import sys
import types
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kvcs.errors import UsageError
from kvcs.kv import DTYPES, as_host_array, byte_view, convert

BF16 = np.dtype(ml_dtypes.bfloat16)


@pytest.mark.parametrize("name", DTYPES)
def test_byte_view_shares_memory_for_every_dtype(name: str) -> None:
    array = np.zeros((2, 3), DTYPES[name])
    view = byte_view(array)
    assert (view.format, view.ndim, len(view)) == ("B", 1, array.nbytes)
    view[: DTYPES[name].itemsize] = np.ones(1, DTYPES[name]).tobytes()
    assert array[0, 0] == 1


def test_byte_view_of_little_endian_elements_and_of_nothing() -> None:
    assert bytes(byte_view(np.array([1.0], BF16))) == b"\x80\x3f"
    assert len(byte_view(np.empty((4, 1, 0), BF16))) == 0
    with pytest.raises(UsageError, match="not little-endian"):
        byte_view(np.zeros(3, ">f4"))


def test_byte_view_refuses_to_copy() -> None:
    with pytest.raises(UsageError, match="not C-contiguous"):
        byte_view(np.zeros((2, 3), BF16).T)


def test_read_only_arrays_have_read_only_bytes() -> None:
    array = np.zeros(3, BF16)
    array.flags.writeable = False
    assert byte_view(array).readonly


def test_a_right_array_is_returned_as_it_is() -> None:
    array = np.zeros((4, 2, 8), BF16)
    assert as_host_array(array, BF16, (4, 2, 8), "k") is array
    strided = np.zeros((2, 4, 8), BF16).transpose(1, 0, 2)
    assert as_host_array(strided, BF16, (4, 2, 8), "k") is strided


@pytest.mark.parametrize(
    ("obj", "match"),
    [
        (
            np.zeros((4, 2, 8), np.float16),
            "k: expected dtype bfloat16, got float16; .*reinterpreted$",
        ),
        (
            np.zeros((4, 2, 8), np.uint16),
            r"k: .* bfloat16, got uint16; .*\(.*\.view\(ml_dtypes\.bfloat16\)\)",
        ),
        (np.zeros((4, 2, 7), BF16), r"k: expected shape \[4, 2, 8\], got \[4, 2, 7\]"),
        (np.zeros((1, 4, 2, 8), BF16), "got .1, 4, 2, 8."),
        (np.zeros((4, 16), BF16), "got .4, 16."),
        (np.zeros((4, 2, 8), BF16)[::-1], "k: has negative strides"),
        (np.ma.zeros((4, 2, 8), BF16), "k: masked arrays"),
        ([[0.0]], "k: expected an array or tensor, got list"),
        (bytes(128), "got bytes"),
        (None, "got NoneType"),
    ],
)
def test_a_wrong_array_is_refused_with_expected_and_got(obj: object, match: str) -> None:
    with pytest.raises(UsageError, match=match):
        as_host_array(obj, BF16, (4, 2, 8), "k")


def test_the_other_byte_order_is_named() -> None:
    with pytest.raises(UsageError, match="got float32 of the other byte order"):
        as_host_array(np.zeros(3, ">f4"), np.dtype(np.float32), (3,), "k")


class WithArray:
    """An array of another library that numpy can ask."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray[Any, Any]:
        return self.array


class WithDlpack:
    """An array of another library that speaks DLPack alone."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> object:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()


def test_other_libraries_arrays_share_memory() -> None:
    bf16 = np.zeros((4,), BF16)
    assert as_host_array(WithArray(bf16), BF16, (4,), "k") is bf16
    f32 = np.zeros((4,), np.float32)
    taken = as_host_array(WithDlpack(f32), f32.dtype, (4,), "k")
    assert np.shares_memory(taken, f32)
    with pytest.raises(UsageError, match="got float32"):
        as_host_array(WithDlpack(f32), BF16, (4,), "k")


class Refusing:
    def __array__(self) -> None:
        raise RuntimeError("not today")


def test_what_another_library_raises_is_told_as_ours() -> None:
    with pytest.raises(UsageError, match="k: Refusing gives no host array: not today"):
        as_host_array(Refusing(), BF16, (4,), "k")


class TorchDtype:
    """Prints like torch's and lives in a module of that shape."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"torch.{self.name}"


class TorchTensor:
    """Behaves as a torch tensor where it matters: numpy() knows no bfloat16 and no float8."""

    def __init__(
        self, array: np.ndarray[Any, Any], device: str = "cpu", grad: bool = False
    ) -> None:
        self._array = array
        self.dtype = TorchDtype(array.dtype.name)
        self.device = types.SimpleNamespace(type=device)
        self.requires_grad = grad

    def detach(self) -> TorchTensor:
        return TorchTensor(self._array)

    def view(self, dtype: TorchDtype) -> TorchTensor:
        return TorchTensor(self._array.view(np.dtype(dtype.name)))

    def numpy(self) -> np.ndarray[Any, Any]:
        if self.requires_grad:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad.")
        if self.dtype.name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
            raise TypeError(f"Got unsupported ScalarType {self.dtype.name}")
        return self._array

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray[Any, Any]:
        return self.numpy()


@pytest.fixture
def torch_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the classes above look like members of a module named torch_double."""
    module = types.ModuleType("torch_double")
    module.int16 = TorchDtype("int16")  # type: ignore[attr-defined]
    module.uint8 = TorchDtype("uint8")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch_double", module)
    monkeypatch.setattr(TorchDtype, "__module__", "torch_double")


@pytest.mark.usefixtures("torch_module")
@pytest.mark.parametrize("name", DTYPES)
def test_torch_tensors_of_every_dtype_share_memory(name: str) -> None:
    array = np.arange(24).reshape(2, 3, 4).astype(DTYPES[name]).transpose(1, 0, 2)
    taken = as_host_array(TorchTensor(array, grad=True), DTYPES[name], (3, 2, 4), "k")
    assert taken.dtype == DTYPES[name]
    assert np.shares_memory(taken, array)
    assert np.array_equal(taken, array)


@pytest.mark.usefixtures("torch_module")
def test_torch_tensors_elsewhere_or_of_another_dtype_are_refused() -> None:
    tensor = TorchTensor(np.zeros(3, BF16), device="cuda")
    with pytest.raises(UsageError, match=r"k: tensor is on device 'cuda'; .*\.cpu\(\)"):
        as_host_array(tensor, BF16, (3,), "k")
    with pytest.raises(UsageError, match="expected dtype float16, got bfloat16"):
        as_host_array(TorchTensor(np.zeros(3, BF16)), np.dtype(np.float16), (3,), "k")


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_widening_keeps_every_value(name: str) -> None:
    bits = np.arange(2 ** (8 * DTYPES[name].itemsize), dtype=f"u{DTYPES[name].itemsize}")
    values = bits.view(DTYPES[name])
    wide = convert(values, "float32")
    assert wide.dtype == np.float32
    finite = np.isfinite(wide)
    assert np.array_equal(wide[finite].astype(DTYPES[name]).view(bits.dtype), bits[finite])
    with np.errstate(invalid="ignore"):
        assert np.array_equal(np.isnan(wide), np.isnan(values))


@pytest.mark.parametrize(
    ("own", "wanted"),
    [
        ("bfloat16", "float16"),
        ("float16", "bfloat16"),
        ("float32", "float16"),
        ("float32", "bfloat16"),
        ("bfloat16", "float64"),
        ("float8_e4m3fn", "float8_e5m2"),
        ("bfloat16", "int16"),
        ("bfloat16", "int8"),
        ("int8", "float32"),
        ("uint8", "int8"),
        ("int8", "uint8"),
    ],
)
def test_a_lossy_or_rereading_conversion_is_refused(own: str, wanted: str) -> None:
    with pytest.raises(UsageError):
        convert(np.ones(3, DTYPES[own]), wanted)


def test_the_same_dtype_is_no_conversion() -> None:
    array = np.ones(3, BF16)
    assert convert(array, "bfloat16") is array
    assert convert(array, ml_dtypes.bfloat16) is array


def test_bits_need_the_word_and_the_right_width() -> None:
    array = np.ones(3, BF16)
    with pytest.raises(UsageError, match="bits=True"):
        convert(array, "uint16")
    bits = convert(array, "uint16", bits=True)
    assert bits.tolist() == [0x3F80] * 3
    assert np.shares_memory(bits, array)
    for wanted in ("uint8", "uint32", "int16", "float16", "bfloat16"):
        with pytest.raises(UsageError, match="the bits of bfloat16 are uint16"):
            convert(array, wanted, bits=True)


def test_what_is_no_dtype() -> None:
    with pytest.raises(UsageError, match="'bf16' is not a dtype"):
        convert(np.ones(3, BF16), "bf16")
