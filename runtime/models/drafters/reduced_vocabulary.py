"""The target's output layer at a reduced draft vocabulary.

Source: EAGLE-3 (Li et al., 2025) drafts from a map of draft ids to the target's. q has its support there,
so losslessness is untouched and the output layer costs V_d instead of V rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trtllm_av.runtime.models.checkpoint import LoadedModel


def output_rows(target: LoadedModel, draft_to_target: Tensor) -> Tensor:
    """Rows [V_d, H] of the target's output layer, in its dtype."""
    if target.config.tie_word_embeddings:
        return target.model.embed(draft_to_target)
    unit = torch.eye(target.config.hidden_size, dtype=target.dtype)
    return target.model.logits(unit).T[draft_to_target].contiguous()
