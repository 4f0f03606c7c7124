"""Score on CUDA against the float64 definition. Needs a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from trtllm_av.plugins import cuda_ops, cuda_score, reference, torch_ops
from trtllm_av.runtime.errors import UsageError

pytestmark = pytest.mark.cuda
assert cuda_ops.IMPLEMENTATIONS  # registered by the import

K = 7
COEFFICIENTS = torch.tensor([0.5, -0.2, -0.1, 0.0, 0.1, 0.2, 0.3, 0.4])
INF = float("inf")


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def on_gpu(value: Any) -> Any:
    """``value`` with all its tensors on the GPU."""
    return tree_map_only(Tensor, Tensor.cuda, value)


def check_score(logits: Tensor, temperature: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Features and confidence of CUDA logits, checked within 1e-3 of the float64 definition."""
    position = options.pop("position", int32(0))
    options = {"vocab_size": logits.shape[-1], **options}
    features, confidence = torch_ops.score_drafts(
        logits, temperature.cuda(), COEFFICIENTS.cuda(), position.cuda(), **on_gpu(options)
    )
    numpy = {n: v.cpu().numpy() if isinstance(v, Tensor) else v for n, v in options.items()}
    expected = reference.score_drafts(
        logits.double().cpu().numpy(),
        temperature.double().numpy(),
        COEFFICIENTS.double().numpy(),
        position.numpy(),
        dtype=np.float64,
        **numpy,
    )
    np.testing.assert_allclose(features.cpu().numpy(), expected[0], rtol=0, atol=1e-3)
    np.testing.assert_allclose(confidence.cpu().numpy(), expected[1], rtol=0, atol=1e-3)
    return features.cpu(), confidence.cpu()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("vocab_size", "padding"),
    [(2, 0), (111, 0), (32000, 0), (49152, 3), (128256, 0), (151936, 128)],
)
def test_features_match_float64(dtype: torch.dtype, vocab_size: int, padding: int) -> None:
    """Guards against: sums that lose tokens at a split, padding that counts, rows that start unaligned,
    masks, one-hot rows and temperatures that read as something else."""
    g = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(8, 3, vocab_size + padding, generator=g) * 4
    logits[..., vocab_size:] = 60.0  # above every real token
    logits[2, :, ::7] = -INF
    logits[3] = -INF
    logits[3, :, vocab_size // 2] = 3.0  # one-hot
    logits[4] = logits[4].round()  # ties at the top
    logits[5] = 0.0
    temperature = torch.tensor([1.0, 1e-4, 0.6, 1.0, 0.0, 1.7, 1.0, 1.0])
    allowed = torch.rand(8, vocab_size + padding, generator=g) < 0.5
    allowed[:, vocab_size - 1] = True
    for mask in (None, allowed):
        features, _ = check_score(
            logits.to(dtype).cuda(),
            temperature,
            vocab_size=vocab_size,
            allowed_mask=mask,
            feature_bound=40.0,
        )
        assert features.isfinite().all()


def test_rows_that_cannot_be_scored() -> None:
    """Guards against: NaN, +inf or empty rows that poison the fit, and padding or a masked token that is
    taken for one."""
    logits = torch.randn(6, K, 1000)
    logits[0, :, 17] = float("nan")
    logits[1, :, 999] = INF  # behind the vocabulary
    logits[2] = -INF
    logits[3, :, 990:] = float("nan")
    logits[4, :, 5] = float("nan")  # masked
    logits[5, :, 3] = INF
    allowed = torch.ones(6, 1000, dtype=torch.bool)
    allowed[4, 5] = False
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for mask in (None, allowed):
            _, confidence = check_score(
                logits.to(dtype).cuda(), torch.ones(6), vocab_size=990, allowed_mask=mask
            )
            dead = (confidence == 0).all(1).tolist()
            assert dead == [True, False, True, False, mask is None, True]


@pytest.mark.parametrize("vocab_size", [4, 1000, 50000])
def test_one_position_equals_a_block(vocab_size: int) -> None:
    """Guards against: an autoregressive drafter that gets other confidences than a block drafter, and a
    dead slot that is scored."""
    g = torch.Generator().manual_seed(vocab_size)
    logits = (torch.randn(5, K, vocab_size, generator=g) * 4).bfloat16().cuda()
    temperature = torch.rand(5, generator=g) + 0.5
    draft_lens = torch.randint(0, K + 1, (5,), generator=g).int()
    block = check_score(logits, temperature, draft_lens=draft_lens)
    assert (block[1] == 0).equal(torch.arange(K) >= draft_lens[:, None])
    for i in range(K):
        single = check_score(
            logits[:, i : i + 1],  # rows K · V apart
            temperature,
            draft_lens=draft_lens,
            position=int32(i),
        )
        torch.testing.assert_close(single[1][:, 0], block[1][:, i], rtol=0, atol=1e-6)


@pytest.mark.parametrize("splits", [1, 2, 5, 32])
@pytest.mark.parametrize("vocab_size", [1, 9, 4099])
def test_any_number_of_blocks_gives_one_result(
    splits: int, vocab_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against: blocks without work, and mailboxes that are not empty for the next launch."""
    monkeypatch.setattr(cuda_score, "num_splits", lambda *_: splits)
    for seed in range(3):
        g = torch.Generator().manual_seed(seed)
        check_score(torch.randn(3, 2, vocab_size + 1, generator=g).cuda(), torch.ones(3))


def test_score_features() -> None:
    """Guards against: a head's logits that get another position's intercept, or NaN as confidence."""
    features = torch.randn(70, K, 2)
    features[3, 2, 1] = float("nan")
    coefficients = torch.cat([torch.tensor([0.7]), COEFFICIENTS])
    for first, width in ((0, K), (3, 2)):
        given = features[:, first : first + width]
        cpu = torch_ops.score_features(given, coefficients, int32(first))
        cuda = torch_ops.score_features(given.cuda(), coefficients.cuda(), int32(first).cuda())
        torch.testing.assert_close(cuda.cpu(), cpu, rtol=1e-6, atol=1e-6)
        assert not cuda.isnan().any()


def test_arguments_that_kernels_cannot_read() -> None:
    """Guards against: host memory read by a kernel (which ends the process) and other misreadings."""
    logits, temperature = torch.randn(2, K, 64).cuda(), torch.ones(2).cuda()
    rest = (COEFFICIENTS.cuda(), int32(0).cuda())
    with pytest.raises(UsageError, match="temperature is on cpu; move it to cuda:0"):
        torch_ops.score_drafts(logits, temperature.cpu(), *rest, vocab_size=64)
    with pytest.raises(UsageError, match="draft_logits is float64"):
        torch_ops.score_drafts(logits.double(), temperature, *rest, vocab_size=64)
    with pytest.raises(UsageError, match="must be contiguous"):
        torch_ops.score_drafts(logits.mT.contiguous().mT, temperature, *rest, vocab_size=64)
    with pytest.raises(ValueError, match="vocab_size=65"):
        torch_ops.score_drafts(logits, temperature, *rest, vocab_size=65)


def test_small_launches() -> None:
    """Guards against: what only a memory checker sees; small, so that one can watch it
    (`compute-sanitizer --tool memcheck python -m pytest -k small_launches`)."""
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        logits = torch.randn(2, 3, 20_011).to(dtype).cuda()
        mask = torch.ones(2, 20_011, dtype=torch.bool)
        check_score(logits, torch.ones(2))
        check_score(logits[:, :, 1:], torch.ones(2), vocab_size=19_999, allowed_mask=mask[:, 1:])
    test_score_features()
    torch.cuda.synchronize()
