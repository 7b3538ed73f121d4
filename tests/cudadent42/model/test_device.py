from __future__ import annotations

import pytest
import torch

from cudadent42.base.errors import UsageError
from cudadent42.model.device import synchronize, use_device


def test_cpu_needs_nothing() -> None:
    use_device("cpu")
    synchronize("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_no_gpu_is_said_in_a_line() -> None:
    with pytest.raises(UsageError, match=r"no CUDA device for cuda:0.*--device cpu"):
        use_device("cuda:0")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_gpu_that_is_not_there() -> None:
    with pytest.raises(UsageError, match="no cuda:99"):
        use_device("cuda:99")


@pytest.mark.gpu
def test_the_order_of_attention_s_kernels_stays() -> None:
    use_device("cuda:0")
    before = torch._C._get_sdp_priority_order()
    query = torch.ones(1, 1, 8, 64, dtype=torch.float16, device="cuda")
    torch.nn.functional.scaled_dot_product_attention(query, query, query)
    assert torch._C._get_sdp_priority_order() == before
