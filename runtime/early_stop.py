"""When an autoregressive draft of the whole batch may end before its planned depth.

Invariant: the rule is "every row's survival at this position is below a threshold that was fixed before the
round". It decides before x_i is drawn, and it is lossless for a batch, where a rule over sums or means is not:
if drafting goes on only because of what row s drew at i−1, then no other row's slot at i reaches the
threshold, while (s, i−1) does; so no slot that this adds can push (s, i−1), or any slot before it in the
order, out of the budget. Floors are drafted whatever the survival: they were fixed before the round, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from trtllm_av.runtime.cost_model import CostModel

if TYPE_CHECKING:
    from trtllm_av.runtime.step import RoundPlan


def stop_survival(cost_model: CostModel, requests: int, depth: int, tokens_per_ms: float) -> float:
    """The survival below which ``requests`` more drafts cannot pay for their step; 0 where none is saved.

    A step brings at most ``requests`` times the largest survival, and takes a time in which the round as
    planned emits ``tokens_per_ms`` tokens a ms.
    """
    if cost_model.is_block or depth < 2:
        return 0.0
    step_ms = cost_model.draft_ms(requests, depth) - cost_model.draft_ms(requests, depth - 1)
    return min(tokens_per_ms * step_ms / requests, 1.0)


def is_hopeless(confidence: Tensor, plan: RoundPlan, position: int) -> bool:
    """True if no row's draft of ``position`` is worth a step; ``confidence`` [R,K] is known up to there.

    Position 0 is always drawn, so that every round that drafts has something to learn from.
    """
    threshold = plan.early_stop_survival
    if threshold <= 0.0 or position == 0 or int(plan.min_verify_lens.max()) > position:
        return False
    survival = confidence[:, 0]
    for i in range(1, position + 1):
        survival = survival * confidence[:, i]
    return bool((survival < threshold).all())
