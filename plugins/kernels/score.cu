// Confidence of drafts from the drafter's logits, in one pass over them.
//
// Feature: log-odds of the top token, log(q_max / (1 - q_max)) = -log(sum over the others of
// exp((x - top) / T)). Invariants: the sum never contains the top token, so nothing cancels; a row with
// NaN, +inf or only -inf among its allowed tokens gives feature 0 and confidence 0; dead slots are not
// read; results do not depend on the order in which blocks finish.
//
// Each thread keeps the maxima of its 16-byte lane apart (`tops`) and adds whatever a larger value
// displaces to `rest`, which counts relative to `reference`. The reference follows the maximum only when
// it falls behind by 2^HEADROOM, so rescaling is rare and cannot overflow.

#include "intrinsics.cuh"

constexpr int THREADS = 256;
constexpr int UNROLL = 4;             // 16-byte loads of a thread on their way at once
constexpr int RESIDENT_BLOCKS = 5;    // on one multiprocessor
constexpr int WORDS = 4;  // of a 16-byte load
constexpr float HEADROOM = 60.0f;

// The maximum of some values and the sum of exp((x - top) / T) over the others.
struct Scored {
  float top, rest;
};

struct Shape {
  int64 row_stride, column_stride, mask_stride;  // elements of logits, elements of logits, bytes
  int columns, positions, vocab_size, vectors_per_split;
};

// Over each group of LANES neighbouring lanes; a lane without values has {-inf, 0}.
template <int LANES>
__device__ __forceinline__ Scored merge_lanes(Scored own, float scale) {
  constexpr unsigned GROUP = LANES == WARP_SIZE ? WHOLE_WARP : (1u << LANES % WARP_SIZE) - 1;
  const int first = threadIdx.x % WARP_SIZE / LANES * LANES;
  const float top = warp_max_or_nan<LANES>(own.top);
  const bool is_top = own.top == top;
  const float part = is_top ? own.rest : (own.rest + 1.0f) * exp2_fast((own.top - top) * scale);
  const int tops = __popc(__ballot_sync(WHOLE_WARP, is_top) >> first & GROUP);
  return {top, warp_sum<LANES>(part) + static_cast<float>(tops - 1)};  // of equal maxima all but one count
}

template <class Format>
__device__ __forceinline__ uint4 forbid_masked(uint4 v, const unsigned char* allowed) {
  unsigned* words = &v.x;
#pragma unroll
  for (int w = 0; w < WORDS; ++w) {
    unsigned keep = 0;
#pragma unroll
    for (int h = 0; h < Format::PER_WORD; ++h) {
      const unsigned bits = Format::PER_WORD == 1 ? 0xFFFFFFFFu : 0xFFFFu << (16 * h);
      keep |= allowed[w * Format::PER_WORD + h] ? bits : 0u;
    }
    words[w] = (words[w] & keep) | (Format::MINUS_INFINITY & ~keep);
  }
  return v;
}

template <class Format>
struct Running {
  unsigned tops[WORDS];
  float rest = 0.0f, reference = -FLOAT_MAX;

  __device__ __forceinline__ Running() {
#pragma unroll
    for (int w = 0; w < WORDS; ++w) tops[w] = Format::MINUS_INFINITY;
  }

  __device__ __forceinline__ float top() const {
    float y = Format::value(tops[0], 0);
#pragma unroll
    for (int w = 0; w < WORDS; ++w)
#pragma unroll
      for (int h = 0; h < Format::PER_WORD; ++h) y = max_or_nan(y, Format::value(tops[w], h));
    return y;
  }

  template <int COUNT>
  __device__ __forceinline__ void add(uint4 (&vectors)[COUNT], float scale) {
#pragma unroll
    for (int u = 0; u < COUNT; ++u) {
      unsigned* words = &vectors[u].x;
#pragma unroll
      for (int w = 0; w < WORDS; ++w) {
        const unsigned displaced = Format::smaller(tops[w], words[w]);
        tops[w] = Format::larger(tops[w], words[w]);
        words[w] = displaced;
      }
    }
    unsigned highest = Format::larger(Format::larger(tops[0], tops[1]),
                                      Format::larger(tops[2], tops[3]));
    const float top = Format::PER_WORD == 1
                          ? Format::value(highest, 0)
                          : fmaxf(Format::value(highest, 0), Format::value(highest, 1));
    if ((top - reference) * scale > HEADROOM) {
      rest *= exp2_fast((reference - top) * scale);
      reference = top;
    }
    float sums[Format::PER_WORD] = {};
#pragma unroll
    for (int u = 0; u < COUNT; ++u) {
      const unsigned* words = &vectors[u].x;
#pragma unroll
      for (int w = 0; w < WORDS; ++w)
#pragma unroll
        for (int h = 0; h < Format::PER_WORD; ++h)
          sums[h] += exp2_fast((Format::value(words[w], h) - reference) * scale);
    }
#pragma unroll
    for (int h = 0; h < Format::PER_WORD; ++h) rest += sums[h];
  }

  // All values of the thread and one more: the maximum, and the others relative to it.
  __device__ __forceinline__ Scored finish(float last, float scale) const {
    float top = last, sum = rest;
#pragma unroll
    for (int w = 0; w < WORDS; ++w)
#pragma unroll
      for (int h = 0; h < Format::PER_WORD; ++h) {
        const float x = Format::value(tops[w], h);
        sum += exp2_fast((fminf(top, x) - reference) * scale);
        top = max_or_nan(top, x);
      }
    if (top >= -FLOAT_MAX) sum *= exp2_fast((reference - top) * scale);
    return {top, sum};
  }
};

__device__ __forceinline__ float confidence_of(float log_odds) {
  return is_finite(log_odds) ? 1.0f / (1.0f + expf(-log_odds)) : 0.0f;
}

template <class Format, bool IS_MASKED>
__device__ __forceinline__ void score(const char* __restrict__ logits, const Shape& shape,
                                      const float* __restrict__ temperature, float temperature_floor,
                                      const float* __restrict__ coefficients, float feature_bound,
                                      const int* __restrict__ position,
                                      const unsigned char* __restrict__ allowed_mask,
                                      const int* __restrict__ draft_lens, uint64* mailboxes,
                                      float* features, float* confidence) {
  constexpr int PER_VECTOR = WORDS * Format::PER_WORD;
  const int splits = gridDim.x, split = blockIdx.x, column = blockIdx.y, row = blockIdx.z;
  const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
  const int slot = row * shape.columns + column;
  // A small launch takes little longer than its chain of dependent loads: these three are asked for
  // together, and where blocks share a row, its first logits before it is known to be alive.
  const int drafted = draft_lens != nullptr ? load_now(draft_lens + row) : 0x7FFFFFFF;
  const int depth = load_now(position) + column;
  float t = load_now(temperature + row);
  if (splits == 1 && depth >= drafted) {
    if (threadIdx.x == 0) features[slot] = confidence[slot] = 0.0f;
    return;
  }

  // The row is a few single values up to a 16-byte boundary, whole vectors, and a few single values.
  const char* values = logits + (row * shape.row_stride + column * shape.column_stride) * Format::BYTES;
  const unsigned char* allowed = IS_MASKED ? allowed_mask + row * shape.mask_stride : nullptr;
  const int misaligned = static_cast<int>(reinterpret_cast<uint64>(values) % 16);
  const int head = min((16 - misaligned) % 16 / Format::BYTES, shape.vocab_size);
  const int vectors = (shape.vocab_size - head) / PER_VECTOR;
  const int tail = head + vectors * PER_VECTOR;
  const int end = min(vectors, (split + 1) * shape.vectors_per_split);
  const auto load_batch = [&](uint4 (&batch)[UNROLL], int first) {
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      const int v = first + u * THREADS;
      batch[u] = make_uint4(Format::MINUS_INFINITY, Format::MINUS_INFINITY, Format::MINUS_INFINITY,
                            Format::MINUS_INFINITY);
      if (v < end) {
        const int index = head + v * PER_VECTOR;
        batch[u] = load_once(values + static_cast<int64>(index) * Format::BYTES);
        if (IS_MASKED) batch[u] = forbid_masked<Format>(batch[u], allowed + index);
      }
    }
  };
  constexpr int BATCH = THREADS * UNROLL;
  uint4 batch[UNROLL];
  int first = split * shape.vectors_per_split + threadIdx.x;
  load_batch(batch, first);
  if (depth >= drafted) {
    if (split == 0 && threadIdx.x == 0) features[slot] = confidence[slot] = 0.0f;
    return;
  }
  float single = -infinity();
  if (split == 0) {
    const int index = threadIdx.x < head ? threadIdx.x : threadIdx.x - head + tail;
    if (index < shape.vocab_size && (!IS_MASKED || allowed[index]))
      single = Format::load(values, index);
  }
  const int last_position = shape.positions - 1;
  const float slope = load_now(coefficients);
  const float intercept = load_now(coefficients + 1 + min(max(depth, 0), last_position));
  t = t == 0.0f ? 1.0f : max_or_nan(t, temperature_floor);
  const float scale = LOG2_E * reciprocal_now(t);

  Running<Format> running;
  while (true) {
    running.add(batch, scale);
    first += BATCH;
    if (first >= end) break;
    load_batch(batch, first);
  }

  constexpr int WARPS = THREADS / WARP_SIZE;
  __shared__ Scored of_warp[WARPS];
  Scored scored = merge_lanes<WARP_SIZE>(running.finish(single, scale), scale);
  if (lane == 0) of_warp[warp] = scored;
  __syncthreads();
  if (warp != 0) return;
  scored = merge_lanes<WARPS>(of_warp[lane % WARPS], scale);
  if (splits > 1) {
    uint64* mailbox = mailboxes + slot * splits;
    if (split != splits - 1) {
      if (lane == 0) send(mailbox + split, scored.top, scored.rest);
      return;
    }
    if (lane != split) scored = {-infinity(), 0.0f};
    if (lane < split) {
      const float2 message = receive(mailbox + lane);
      scored = {message.x, message.y};
    }
    scored = merge_lanes<WARP_SIZE>(scored, scale);
  }
  if (lane != 0) return;
  if (!is_finite(scored.top) || !(scored.rest >= 0.0f)) {  // or a temperature that is no number
    features[slot] = confidence[slot] = 0.0f;
    return;
  }
  const float feature = fminf(fmaxf(-logf(scored.rest), -feature_bound), feature_bound);
  features[slot] = feature;
  confidence[slot] = confidence_of(intercept + slope * feature);
}

// Grid (splits <= 32, columns, rows), THREADS threads. `mailboxes` [rows * columns * splits] are 0
// before and after; null for one split.
#define SCORE_KERNEL(NAME, FORMAT, IS_MASKED)                                                          \
  extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT_BLOCKS)                            \
      NAME(const char* logits, Shape shape, const float* temperature, float temperature_floor,         \
           const float* coefficients, float feature_bound, const int* position,                        \
           const unsigned char* allowed_mask, const int* draft_lens, uint64* mailboxes,                \
           float* features, float* confidence) {                                                       \
    score<FORMAT, IS_MASKED>(logits, shape, temperature, temperature_floor, coefficients,              \
                             feature_bound, position, allowed_mask, draft_lens, mailboxes, features,   \
                             confidence);                                                              \
  }

SCORE_KERNEL(score_bf16, BFloat16, false)
SCORE_KERNEL(score_f16, Float16, false)
SCORE_KERNEL(score_f32, Float32, false)
SCORE_KERNEL(score_masked_bf16, BFloat16, true)
SCORE_KERNEL(score_masked_f16, Float16, true)
SCORE_KERNEL(score_masked_f32, Float32, true)

// Confidence [rows, columns] from given features [rows, columns, num_features]; one thread a slot.
extern "C" __global__ void score_features(const float* __restrict__ features,
                                          const float* __restrict__ coefficients,
                                          const int* __restrict__ position, int slots, int columns,
                                          int num_features, int positions, float* confidence) {
  const int slot = blockIdx.x * blockDim.x + threadIdx.x;
  if (slot >= slots) return;
  const int depth = min(max(position[0] + slot % columns, 0), positions - 1);
  float log_odds = coefficients[num_features + depth];
  for (int k = 0; k < num_features; ++k)
    log_odds += coefficients[k] * features[static_cast<int64>(slot) * num_features + k];
  confidence[slot] = confidence_of(log_odds);
}
