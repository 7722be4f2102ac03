"""matmul and QuantLinear on a CPU, where the dense path runs: against the float64 reference."""

import copy

import pytest
import torch
from test_kernels_prepare import random_weight
from torch import nn

from spearfish import reference
from spearfish.errors import ShapeError, UnsupportedError
from spearfish.kernels.matmul import matmul, prepare
from spearfish.nn import QuantLinear, replace_linears
from spearfish.scheme import QuantScheme

# Relative error of one rounding of the weight and one of the result, with float32 sums in between.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def relative(y: torch.Tensor, truth: torch.Tensor) -> float:
    return float((y.detach().double() - truth.detach()).norm() / truth.detach().norm())


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("group", [None, 48, 128])
@pytest.mark.parametrize("shape", [(96,), (0, 96), (5, 96), (2, 3, 96)])
def test_matmul_agrees_with_the_reference(dtype: torch.dtype, group: int | None, shape: tuple[int, ...]) -> None:
    weight = random_weight(QuantScheme(4, group), 40, 96)
    prepared = prepare(weight, dtype=dtype)
    assert prepared.path.startswith("dense: the device is cpu")
    x, bias = torch.randn(shape).to(dtype), torch.randn(40).to(dtype)
    y = matmul(x, prepared, bias)
    assert y.shape == (*shape[:-1], 40)
    assert y.dtype == dtype
    if y.numel():
        assert relative(y, reference.matmul(x, weight, bias)) < TOLERANCE[dtype]
    out = torch.full_like(y, float("nan"))
    assert matmul(x, prepared, bias, out=out) is out
    assert torch.equal(out, y)


def test_gradient_reaches_x() -> None:
    weight = random_weight(QuantScheme(8), 24, 32)
    x = torch.randn(3, 32, requires_grad=True)
    seed = torch.randn(3, 24)
    matmul(x, prepare(weight, dtype=torch.float32)).backward(seed)
    assert x.grad is not None
    assert relative(x.grad, seed.double() @ reference.dequantize(weight, torch.float64)) < 1e-5


@pytest.mark.parametrize(
    ("x", "bias", "words"),
    [
        (torch.zeros(2, 64), None, "does not fit"),
        (torch.zeros(2, 32, dtype=torch.float16), None, "prepared for"),
        (torch.zeros(2, 32), torch.zeros(3), "bias"),
    ],
)
def test_misfits_are_named(x: torch.Tensor, bias: torch.Tensor | None, words: str) -> None:
    prepared = prepare(random_weight(QuantScheme(4), 24, 32), dtype=torch.float32)
    with pytest.raises(ShapeError, match=words):
        matmul(x, prepared, bias)


def test_an_integer_dtype_and_an_unknown_kernel_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random_weight(QuantScheme(4), 24, 32)
    with pytest.raises(UnsupportedError, match="float"):
        prepare(weight, dtype=torch.int8)
    monkeypatch.setenv("SPEARFISH_KERNEL", "fastest")
    with pytest.raises(UnsupportedError, match="SPEARFISH_KERNEL"):
        from spearfish.kernels.matmul import kernel_choice

        kernel_choice()


def test_the_layer_survives_copying_casting_and_saving() -> None:
    weight, bias = random_weight(QuantScheme(4, 32, symmetric=False), 24, 64), torch.randn(24)
    layer = QuantLinear(weight, bias)
    x = torch.randn(5, 64)
    truth = reference.matmul(x, weight, bias)
    assert relative(layer(x), truth) < 1e-5
    for other in (copy.deepcopy(layer), layer.half().float()):
        assert relative(other(x), reference.matmul(x, weight, other.bias)) < 1e-5
    state = layer.state_dict()
    assert set(state) == {"bias", "codes", "scales", "positions", "zeros"}
    fresh = QuantLinear(random_weight(weight.scheme, 24, 64, seed=9), torch.zeros(24))
    fresh.load_state_dict(state)
    assert torch.equal(fresh(x), layer(x))
    with pytest.raises(RuntimeError, match="codes"):
        fresh.load_state_dict({name: tensor for name, tensor in state.items() if name != "codes"})
    symmetric = QuantLinear(random_weight(QuantScheme(4, 32), 24, 64), torch.zeros(24))
    with pytest.raises(RuntimeError, match=r"Unexpected key.*zeros"):
        symmetric.load_state_dict(state)
    eight = QuantLinear(random_weight(QuantScheme(8, 32, symmetric=False), 24, 64), torch.zeros(24))
    with pytest.raises(RuntimeError, match="codes"):  # of 8 bits: they have the shapes of 4
        fresh.load_state_dict(eight.state_dict())
    assert "int4 2:4 g32 asymmetric" in repr(layer)


def test_replace_linears_keeps_biases_and_refuses_misfits() -> None:
    model = nn.Sequential(nn.Linear(32, 24), nn.ReLU(), nn.Sequential(nn.Linear(24, 8, bias=False)))
    weights = {"0": random_weight(QuantScheme(4), 24, 32), "2.0": random_weight(QuantScheme(8, 32), 8, 24)}
    x = torch.randn(3, 32)
    truth = reference.matmul(reference.matmul(x, weights["0"], model[0].bias).relu(), weights["2.0"])
    for bad in ({"1": weights["0"]}, {"9": weights["0"]}, {"2.0": weights["0"]}):
        with pytest.raises(ShapeError):
            replace_linears(model, {**weights, **bad})
        assert isinstance(model[0], nn.Linear)
    replace_linears(model, weights)
    assert isinstance(model[2][0], QuantLinear)
    assert relative(model(x), truth) < 1e-5


def test_the_compiler_sees_through_the_layer() -> None:
    layer = QuantLinear(random_weight(QuantScheme(4, 32), 24, 64))
    layer.prepare(dtype=torch.float32)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    x = torch.randn(5, 64)
    assert torch.equal(compiled(x), layer(x))


def test_the_reasons_against_the_kernels_are_all_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from spearfish.kernels import jit
    from spearfish.kernels.matmul import _why_no_kernel

    weight, gpu = random_weight(QuantScheme(4, 48), 24, 96), torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "an old card")
    monkeypatch.setattr(jit, "find_spec", lambda name: None)
    reason = _why_no_kernel(weight, gpu, torch.float16) or ""
    for words in ("cuda-core is not installed", "group 48", "an old card has capability 7.5"):
        assert words in reason
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    assert _why_no_kernel(random_weight(QuantScheme(4, 32), 24, 96), gpu, torch.float16) is None
    monkeypatch.setenv("SPEARFISH_KERNEL", "dense")
    assert _why_no_kernel(weight, gpu, torch.float16) == "SPEARFISH_KERNEL=dense"
