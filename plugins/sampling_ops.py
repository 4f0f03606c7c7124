"""Drawing and judging tokens where the logits are: statistics of a row, draws, lossless acceptance.

Objective: a round's random choices inside captured graphs. The meaning is that of the runtime's
``sampling`` and ``acceptance`` on the host, and the random numbers are those of its ``random_source``:
equal keys and equal laws give equal tokens. Invariants: static shapes, no synchronisation, nothing read
back; a draft is drawn from and judged by the same logits and the same numbers per row, and no
probability is ever stored. float64 logits are not supported here: exact enumeration stays on the host.

On CUDA the kernels of ``triton_sampling`` run; ``sampling_torch`` defines the results on every device.
"""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from trtllm_av.plugins.sampling_laws import Laws, Verdict, inverse_map

__all__ = [
    "Laws",
    "Verdict",
    "accept",
    "cut_thresholds",
    "draw",
    "draw_next",
    "inverse_map",
    "keyed_uniforms",
    "probability",
    "row_statistics",
]


def row_statistics(logits: Tensor, temperature: Tensor, vocab_size: int) -> Laws:
    """The laws of ``logits`` [N, ≥ vocab_size] at ``temperature`` [N] f32, in one pass.

    Temperature 0 is one-hot at the first maximum, as is a row whose maximum is not finite. NaN counts as
    −inf. The result refers to ``logits``: they must stay as they are for as long as it is used.
    """
    result: Laws = _implementation(logits).row_statistics(logits, temperature, vocab_size)
    return result


def cut_thresholds(laws: Laws, top_k: Tensor, top_p: Tensor) -> Laws:
    """``laws`` after top-k ([N] int, 0 off) and then top-p ([N] f32, 1 off).

    Top-k keeps the k largest logits and whatever ties with the k-th; top-p the smallest set of likeliest
    tokens that holds this share of the mass, and whatever ties with its last.
    """
    result: Laws = _implementation(laws.logits).cut_thresholds(laws, top_k, top_p)
    return result


def probability(laws: Laws, rows: Tensor, tokens: Tensor) -> Tensor:
    """f32 probability of ``tokens`` (int64, each within the vocabulary) under the laws ``rows`` (int64)."""
    from trtllm_av.plugins import sampling_torch

    return sampling_torch.probability(laws, rows, tokens)


def draw(laws: Laws, uniforms: Tensor) -> Tensor:
    """One token per law, [N] int64, by inverse CDF of ``uniforms`` [N] f64 in [0, 1)."""
    result: Tensor = _implementation(laws.logits).draw(laws, uniforms)
    return result


def accept(
    target: Laws,
    first_rows: Tensor,
    drafts: Laws,
    draft_tokens: Tensor,
    draft_lens: Tensor,
    verify_lens: Tensor,
    uniforms: Tensor,
    target_to_draft: Tensor | None = None,
) -> Verdict:
    """Judge the verified drafts of R rows: draft x from q is accepted iff u·q(x) < p(x), strictly.

    Args:
        target: T laws of a verify pass; row ``first_rows[r] + j`` judges draft j of row r and
            row ``first_rows[r] + verify_lens[r]`` gives the token behind all of them.
        first_rows: [R] int; that is cu_seqlens[r] + base_lens[r] − 1 where logits are kept for all packed
            rows. Rows outside the target (of dead slots) are clamped; their results mean nothing.
        drafts: R·K laws, row r·K + i of draft i, over the drafter's vocabulary; greedy drafts are laws at
            temperature 0.
        draft_tokens: [R, K ≥ 1] int, as target tokens; entries behind ``verify_lens`` are ignored.
        draft_lens, verify_lens: [R] int32, at most K.
        uniforms: [R, K] f64.
        target_to_draft: ``inverse_map`` of a reduced draft vocabulary, None if there is none.
    """
    result: Verdict = _implementation(target.logits).accept(
        target,
        first_rows,
        drafts,
        draft_tokens,
        draft_lens,
        verify_lens,
        uniforms,
        target_to_draft,
    )
    return result


def draw_next(
    target: Laws,
    drafts: Laws,
    verdict: Verdict,
    uniforms: Tensor,
    target_to_draft: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The token behind the accepted drafts of each row, [R] int64, and the overlap [R] f32.

    Where a draft was rejected the token comes from norm(max(0, p − q)), or from p if rounding leaves
    nothing of that; elsewhere from p. The overlap is Σ min(p, q) at the first trimmed position where all
    verified drafts were accepted and some were trimmed, NaN elsewhere. ``uniforms`` [R] f64.
    """
    result: tuple[Tensor, Tensor] = _implementation(target.logits).draw_next(
        target, drafts, verdict, uniforms, target_to_draft
    )
    return result


def keyed_uniforms(
    seeds: Tensor, requests: Tensor, rounds: Tensor, positions: Tensor, purpose: Tensor | int
) -> Tensor:
    """f64 numbers in [0, 1) of these keys: those of the runtime's ``random_source.uniforms``, bit by bit.

    All arguments are integer tensors that broadcast against each other; ``purpose`` may be one number.
    Rounds must stay below 2^32, positions below 2^30.
    """
    result: Tensor = _implementation(seeds).keyed_uniforms(
        seeds, requests, rounds, positions, purpose
    )
    return result


def _implementation(tensor: Tensor) -> ModuleType:
    if tensor.is_cuda:
        from trtllm_av.plugins import triton_sampling

        return triton_sampling
    from trtllm_av.plugins import sampling_torch

    return sampling_torch
