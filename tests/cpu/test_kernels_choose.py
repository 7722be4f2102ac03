"""Configurations and the chooser: legal everywhere, a choice for everything, reasons for every refusal."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_kernels_prepare import random_weight

from spearfish import reference
from spearfish.errors import UnsupportedError
from spearfish.kernels import config as cut
from spearfish.kernels.choose import choose, families
from spearfish.kernels.config import CHIPS, Chip, Problem
from spearfish.kernels.matmul import prepare
from spearfish.kernels.prepare import KINDS, to_stream
from spearfish.kernels.unpack import slab_rows
from spearfish.scheme import QuantScheme

H200 = CHIPS["sm_90"]
TOKENS = (1, 2, 8, 9, 16, 17, 33, 64, 65, 128, 257, 1000, 4096)


def problem(kind: str, m: int, n: int = 4096, k: int = 4096, **more: bool) -> Problem:
    return Problem(kind, False, m, n, k, 0 if kind == "f16_24" else 1, False, **more)


@pytest.mark.parametrize("chip", CHIPS.values(), ids=list(CHIPS))
@pytest.mark.parametrize("kind", KINDS)
def test_every_problem_has_a_kernel_that_fits_the_chip(kind: str, chip: Chip) -> None:
    for m in TOKENS:
        for n, k in ((4096, 4096), (8, 36), (128, 128), (59136, 8192), (960, 29568)):
            asked = problem(kind, m, n, k)
            family, config = choose(asked, chip, "portable")
            assert family.name == "portable"
            assert config.shape.shared_bytes(asked.tile_bytes) <= chip.shared_per_block
            assert config.shape.blocks * config.shape.shared_bytes(cut.widest_tile(kind, config.shape)) <= (
                chip.shared_per_multiprocessor - 1024 * config.shape.blocks
            )
            assert 1 <= config.splits <= asked.k_tiles
            assert config.shape.threads * config.shape.blocks <= 2048


@pytest.mark.parametrize("kind", KINDS)
def test_the_batch_invariant_mode_sums_in_one_order_for_every_m(kind: str) -> None:
    orders = set()
    for m in TOKENS:
        _, config = choose(problem(kind, m, 8192, 8192, batch_invariant=True), H200)
        orders.add((config.shape.warps_k, config.splits))
    assert len(orders) == 1


def test_the_estimates_follow_the_work() -> None:
    """More tokens never come out cheaper, and few tokens get small blocks."""
    for n, k in ((4096, 4096), (28672, 4096), (8192, 28672)):
        costs = []
        for m in TOKENS:
            asked = problem("int4_24", m, n, k)
            family, config = choose(asked, H200, "portable")
            costs.append(family.microseconds(config, asked, H200))
            if m <= 8:
                assert config.shape.block_m <= 16
            if m >= 1000:
                assert config.shape.block_m == 64
        assert all(later >= 0.95 * earlier for earlier, later in zip(costs, costs[1:], strict=False))


def test_measured_times_are_met_within_a_fifth() -> None:
    """Microseconds on an H200, int4 g128 (docs/facts.md)."""
    portable = next(family for family in families() if family.name == "portable")
    for n, k, m, block_m, block_n, splits, measured in (
        (4096, 4096, 1, 8, 64, 4, 7.4),
        (8192, 8192, 16, 16, 128, 4, 15.1),
        (28672, 4096, 32, 32, 128, 1, 27.7),
        (8192, 28672, 64, 64, 128, 4, 70.8),
        (28672, 4096, 1024, 64, 256, 1, 454.3),
        (4096, 4096, 128, 64, 512, 5, 27.0),
        (8192, 28672, 128, 64, 512, 4, 110.3),
        (8192, 8192, 1024, 64, 512, 1, 235.0),
    ):
        asked = problem("int4_24", m, n, k)
        config = next(
            c
            for c in portable.candidates(asked, H200)
            if (c.shape.block_m, c.shape.block_n, c.splits) == (block_m, block_n, splits)
        )
        assert abs(portable.microseconds(config, asked, H200) / measured - 1) < 0.2, str(config)


def test_refusals_list_every_reason() -> None:
    old = replace(H200, arch="sm_75")
    with pytest.raises(UnsupportedError, match="older than sm_80"):
        choose(problem("int4_24", 1), old)
    with pytest.raises(UnsupportedError, match="cannot win, it begins at 65"):
        choose(problem("int4_24", 1), H200, "unpack")
    tiny = replace(H200, shared_per_block=10 << 10, shared_per_multiprocessor=11 << 10)
    with pytest.raises(UnsupportedError, match="no configuration"):
        choose(problem("int4_24", 1), tiny, "portable")
    small = replace(H200, shared_per_block=60 << 10)
    config = cut.KernelConfig(cut.shapes("int4_24", H200)[-1])
    assert "bytes of shared memory" in (cut.why_not(config, problem("int4_24", 1), small) or "")
    assert "splits 1 k tiles" in (cut.why_not(replace(config, splits=2), problem("int4_24", 1, 64, 128), H200) or "")


def test_wide_shapes_take_no_zero_points_and_one_scale_a_tile() -> None:
    wide = [shape for shape in cut.shapes("int4_24", H200) if shape.wide]
    assert {shape.block_n for shape in wide} == {256, 512}
    assert not any(shape.wide for kind in ("f16_24", "int4", "int8") for shape in cut.shapes(kind, H200))
    plain = problem("int4_24", 1000)
    for shape in wide:
        config = cut.KernelConfig(shape)
        for taken in (plain, replace(plain, granules=0)):
            assert cut.why_not(config, taken, H200) is None
        for refused in (replace(plain, granules=2), replace(plain, has_zeros=True)):
            assert "at most one scale for 128 k" in (cut.why_not(config, refused, H200) or "")
            assert not choose(refused, H200, "portable")[1].shape.wide
    assert choose(plain, H200, "portable")[1].shape in wide


def test_slabs_are_whole_tiles_within_the_l2() -> None:
    for n, k_tiles in ((64, 1), (4096, 32), (59136, 64), (8, 500), (28672, 32)):
        rows = slab_rows(n, k_tiles)
        assert rows % 64 == 0
        assert rows == 64 or rows * k_tiles * 256 <= 32 << 20
        assert rows - 64 < n


SCHEMES = [QuantScheme(4, 128), QuantScheme(8), QuantScheme(16), QuantScheme(4, 32, False, "dense")]


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_the_op_obeys_torch_and_agrees_with_the_reference(scheme: QuantScheme) -> None:
    """On a CPU the op reads the stream the slow way: the same schema, fake and gradient as on a GPU."""
    weight = random_weight(scheme, 24, 132, dtype=torch.bfloat16)
    prepared = to_stream(weight, "cpu", torch.bfloat16)
    x = torch.randn(5, 132, dtype=torch.bfloat16, requires_grad=True)
    bias = torch.randn(24, dtype=torch.bfloat16, requires_grad=True)
    op = torch.ops.spearfish.matmul.default
    inputs = (x, prepared.stream, prepared.column_scale, bias, *prepared.facts)
    torch.library.opcheck(op, inputs)
    y = op(*inputs)
    truth = reference.matmul(x.detach(), weight, bias.detach())
    assert float((y.detach().double() - truth).norm() / truth.norm()) < 2**-7
    seed = torch.randn(5, 24, dtype=torch.bfloat16)
    y.backward(seed)
    wanted = seed.double() @ reference.dequantize(weight, torch.float64)
    assert x.grad is not None
    assert float((x.grad.double() - wanted).norm() / wanted.norm()) < 2**-7
    assert bias.grad is not None
    assert torch.allclose(bias.grad.float(), seed.float().sum(0), atol=0.1)


def test_scales_have_no_gradient() -> None:
    weight = random_weight(QuantScheme(8), 24, 64)
    prepared = to_stream(weight, "cpu", torch.float16)
    assert prepared.column_scale is not None
    scale = prepared.column_scale.clone().requires_grad_()
    y = torch.ops.spearfish.matmul(torch.randn(2, 64).half(), prepared.stream, scale, None, *prepared.facts)
    with pytest.raises(UnsupportedError, match="frozen"):
        y.sum().backward()


def test_prepared_weights_say_what_they_hold() -> None:
    weight = random_weight(QuantScheme(4, 128), 256, 256)
    prepared = prepare(weight, dtype=torch.bfloat16)
    assert prepared.nbytes == 256 * 256 * 2
    assert to_stream(weight, "cpu", torch.float16).nbytes == 4 * 2 * 3200
