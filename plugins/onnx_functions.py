"""The operations on drafts, and the two nodes of TensorRT that the networks use, as ONNX local functions.

Objective: one ONNX file for several engines. A builder with a native layer or a plugin for a node takes
that; any other one, and onnxruntime, inlines the function of the same name. Every body uses standard
operators of opset 23 only.

Invariants: ``ScoreDrafts`` and ``TrimDrafts`` mean what ``reference`` says, with the arithmetic in
float32; given equal confidences ``verify_lens`` is equal bit for bit. Survival is multiplied from left to
right and ranks are counted pairwise, because the order of ties in an engine's sort is not specified;
that costs (R·K)² comparisons, so R·K is limited.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from onnx import FunctionProto

#: ONNX operator set of every body, and of the files that hold them.
OPSET = 23
#: Domain and version of our own operations.
DOMAIN, DOMAIN_VERSION = "trtllm_av", 1
#: Domain under which TensorRT imports its own nodes.
TRT_DOMAIN, TRT_VERSION = "trt", 1
#: Most slots R·K that ``TrimDrafts`` ranks: 16 Mi comparisons.
MAX_TRIM_SLOTS = 4096

_SCORE_DRAFTS = """
<opset_import: ["" : {opset}], domain: "{domain}">
ScoreDrafts <vocab_size, feature_bound, temperature_floor>
    (draft_logits, temperature, coefficients, position, draft_lens{mask_input})
    => (features, confidence) {{
  zero = Constant <value_ints = [0]> ()
  one = Constant <value_ints = [1]> ()
  two = Constant <value_ints = [2]> ()
  rows_and_columns = Constant <value_ints = [1, 2]> ()
  scalar_zero = Constant <value_int = 0> ()
  scalar_one = Constant <value_int = 1> ()
  f_zero = Constant <value_float = 0.0> ()
  f_one = Constant <value_float = 1.0> ()
  infinity = Constant <value = float {{inf}}> ()
  vocabulary = Constant <value_int: int = @vocab_size> ()
  bound = Constant <value_float: float = @feature_bound> ()
  floor = Constant <value_float: float = @temperature_floor> ()

  all_values = Cast <to = 1> (draft_logits)
  end = Unsqueeze (vocabulary, zero)
  real{masked} = Slice (all_values, zero, end, two)
{mask_lines}
  is_broken = IsNaN (real)
  values = Where (is_broken, infinity, real)
  top = ReduceMax <keepdims = 1> (values, two)
  below = Less (top, infinity)
  minus_infinity = Neg (infinity)
  above = Greater (top, minus_infinity)
  is_finite_row = And (below, above)
  safe_values = Where (is_finite_row, values, f_zero)
  safe_top = Where (is_finite_row, top, f_zero)

  given = Cast <to = 1> (temperature)
  is_no_number = IsNaN (given)
  is_greedy = Equal (given, f_zero)
  floored = Max (given, floor)
  positive = Where (is_greedy, f_one, floored)
  scale_1d = Where (is_no_number, f_one, positive)
  scale = Unsqueeze (scale_1d, rows_and_columns)
  has_number_1d = Not (is_no_number)
  has_number = Unsqueeze (has_number_1d, rows_and_columns)

  top_index = ArgMax <axis = 2, keepdims = 1> (safe_values)
  columns = Range (scalar_zero, vocabulary, scalar_one)
  is_top = Equal (columns, top_index)
  gaps = Sub (safe_values, safe_top)
  scaled = Div (gaps, scale)
  exponentials = Exp (scaled)
  others = Where (is_top, f_zero, exponentials)
  rest = ReduceSum <keepdims = 1> (others, two)
  log_rest = Log (rest)
  log_odds_of_top = Neg (log_rest)
  lowest = Neg (bound)
  clipped = Clip (log_odds_of_top, lowest, bound)

  num_scored_1d = Shape <start = 1, end = 2> (draft_logits)
  num_scored = Squeeze (num_scored_1d, zero)
  offsets = Range (scalar_zero, num_scored, scalar_one)
  first = Cast <to = 7> (position)
  positions = Add (offsets, first)
  lens_1d = Cast <to = 7> (draft_lens)
  lens = Unsqueeze (lens_1d, one)
  is_drafted_2d = Less (positions, lens)
  is_drafted = Unsqueeze (is_drafted_2d, two)
  can_score = And (is_finite_row, has_number)
  is_scored = And (can_score, is_drafted)
  features = Where (is_scored, clipped, f_zero)

  slope = Gather (coefficients, zero)
  intercept_index = Add (positions, one)
  intercepts = Gather (coefficients, intercept_index)
  features_2d = Squeeze (features, two)
  product = Mul (features_2d, slope)
  log_odds = Add (product, intercepts)
  probability = Sigmoid (log_odds)
  is_nan = IsNaN (log_odds)
  is_infinite = IsInf (log_odds)
  is_not_finite = Or (is_nan, is_infinite)
  is_finite = Not (is_not_finite)
  is_scored_2d = Squeeze (is_scored, two)
  is_valid = And (is_scored_2d, is_finite)
  confidence = Where (is_valid, probability, f_zero)
}}
"""

_MASK_LINES = """
  real_mask = Slice (allowed_mask, zero, end, one)
  allowed = Unsqueeze (real_mask, one)
  forbidden_value = Neg (infinity)
  real = Where (allowed, real_unmasked, forbidden_value)"""

_TRIM_DRAFTS = """
<opset_import: ["" : {opset}], domain: "{domain}">
TrimDrafts (confidence, draft_lens, base_lens, min_verify_lens, draft_budget)
    => (survival, verify_lens, cu_seqlens, pack_index) {{
  zero = Constant <value_ints = [0]> ()
  one = Constant <value_ints = [1]> ()
  minus_one = Constant <value_ints = [-1]> ()
  scalar_zero = Constant <value_int = 0> ()
  scalar_one = Constant <value_int = 1> ()
  i_zero = Constant <value = int32 {{0}}> ()
  i_zero_1d = Constant <value = int32[1] {{0}}> ()
  f_zero = Constant <value_float = 0.0> ()
  f_one = Constant <value_float = 1.0> ()
  f_minus_one = Constant <value_float = -1.0> ()
  tiny = Constant <value_float = {tiny}> ()
  num_positions = Constant <value = int32 {{{num_positions}}}> ()
  positions = Constant <value = int32[1, {num_positions}] {{{positions}}}> ()

  is_live = Greater (base_lens, i_zero)
  lens_below = Min (draft_lens, num_positions)
  lens_within = Max (lens_below, i_zero)
  lens = Where (is_live, lens_within, i_zero)
  floors_below = Min (min_verify_lens, lens)
  floors = Max (floors_below, i_zero)
  lens_2d = Unsqueeze (lens, one)
  floors_2d = Unsqueeze (floors, one)
  is_drafted = Less (positions, lens_2d)

  is_normal = GreaterOrEqual (confidence, tiny)
  is_above_one = Greater (confidence, f_one)
  at_most_one = Where (is_above_one, f_one, confidence)
  p = Where (is_normal, at_most_one, f_zero)
{products}
  products = Concat <axis = 1> ({product_names})
  survival = Where (is_drafted, products, f_zero)

  is_not_floor = GreaterOrEqual (positions, floors_2d)
  is_candidate = And (is_drafted, is_not_floor)
  key_2d = Where (is_candidate, survival, f_minus_one)
  key_by_position = Transpose <perm = [1, 0]> (key_2d)
  key = Reshape (key_by_position, minus_one)
  mine = Unsqueeze (key, one)
  other = Unsqueeze (key, zero)
  num_slots_1d = Shape (key)
  num_slots = Squeeze (num_slots_1d, zero)
  order = Range (scalar_zero, num_slots, scalar_one)
  my_place = Unsqueeze (order, one)
  other_place = Unsqueeze (order, zero)
  is_likelier = Greater (other, mine)
  is_equal = Equal (other, mine)
  is_earlier = Less (other_place, my_place)
  wins_tie = And (is_equal, is_earlier)
  is_better = Or (is_likelier, wins_tie)
  better = Cast <to = 6> (is_better)
  rank = ReduceSum <keepdims = 0> (better, one)

  num_floors = ReduceSum <keepdims = 1> (floors, zero)
  left = Sub (draft_budget, num_floors)
  is_within = Less (rank, left)
  shape_by_position = Shape (key_by_position)
  is_within_by_position = Reshape (is_within, shape_by_position)
  is_within_2d = Transpose <perm = [1, 0]> (is_within_by_position)
  is_admitted = And (is_within_2d, is_candidate)
  admitted = Cast <to = 6> (is_admitted)
  num_admitted = ReduceSum <keepdims = 0> (admitted, one)
  verify_lens = Add (floors, num_admitted)

  row_lens = Add (base_lens, verify_lens)
  ends = CumSum (row_lens, scalar_zero)
  cu_seqlens = Concat <axis = 0> (i_zero_1d, ends)

  stride = Constant <value = int32 {{{stride}}}> ()
  i_minus_one = Constant <value = int32 {{-1}}> ()
  num_rows_1d = Shape (base_lens)
  num_rows = Squeeze (num_rows_1d, zero)
  capacity = Add (num_slots, num_rows)
  packed_64 = Range (scalar_zero, capacity, scalar_one)
  packed = Cast <to = 6> (packed_64)
  packed_column = Unsqueeze (packed, one)
  end_row = Unsqueeze (ends, zero)
  is_past = GreaterOrEqual (packed_column, end_row)
  past = Cast <to = 6> (is_past)
  row = ReduceSum <keepdims = 0> (past, one)
  start = Gather (cu_seqlens, row)
  offset = Sub (packed, start)
  first = Mul (row, stride)
  index = Add (first, offset)
  num_rows_32 = Cast <to = 6> (num_rows)
  is_packed = Less (row, num_rows_32)
  pack_index = Where (is_packed, index, i_minus_one)
}}
"""

# Slot b of the cache takes the packed rows cu[b] … cu[b+1]−1 from position write_positions[b] on.
_KV_CACHE_UPDATE = """
<opset_import: ["" : {opset}], domain: "{domain}">
TRT_KVCacheUpdate <update_form> (cache, update, write_positions, cu) => (updated) {{
  zero = Constant <value_ints = [0]> ()
  one = Constant <value_ints = [1]> ()
  scalar_zero = Constant <value_int = 0> ()
  scalar_one = Constant <value_int = 1> ()
  last = Constant <value_ints = [9223372036854775807]> ()
  tokens_and_heads = Constant <value_ints = [1, 2]> ()
  tokens_and_last = Constant <value_ints = [0, 2]> ()
  num_tokens_1d = Shape <start = 0, end = 1> (update)
  num_tokens = Squeeze (num_tokens_1d, zero)
  num_heads_1d = Shape <start = 1, end = 2> (update)
  num_heads = Squeeze (num_heads_1d, zero)
  tokens = Range (scalar_zero, num_tokens, scalar_one)
  heads = Range (scalar_zero, num_heads, scalar_one)
  bounds = Cast <to = 7> (cu)
  writes = Cast <to = 7> (write_positions)
  ends = Slice (bounds, one, last, zero)
  token_column = Unsqueeze (tokens, one)
  end_row = Unsqueeze (ends, zero)
  is_past = GreaterOrEqual (token_column, end_row)
  past = Cast <to = 7> (is_past)
  slots = ReduceSum <keepdims = 0> (past, one)
  starts = Gather (bounds, slots)
  offsets = Sub (tokens, starts)
  first_positions = Gather (writes, slots)
  positions = Add (first_positions, offsets)
  index_shape = Concat <axis = 0> (num_tokens_1d, num_heads_1d, one)
  slots_3d = Unsqueeze (slots, tokens_and_heads)
  heads_3d = Unsqueeze (heads, tokens_and_last)
  positions_3d = Unsqueeze (positions, tokens_and_heads)
  slot_index = Expand (slots_3d, index_shape)
  head_index = Expand (heads_3d, index_shape)
  position_index = Expand (positions_3d, index_shape)
  index = Concat <axis = 2> (slot_index, head_index, position_index)
  updated = ScatterND (cache, index, update)
}}
"""

# Query m of M sees the keys 0 … kv_lens[b] − M + m: the last query of a slot sees all of them.
_ATTENTION = """
<opset_import: ["" : {opset}], domain: "{domain}">
TRT_Attention <causal_kind> (q, k, v, mask, q_lens, kv_lens) => (y) {{
  zero = Constant <value_ints = [0]> ()
  scalar_zero = Constant <value_int = 0> ()
  scalar_one = Constant <value_int = 1> ()
  all_but_rows = Constant <value_ints = [1, 2, 3]> ()
  all_but_queries = Constant <value_ints = [0, 1, 3]> ()
  all_but_keys = Constant <value_ints = [0, 1, 2]> ()
  num_queries_1d = Shape <start = 2, end = 3> (q)
  num_keys_1d = Shape <start = 2, end = 3> (k)
  num_queries = Squeeze (num_queries_1d, zero)
  num_keys = Squeeze (num_keys_1d, zero)
  query_range = Range (scalar_zero, num_queries, scalar_one)
  key_range = Range (scalar_zero, num_keys, scalar_one)
  lens = Cast <to = 7> (kv_lens)
  lens_4d = Unsqueeze (lens, all_but_rows)
  queries = Unsqueeze (query_range, all_but_queries)
  keys = Unsqueeze (key_range, all_but_keys)
  before = Sub (lens_4d, num_queries)
  last_visible = Add (queries, before)
  is_visible = LessOrEqual (keys, last_visible)
  y = Attention <scale = 1.0> (q, k, v, is_visible)
}}
"""


def score_drafts_function(*, has_allowed_mask: bool = False) -> FunctionProto:
    """``ScoreDrafts(draft_logits [R,P,V], temperature [R], coefficients [1+K], position [1] int32,
    draft_lens [R] int32[, allowed_mask [R,V] bool]) → features [R,P,1] f32, confidence [R,P] f32``;
    attributes ``vocab_size``, ``feature_bound`` and ``temperature_floor``.

    A function body cannot ask whether an optional input is there, so a file holds the one form it needs.
    """
    return _parse(
        _SCORE_DRAFTS,
        DOMAIN,
        mask_input=", allowed_mask" if has_allowed_mask else "",
        masked="_unmasked" if has_allowed_mask else "",
        mask_lines=_MASK_LINES if has_allowed_mask else "",
    )


def trim_drafts_function(num_positions: int) -> FunctionProto:
    """``TrimDrafts(confidence [R,K] f32, draft_lens, base_lens, min_verify_lens [R] int32, draft_budget
    [1] int32) → survival [R,K] f32, verify_lens [R] int32, cu_seqlens [R+1] int32, pack_index
    [R·(K+1)] int32``; ``pack_index`` has the stride K + 1 and is defined where base_lens ≤ 1.

    K is fixed, because the product over positions is written out; R·K ≤ ``MAX_TRIM_SLOTS``.
    """
    names = [f"product_{i}" for i in range(num_positions)]
    lines: list[str] = []
    for i, name in enumerate(names):
        lines.append(f"  begin_{i} = Constant <value_ints = [{i}]> ()")
        lines.append(f"  end_{i} = Constant <value_ints = [{i + 1}]> ()")
        lines.append(f"  p_{i} = Slice (p, begin_{i}, end_{i}, one)")
        if i == 0:
            lines.append(f"  {name} = Identity (p_0)")
            continue
        lines.append(f"  raw_{i} = Mul ({names[i - 1]}, p_{i})")
        lines.append(f"  is_normal_{i} = GreaterOrEqual (raw_{i}, tiny)")
        lines.append(f"  {name} = Where (is_normal_{i}, raw_{i}, f_zero)")
    return _parse(
        _TRIM_DRAFTS,
        DOMAIN,
        num_positions=num_positions,
        stride=num_positions + 1,
        positions=", ".join(map(str, range(num_positions))),
        tiny=repr(float(np.finfo(np.float32).tiny)),
        products="\n".join(lines),
        product_names=", ".join(names),
    )


def kv_cache_update_function() -> FunctionProto:
    """``TRT_KVCacheUpdate(cache [B,H,S,D], update [T,H,D], write_positions [B] int32, cu [B+1] int32)``
    in the form ``packed_nhd``. Writing behind S is an error here; TensorRT ignores it silently."""
    return _parse(_KV_CACHE_UPDATE, TRT_DOMAIN)


def attention_function() -> FunctionProto:
    """``TRT_Attention(q [B,H,M,D] already scaled, k, v [B,Hk,S,D], –, –, kv_lens [B] int32)`` of the
    causal kind ``lower_right``. A query that sees no key has an undefined result."""
    return _parse(_ATTENTION, TRT_DOMAIN)


def _parse(text: str, domain: str, **values: object) -> FunctionProto:
    from onnx import parser

    return parser.parse_function(text.format(opset=OPSET, domain=domain, **values))
