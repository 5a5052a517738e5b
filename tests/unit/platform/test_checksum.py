"""The checksum that two holders of the same weights compare."""

from __future__ import annotations

import torch

from megagspo.platform.checksum import tensors_checksum

TENSORS = [
    ("a", torch.arange(6.0).reshape(2, 3)),
    ("b", torch.ones(3, dtype=torch.bfloat16)),
    ("c", torch.tensor(1)),
]


def test_order_and_memory_layout_do_not_matter() -> None:
    expected = tensors_checksum(TENSORS)
    assert tensors_checksum(reversed(TENSORS)) == expected
    transposed = TENSORS[0][1].T.contiguous().T
    assert not transposed.is_contiguous()
    assert tensors_checksum([("a", transposed), *TENSORS[1:]]) == expected


def test_name_dtype_shape_and_every_bit_matter() -> None:
    name, tensor = TENSORS[0]
    one_bit = tensor.clone()
    one_bit.view(torch.int32)[1, 2] ^= 1
    negative_zero = tensor.clone()
    negative_zero[0, 0] = -0.0
    changed = [
        [("A", tensor)],
        [(name, tensor.reshape(3, 2))],
        [(name, tensor.view(torch.int32))],
        [(name, one_bit)],
        [(name, negative_zero)],
    ]
    sums = [tensors_checksum(change + TENSORS[1:]) for change in [[(name, tensor)], *changed]]
    assert len(set(sums)) == len(sums)
