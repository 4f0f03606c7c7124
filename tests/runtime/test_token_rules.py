"""What a request forbids or re-weights, one row at a time."""

from __future__ import annotations

import math

import pytest
import torch

from trtllm_av.runtime.errors import RequestError
from trtllm_av.runtime.params import SamplingParams
from trtllm_av.runtime.token_rules import TokenRules

INF = math.inf
V = 6
LOGITS = [2.0, -2.0, 1.0, 0.0, -1.0, 3.0]
EOS = 5


def rules_of(prompt: list[int] | None = None, **params: object) -> TokenRules:
    return TokenRules(SamplingParams(**params), prompt or [], [EOS], vocab_size=V)


def edit(rules: TokenRules, output: list[int]) -> list[float]:
    result: list[float] = rules.apply(torch.tensor(LOGITS), output).tolist()
    return result


def forbidden(rules: TokenRules, output: list[int]) -> set[int]:
    return {token for token, value in enumerate(edit(rules, output)) if value == -INF}


def test_repetition_penalty_covers_prompt_and_output() -> None:
    """Guards against dividing a negative logit, which would make a repeated token likelier."""
    rules = rules_of([0, 1], repetition_penalty=2.0)
    assert edit(rules, []) == [1.0, -4.0, 1.0, 0.0, -1.0, 3.0]
    assert edit(rules, [5, 4, 5]) == [1.0, -4.0, 1.0, 0.0, -2.0, 1.5]


def test_presence_counts_once_and_frequency_each_time() -> None:
    """Guards against mixing the two up, and against counting the prompt."""
    assert edit(rules_of([0], presence_penalty=0.5), [2, 2, 5]) == [2, -2, 0.5, 0, -1, 2.5]
    assert edit(rules_of([0], frequency_penalty=0.5), [2, 2, 5]) == [2, -2, 0.0, 0, -1, 2.5]
    # Opposite signs cancel for a token seen once, but not for one seen twice.
    opposite = rules_of(presence_penalty=0.5, frequency_penalty=-0.5)
    assert edit(opposite, [2, 2, 5]) == [2, -2, 1.5, 0, -1, 3.0]


def test_penalties_see_the_drafts_before_the_row() -> None:
    """Guards against penalties frozen at the start of a round: the target's law would be another one."""
    rules = rules_of(frequency_penalty=1.0)
    assert edit(rules, [3]) != edit(rules, [3, 3])
    assert edit(rules, [3, 3])[3] == -2.0


def test_bias_is_added_once_and_can_forbid() -> None:
    """Guards against a bias that is dropped, or that a penalty turns into NaN."""
    rules = rules_of([1, 2], logit_bias={1: 5.0, 2: -INF}, repetition_penalty=2.0)
    assert edit(rules, [2]) == [2.0, 1.5, -INF, 0.0, -1.0, 3.0]


def test_bad_word_is_forbidden_only_behind_its_beginning() -> None:
    """Guards against forbidding a word's last token everywhere, or missing it behind the beginning."""
    rules = rules_of([1, 2], bad_words_ids=[[1, 2, 3], [4]])
    assert forbidden(rules, []) == {4}
    assert forbidden(rules, [2]) == {4}  # the prompt does not count
    assert forbidden(rules, [1, 2]) == {3, 4}
    assert forbidden(rules, [0, 1, 2]) == {3, 4}
    assert forbidden(rules, [1, 2, 0]) == {4}
    assert forbidden(rules, [2, 1]) == {4}
    assert forbidden(rules_of(bad_words_ids=[[3, 3]]), [3]) == {3}


def test_allowed_tokens_forbid_the_rest() -> None:
    """Guards against an inverted mask, and against padded columns beside the real vocabulary."""
    rules = rules_of(allowed_token_ids=[1, 3])
    assert forbidden(rules, [0]) == {0, 2, 4, 5}
    wide = rules.apply(torch.tensor([*LOGITS, 9.0, 9.0]), [])
    assert wide.shape == (V + 2,)
    assert wide[:V].tolist() == edit(rules, [])


def test_min_tokens_forbid_every_way_to_stop() -> None:
    """Guards against an output that ends early through eos or one of the request's stop tokens."""
    rules = rules_of(min_tokens=2, stop_token_ids=[1])
    assert forbidden(rules, []) == forbidden(rules, [0]) == {1, EOS}
    assert forbidden(rules, [0, 0]) == set()
    ignoring = rules_of(min_tokens=2, stop_token_ids=[1], ignore_eos=True)
    assert forbidden(ignoring, []) == {1}


def test_mask_says_what_the_edit_forbids() -> None:
    """Guards against a confidence that counts tokens which cannot be drawn."""
    rules = rules_of(
        min_tokens=1, bad_words_ids=[[2], [0, 3]], logit_bias={4: -INF}, presence_penalty=1.0
    )
    for output in ([], [0], [1, 0]):
        allowed = rules.allowed_mask(output)
        assert {i for i in range(V) if not allowed[i]} == forbidden(rules, output)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_edit_leaves_the_logits_and_their_precision(dtype: torch.dtype) -> None:
    """Guards against edits in place (log-probabilities are reported without rules) and in half precision."""
    logits = torch.tensor(LOGITS, dtype=dtype)
    result = rules_of(logit_bias={0: 0.001}, frequency_penalty=1.0).apply(logits, [1])
    assert logits.tolist() == LOGITS
    assert result.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
    assert result[0].item() == pytest.approx(2.001, abs=1e-6)


def test_request_without_rules_is_inactive() -> None:
    """Guards against rules that cost every plain request an edit of all its rows."""
    assert not rules_of(temperature=0.5, top_k=3, top_p=0.9, stop_token_ids=[1]).is_active
    assert rules_of(min_tokens=1).is_active


@pytest.mark.parametrize(
    ("params", "field", "token"),
    [
        ({"logit_bias": {6: 1.0}}, "logit_bias", 6),
        ({"allowed_token_ids": [0, 77]}, "allowed_token_ids", 77),
        ({"bad_words_ids": [[1], [2, -1]]}, "bad_words_ids", -1),
        ({"stop_token_ids": [9]}, "stop_token_ids", 9),
    ],
)
def test_token_outside_the_vocabulary_is_refused(
    params: dict[str, object], field: str, token: int
) -> None:
    """Guards against an index error deep inside a round, or a negative id that edits the last token."""
    with pytest.raises(
        RequestError, match=rf"^{field} names token {token}, .* use ids from 0 to 5$"
    ):
        rules_of(**params)


@pytest.mark.parametrize(
    "params",
    [
        {"allowed_token_ids": [EOS], "min_tokens": 1},
        {"allowed_token_ids": [2], "bad_words_ids": [[2]]},
        {"allowed_token_ids": [2], "logit_bias": {2: -INF}},
    ],
)
def test_rules_that_leave_no_token_are_refused(params: dict[str, object]) -> None:
    """Guards against a request that can only emit garbage, found out after it was admitted."""
    with pytest.raises(RequestError, match="no token is left to emit"):
        rules_of(**params)
