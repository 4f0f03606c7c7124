"""One round: draft, score, trim, verify, accept — the losslessness of the product rests on this file.

Invariants: everything that the trim reads besides live confidences arrives in the ``RoundPlan``, which is
complete before the first draw and derived from earlier rounds; position i is scored from tensors that
exist before x_i is drawn; a drawn draft is never removed for what it is; a trimmed or rejected draft is
never offered again; one function turns logits into probabilities for drawing and for judging.

Sources: speculative sampling, Leviathan et al. 2023 and Chen et al. 2023; the trim, docs/method.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trtllm_av.runtime.acceptance import Acceptance, accept_drafts
from trtllm_av.runtime.adaptive_options import AdaptiveOptions
from trtllm_av.runtime.confidence_source import ConfidenceScorer
from trtllm_av.runtime.early_stop import is_hopeless
from trtllm_av.runtime.engines.base import Executor
from trtllm_av.runtime.models.batch import PackedBatch
from trtllm_av.runtime.models.drafters.base import DraftContext, Drafter
from trtllm_av.runtime.operations import DraftOperations, TorchOperations
from trtllm_av.runtime.random_source import Purpose, RandomKeys, RandomSource
from trtllm_av.runtime.sampling import Distribution, distribution, map_draft_logits
from trtllm_av.runtime.token_rules import TokenRules

#: Stands for the next token of a row whose law allows none (its rules contradict each other there, or
#: the target's logits are not numbers); never emitted.
NO_TOKEN = -1


@dataclass(slots=True)
class RoundPlan:
    """What the host fixed before the first draw, from rounds ≤ n−1.

    ``draft_lens`` [R] int32: how many tokens each row drafts, cut by an early stop to what was drawn;
    ``min_verify_lens`` [R] int32: floors; ``draft_budget``: drafts verified over all rows, floors included;
    ``coefficients`` [F+K] f32 of the estimator, ``version`` theirs; ``is_probe``: depth is explored in this
    round; ``is_scored``: False where every draft is verified and nobody asks for confidences, which then
    are 0; ``is_uniform``: every draft is verified; ``explored_rows``: rows with a floor for labels' sake;
    ``early_stop_survival``: drafting ends where every row's survival is below it (0: never);
    ``recent_acceptance`` [R] f32 where it is a feature.
    """

    draft_lens: Tensor
    min_verify_lens: Tensor
    draft_budget: int
    coefficients: Tensor
    version: int
    is_probe: bool = False
    is_scored: bool = True
    is_uniform: bool = False
    explored_rows: int = 0
    early_stop_survival: float = 0.0
    recent_acceptance: Tensor | None = None


@dataclass(slots=True)
class DecodeRows:
    """R decoding rows. ``lens`` [R] committed tokens, the last of which the target has not seen yet;
    ``outputs``: emitted tokens per row, needed by rows with ``rules`` only."""

    slots: Tensor
    lens: Tensor
    history: Tensor
    seeds: Tensor
    request_numbers: Tensor
    rounds: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    rules: list[TokenRules | None]
    outputs: list[list[int]]
    wants_logprobs: list[bool]

    @property
    def num_rows(self) -> int:
        return self.slots.numel()

    def keys(self, rows: Tensor, positions: Tensor, purpose: Purpose) -> RandomKeys:
        """Random keys of ``rows`` [N] at draft ``positions`` [N] of this round."""
        return RandomKeys(
            self.seeds[rows], self.request_numbers[rows], self.rounds[rows], positions, purpose
        )


@dataclass(slots=True)
class Drafts:
    """``tokens`` [R,K] int64, ``features`` [R,K,F], ``confidence`` [R,K]; ``laws[i]``: q of position i, R rows.

    ``scored_lens`` [R] int32: positions with a confidence, where an early stop left more than were drawn.
    """

    tokens: Tensor
    features: Tensor
    confidence: Tensor
    laws: list[Distribution]
    scored_lens: Tensor | None = None


@dataclass(slots=True)
class Trim:
    """``survival`` [R,K], ``verify_lens`` [R] int32, ``cu_seqlens`` [R+1] int32 of the verify pass."""

    survival: Tensor
    verify_lens: Tensor
    cu_seqlens: Tensor


@dataclass(slots=True)
class RoundOutcome:
    """What one round did. ``emitted``: accepted drafts and the next token of each row, before any stop;
    ``logprobs``: the target's, per emitted token, for rows that asked."""

    drafts: Drafts
    trim: Trim
    acceptance: Acceptance
    emitted: list[list[int]]
    logprobs: list[list[float] | None]


class Round:
    """Runs rounds on one executor and drafter.

    ``dtype`` is the float type of every probability; float64 serves exact enumeration. ``operations``
    score and trim; an engine that has its own puts them in their place. ``num_early_stops`` counts drafts
    of the batch that ended early, ``num_undrafted`` the tokens that were not drawn because of it.
    """

    def __init__(
        self,
        executor: Executor,
        drafter: Drafter | None,
        source: RandomSource,
        *,
        num_speculative_tokens: int,
        is_greedy_draft: bool = False,
        dtype: torch.dtype = torch.float32,
        options: AdaptiveOptions | None = None,
    ) -> None:
        self.executor = executor
        self.drafter = drafter
        self.source = source
        self.num_speculative_tokens = num_speculative_tokens
        self.is_greedy_draft = is_greedy_draft
        self.dtype = dtype
        self.operations: DraftOperations = TorchOperations()
        self.options = options or AdaptiveOptions()
        self.num_early_stops = 0
        self.num_undrafted = 0
        self._scorer = ConfidenceScorer(self.options)

    def run(self, rows: DecodeRows, plan: RoundPlan) -> RoundOutcome:
        """Draft as planned, trim by live confidences, verify, accept."""
        drafts = self.draft(rows, plan)
        trim = self.trim(plan, drafts)
        return self.verify(rows, plan, drafts, trim)

    def draft(self, rows: DecodeRows, plan: RoundPlan) -> Drafts:
        """Draw up to ``draft_lens`` tokens per row; each position is scored before it is drawn."""
        num_rows, width = rows.num_rows, self.num_speculative_tokens
        drafts = Drafts(
            torch.zeros(num_rows, width, dtype=torch.int64),
            torch.zeros(num_rows, width, self.options.num_features, dtype=self.dtype),
            torch.zeros(num_rows, width, dtype=self.dtype),
            [],
        )
        active = torch.nonzero(plan.draft_lens > 0).flatten()
        if self.drafter is None or active.numel() == 0:
            return drafts
        # Rows that do not draft borrow the law of the first active row; it is never read for them.
        source_row = torch.zeros(num_rows, dtype=torch.int64)
        source_row[active] = torch.arange(active.numel())
        is_all_active = active.numel() == num_rows
        context = DraftContext(rows.slots[active], rows.lens[active], rows.history)
        temperature = rows.temperature[active]
        draw_temperature = torch.zeros_like(temperature) if self.is_greedy_draft else temperature
        tokens = torch.empty(0)
        for position in range(int(plan.draft_lens.max())):
            if position == 0:
                logits = self.drafter.start(context)
            else:
                logits = self.drafter.step(position, tokens)
            logits, vocab_map = self._edit_draft_logits(
                logits, rows, active, drafts.tokens, position
            )
            if plan.is_scored:
                self._score(drafts, plan, active, logits, temperature, position, vocab_map)
                if is_hopeless(drafts.confidence, plan, position):
                    self._stop_early(plan, drafts, position)
                    break
            law = distribution(
                logits,
                draw_temperature,
                rows.top_k[active],
                rows.top_p[active],
                vocab_size=self._draft_vocab_size(vocab_map),
                dtype=self.dtype,
            )
            if vocab_map is not None:
                law = law.remap(vocab_map, self.executor.vocab_size)
            keys = rows.keys(active, torch.full_like(active, position), Purpose.DRAFT)
            tokens = law.draw(self.source, keys)
            drafts.tokens[active, position] = tokens
            drafts.laws.append(law if is_all_active else law.rows(source_row))
        return drafts

    def _score(
        self,
        drafts: Drafts,
        plan: RoundPlan,
        active: Tensor,
        logits: Tensor,
        temperature: Tensor,
        position: int,
        vocab_map: Tensor | None,
    ) -> None:
        """Fill in features and confidence of ``position``, whose tokens are not drawn yet."""
        assert self.drafter is not None
        recent = plan.recent_acceptance
        features, confidence = self._scorer.score(
            self.operations,
            logits,
            temperature,
            plan.coefficients,
            position,
            vocab_size=self._draft_vocab_size(vocab_map),
            draft_lens=plan.draft_lens[active],
            head_logit=self.drafter.confidence_logit() if self._scorer.needs_head else None,
            recent_acceptance=None if recent is None else recent[active],
        )
        drafts.features[active, position] = features.to(self.dtype)
        drafts.confidence[active, position] = confidence.to(self.dtype)

    def _stop_early(self, plan: RoundPlan, drafts: Drafts, position: int) -> None:
        """End the drafts of all rows before ``position`` is drawn."""
        drafts.scored_lens = plan.draft_lens.clamp(max=position + 1)
        self.num_early_stops += 1
        self.num_undrafted += int((plan.draft_lens - position).clamp(min=0).sum())
        plan.draft_lens = plan.draft_lens.clamp(max=position)

    def trim(self, plan: RoundPlan, drafts: Drafts) -> Trim:
        """Admit the best slots of the batch by live survival, within the planned budget."""
        base_lens = torch.ones_like(plan.draft_lens)
        # By way of NumPy in half the time of torch.tensor.
        draft_budget = torch.from_numpy(np.array([plan.draft_budget], np.int32))
        survival, verify_lens, cu_seqlens = self.operations.trim_drafts(
            drafts.confidence,
            plan.draft_lens,
            base_lens,
            plan.min_verify_lens,
            draft_budget,
        )
        return Trim(survival, verify_lens, cu_seqlens)

    def verify(self, rows: DecodeRows, plan: RoundPlan, drafts: Drafts, trim: Trim) -> RoundOutcome:
        """One target pass over the last token and the admitted drafts of each row, then acceptance."""
        num_rows = rows.num_rows
        total = int(trim.cu_seqlens[-1])
        stride = 1 + self.num_speculative_tokens
        pack_index = self.operations.pack_drafts(
            torch.ones_like(trim.verify_lens), trim.verify_lens, stride=stride, capacity=total
        ).long()
        last_tokens = rows.history[rows.slots, rows.lens - 1]
        token_ids = torch.cat([last_tokens[:, None], drafts.tokens], 1).flatten()[pack_index]
        batch = PackedBatch.pack(
            token_ids, rows.slots, rows.lens - 1, trim.verify_lens.to(torch.int64) + 1
        )
        logits, hidden = self.executor.verify(batch)
        row_of_token = pack_index // stride
        edited = self._edit_target_logits(
            logits, rows, drafts.tokens, row_of_token, pack_index % stride
        )
        law = distribution(
            edited,
            rows.temperature[row_of_token],
            rows.top_k[row_of_token],
            rows.top_p[row_of_token],
            vocab_size=self.executor.vocab_size,
            dtype=self.dtype,
        )
        mark_empty(law)
        acceptance = accept_drafts(
            law,
            batch.cu_seqlens,
            drafts.tokens,
            drafts.laws,
            plan.draft_lens,
            trim.verify_lens,
            rows.keys,
            self.source,
            has_overlaps=self.options.soft_labels,
        )
        if self.drafter is not None and self.drafter.reads_hidden:
            self._show_hidden(batch, hidden, acceptance.accepted_lens, pack_index % stride)
        accepted = acceptance.accepted_lens.tolist()
        next_tokens = acceptance.next_tokens.tolist()
        drafted = drafts.tokens.tolist()
        emitted = [drafted[r][: accepted[r]] + [next_tokens[r]] for r in range(num_rows)]
        return RoundOutcome(
            drafts,
            trim,
            acceptance,
            emitted,
            _logprobs(logits, batch.cu_seqlens, emitted, rows, self.executor.vocab_size),
        )

    def _draft_vocab_size(self, vocab_map: Tensor | None) -> int:
        return self.executor.vocab_size if vocab_map is None else vocab_map.numel()

    def _edit_draft_logits(
        self, logits: Tensor, rows: DecodeRows, active: Tensor, drawn: Tensor, position: int
    ) -> tuple[Tensor, Tensor | None]:
        """Apply the rows' token rules; a reduced vocabulary is widened first where rules need it."""
        assert self.drafter is not None
        vocab_map = self.drafter.draft_to_target
        ruled = [(i, r) for i, r in enumerate(active.tolist()) if rows.rules[r] is not None]
        if not ruled:
            return logits, vocab_map
        if vocab_map is not None:
            logits = map_draft_logits(logits, vocab_map, self.executor.vocab_size)
        logits = logits.to(self.dtype, copy=True)
        for i, r in ruled:
            rules = rows.rules[r]
            assert rules is not None
            logits[i] = rules.apply(logits[i], rows.outputs[r] + drawn[r, :position].tolist())
        return logits, None

    def _edit_target_logits(
        self, logits: Tensor, rows: DecodeRows, drawn: Tensor, row_of_token: Tensor, offsets: Tensor
    ) -> Tensor:
        """Apply the rows' token rules to every verified position, each with the drafts before it."""
        if all(rules is None for rules in rows.rules):
            return logits
        edited = logits.to(self.dtype, copy=True)
        for t, (r, offset) in enumerate(zip(row_of_token.tolist(), offsets.tolist(), strict=True)):
            rules = rows.rules[r]
            if rules is not None:
                edited[t] = rules.apply(edited[t], rows.outputs[r] + drawn[r, :offset].tolist())
        return edited

    def _show_hidden(
        self, batch: PackedBatch, hidden: Tensor, accepted_lens: Tensor, offsets: Tensor
    ) -> None:
        """Hand the drafter the hidden states of the tokens that are now committed."""
        assert self.drafter is not None
        lengths = accepted_lens.to(torch.int64) + 1
        kept = offsets <= torch.repeat_interleave(accepted_lens.to(torch.int64), batch.lengths)
        cu_seqlens = torch.zeros(lengths.numel() + 1, dtype=torch.int64)
        torch.cumsum(lengths, 0, out=cu_seqlens[1:])
        self.drafter.observe(batch.slots, batch.kv_lens, cu_seqlens, hidden[kept])


def mark_empty(law: Distribution) -> None:
    """Make rows that allow no token certain of NO_TOKEN: they reject every draft and end their request."""
    if law.is_empty is not None:
        law.point = torch.where(law.is_empty, NO_TOKEN, law.point)


def _logprobs(
    logits: Tensor, cu_seqlens: Tensor, emitted: list[list[int]], rows: DecodeRows, vocab_size: int
) -> list[list[float] | None]:
    """Target log-probabilities of emitted tokens, before temperature and rules, where asked for."""
    result: list[list[float] | None] = []
    for r, tokens in enumerate(emitted):
        if not rows.wants_logprobs[r]:
            result.append(None)
            continue
        start = int(cu_seqlens[r])
        known = [token for token in tokens if token != NO_TOKEN]
        result.append(token_logprobs(logits[start : start + len(known)], known, vocab_size))
    return result


def token_logprobs(logits: Tensor, tokens: list[int], vocab_size: int) -> list[float]:
    """Log-probabilities of ``tokens`` [n] under ``logits`` [n, V] at temperature 1."""
    log_p = torch.log_softmax(logits[:, :vocab_size].float(), -1)
    return [float(log_p[i, token]) for i, token in enumerate(tokens)]
