"""Weights reach the operations that own them, and each operation computes what its name says."""

import pytest
import torch

from gpu_worker.device.memory import DeviceMemory
from gpu_worker.ops import Ops, silu_mul
from plugins.errors import ModelFileBroken


def make_ops(dtype: torch.dtype = torch.float32) -> Ops:
    return Ops(DeviceMemory(torch.device("cpu")), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_share_an_input_are_one_product(dtype: torch.dtype) -> None:
    ops = make_ops(dtype)
    linear = ops.linear([("a", 1), ("b", 2)], width=2)
    ops.load("b", torch.tensor([[3.0, 0.0], [0.0, 4.0]]))
    ops.load("a", torch.tensor([[1.0, 1.0]]))
    ops.finish_loading()

    product = linear(torch.tensor([[1.0, 2.0], [5.0, 6.0]], dtype=dtype))

    assert product.dtype == dtype
    assert product.tolist() == [[3.0, 3.0, 8.0], [11.0, 15.0, 24.0]]


@pytest.mark.parametrize("width", [576, 1536])  # of more than 1,024 terms, oneDNN cuts the sum of a lone row elsewhere
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 8, 33])
def test_a_row_in_float32_gets_the_same_bits_alone_and_in_any_batch(width: int, num_rows: int) -> None:
    draw = torch.Generator().manual_seed(width)
    ops = make_ops()
    linear = ops.linear([("w", 64)], width)
    ops.load("w", torch.randn(64, width, generator=draw))
    ops.finish_loading()
    rows = torch.randn(64, width, generator=draw)

    together = linear(rows)

    assert torch.equal(linear(rows[-num_rows:]), together[-num_rows:])


def test_loading_again_replaces_the_weights() -> None:
    ops = make_ops()
    linear = ops.linear([("w", 1)], width=2)
    ops.load("w", torch.tensor([[1.0, 1.0]]))
    ops.finish_loading()

    ops.load("w", torch.tensor([[2.0, 0.0]]))
    ops.finish_loading()

    assert linear(torch.tensor([[5.0, 7.0]])).tolist() == [[10.0]]


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="weights are packed by oneDNN")  # type: ignore[no-untyped-call]  # torch leaves it untyped
def test_the_packed_copies_are_counted_beside_the_plain_weights() -> None:
    """A tied head is packed too; only the embedding that it shares is held once."""
    ops = make_ops()
    ops.linear([("a", 64), ("b", 64)], width=64)
    ops.tied_head(ops.embedding("e", vocab_size=192, width=64))
    for name, num_rows in (("a", 64), ("b", 64), ("e", 192)):
        ops.load(name, torch.zeros(num_rows, 64))
    before = ops.packed_bytes

    ops.finish_loading()

    assert before == 0
    assert ops.packed_bytes == (128 * 64 + 192 * 64) * 4


def test_a_tied_head_multiplies_by_the_embedding_and_is_counted_once() -> None:
    ops = make_ops()
    embedding = ops.embedding("e", vocab_size=3, width=2)
    head = ops.tied_head(embedding)
    ops.load("e", torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 2.0]]))
    ops.finish_loading()

    x = embedding(torch.tensor([2, 0]))

    assert x.tolist() == [[2.0, 2.0], [1.0, 0.0]]
    assert head(x).tolist() == [[2.0, 2.0, 8.0], [1.0, 0.0, 2.0]]
    assert ops.num_parameters == 6


def test_a_head_takes_no_rows_at_all() -> None:
    ops = make_ops(torch.bfloat16)
    head = ops.head("h", vocab_size=3, width=2)
    ops.load("h", torch.zeros(3, 2))
    ops.finish_loading()

    assert head(torch.zeros(0, 2, dtype=torch.bfloat16)).shape == (0, 3)


def test_a_missing_tensor_is_named() -> None:
    ops = make_ops()
    ops.linear([("a", 1), ("b", 2)], width=2)
    ops.load("a", torch.zeros(1, 2))

    with pytest.raises(ModelFileBroken, match=r"tensor b is missing \(1 of 2 are\)"):
        ops.finish_loading()


def test_a_tensor_of_another_shape_is_refused() -> None:
    ops = make_ops()
    ops.linear([("a", 1)], width=2)

    with pytest.raises(ModelFileBroken, match=r"tensor a has shape \[2, 1\]; expected \[1, 2\]"):
        ops.load("a", torch.zeros(2, 1))


def test_a_tensor_that_the_model_has_not_is_refused() -> None:
    with pytest.raises(ModelFileBroken, match="tensor bias is no part of this model"):
        make_ops().load("bias", torch.zeros(1))


def test_rms_norm_scales_to_unit_mean_square_and_then_by_its_weight() -> None:
    ops = make_ops()
    norm = ops.rms_norm("n", width=2, eps=0.0)
    ops.load("n", torch.tensor([1.0, 10.0]))

    out = norm(torch.tensor([[7.0, 7.0], [0.0, -2.0]]))

    torch.testing.assert_close(out, torch.tensor([[1.0, 10.0], [0.0, -(2**0.5) * 10]]))


def test_rotary_turns_dimension_i_together_with_its_partner_in_the_other_half() -> None:
    rotary = make_ops().rotary(theta=100.0, head_dim=4, max_positions=8)
    x = torch.tensor([[[1.0, 0.0, 0.0, 1.0]]] * 2)

    out = rotary.turn(x, rotary.at(torch.tensor([0, 2])))

    # At position 2 the first pair, (1, 0), turns by 2 and the second, (0, 1), by 2 / 100 ** 0.5 = 0.2.
    expected = [-0.4161468, -0.1986693, 0.9092974, 0.9800666]
    torch.testing.assert_close(out[0], x[0])
    torch.testing.assert_close(out[1, 0], torch.tensor(expected))


def test_silu_mul_gates_the_second_half_by_the_first() -> None:
    out = silu_mul(torch.tensor([[0.0, 1.0, 5.0, 2.0]]))

    torch.testing.assert_close(out, torch.tensor([[0.0, 1.4621172]]))


def test_a_row_in_float32_is_gated_to_the_same_bits_wherever_the_threads_part(five_threads: None) -> None:
    rows = torch.randn(101, 2 * 1536, generator=torch.Generator().manual_seed(7))

    together = silu_mul(rows)

    assert torch.equal(torch.cat([silu_mul(rows[index : index + 1]) for index in range(len(rows))]), together)
