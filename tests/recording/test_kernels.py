"""The kernels for CUDA do what the loop and the product do."""

import pytest
import torch

from hiddenstate.recording import kernels

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize("shape", [(3, 7, 5), (64, 33, 40), (200, 17, 129)], ids=str)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_the_scan_is_the_loop(dtype, reverse, shape):
    time, batch, hidden = shape
    pre = torch.randn(time, batch, 4 * hidden, dtype=dtype, device="cuda")
    first = torch.randn(batch, hidden, dtype=dtype, device="cuda")
    lengths = torch.randint(1, time + 1, (batch,), device="cuda")
    i, f, g, o = pre.double().chunk(4, -1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    c, expected = first.double(), torch.zeros(time, batch, hidden, dtype=torch.float64, device="cuda")
    for t in reversed(range(time)) if reverse else range(time):
        alive = (t < lengths).unsqueeze(1)
        c = torch.where(alive, f[t] * c + i[t] * g[t], c)
        expected[t] = c * alive
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 5e-2}[dtype]
    cells = kernels.lstm_scan(pre, first, lengths, reverse=reverse)
    torch.testing.assert_close(cells.double(), expected, rtol=tolerance, atol=tolerance)
    valid = (torch.arange(time, device="cuda").unsqueeze(1) < lengths).unsqueeze(-1)
    gates = torch.cat([i, f, g, o], -1) * valid
    torch.testing.assert_close(pre.double(), gates, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape", [(1, 1, 1), (300, 130, 70), (4096, 512, 300)], ids=str)
def test_the_product_is_the_product(shape):
    rows, columns, depth = shape
    x, w = torch.randn(rows, depth, device="cuda"), torch.randn(columns, depth, device="cuda") / depth**0.5
    bias = torch.randn(columns, device="cuda")
    expected = x.double() @ w.double().T + bias.double()
    out = kernels.product(x, w, bias, x.new_empty(rows, columns), add=False)
    torch.testing.assert_close(out.double(), expected, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(
        kernels.product(x, w, None, out, add=True).double(), 2 * expected - bias, rtol=1e-2, atol=2e-2
    )
