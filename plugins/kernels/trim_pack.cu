// Which drafts are verified, and where each row of the next verify pass comes from: one block, one launch.
//
// One thread holds one request and its survivals, the left-to-right products of its confidences. The order
// of slots is survival descending, position ascending, request ascending. The best slots of the batch are
// those from one survival on, which is found ten bits at a time by counting; where that survival is shared
// by more slots than the budget has left, these are ranked by position and request.
//
// Invariants: lengths are bit-equal to the NumPy definition for equal confidences; floors are admitted
// first; what is admitted is a prefix of each draft; at most MAX_ROWS requests of MAX_POSITIONS drafts.

#include "intrinsics.cuh"
#include "pack.cuh"

constexpr int MAX_POSITIONS = 16;
constexpr int STAGED_ROWS = 8;

// The bits of a survival, a float in [0, 1], are three digits.
constexpr int DIGIT_BITS = 10, DIGITS = 1 << DIGIT_BITS, SURVIVAL_BITS = 30;
constexpr unsigned DIGIT_MASK = DIGITS - 1;
constexpr int COUNTING_THREADS = DIGITS / 4;

// Sum over the block of a value whose total fits its type; every thread gets it.
__device__ __forceinline__ unsigned block_sum(unsigned value, unsigned* of_warp) {
  const int lane = threadIdx.x % WARP_SIZE;
  const unsigned sum = __reduce_add_sync(WHOLE_WARP, value);
  if (lane == 0) of_warp[threadIdx.x / WARP_SIZE] = sum;
  __syncthreads();
  return __reduce_add_sync(WHOLE_WARP, lane < blockDim.x / WARP_SIZE ? of_warp[lane] : 0u);
}

// Writes one row of `positions` values a thread, from registers through `staged`, so that stores are
// contiguous: STAGED_ROWS rows of each warp at a time.
template <int POSITIONS>
__device__ __forceinline__ void store_rows(const float (&values)[POSITIONS], int rows, int positions,
                                           float* __restrict__ destination,
                                           float (*staged)[STAGED_ROWS * MAX_POSITIONS]) {
  const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
#pragma unroll
  for (int first = 0; first < WARP_SIZE; first += STAGED_ROWS) {
    const int first_row = warp * WARP_SIZE + first;
    const int count = min(max(rows - first_row, 0), STAGED_ROWS) * positions;
    __syncwarp();
    if (lane / STAGED_ROWS == first / STAGED_ROWS) {
#pragma unroll
      for (int i = 0; i < POSITIONS; ++i)
        if (i < positions) staged[warp][(lane - first) * positions + i] = values[i];
    }
    __syncwarp();
    for (int i = lane; i < count; i += WARP_SIZE)
      destination[first_row * positions + i] = staged[warp][i];
  }
}

// Where the `quota`-th greatest of the counted digits lies.
struct Cut {
  unsigned digit;
  int above, at;  // keys with greater digits, keys with this one
};

// `counts` [DIGITS] are 0 afterwards. Called by the whole block behind a barrier; 0 < quota <= all keys.
__device__ __forceinline__ Cut find_cut(unsigned* counts, int quota, unsigned* of_warp, Cut* found) {
  const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
  const bool counts_four = threadIdx.x < COUNTING_THREADS;
  unsigned four[4] = {};
  unsigned sum = 0, from_here = 0;  // own digits; these and those of higher lanes
  if (counts_four) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      four[k] = counts[threadIdx.x * 4 + k];
      counts[threadIdx.x * 4 + k] = 0;
      sum += four[k];
    }
    from_here = sum;
#pragma unroll
    for (int step = 1; step < WARP_SIZE; step *= 2) {
      const unsigned higher = __shfl_down_sync(WHOLE_WARP, from_here, step);
      if (lane + step < WARP_SIZE) from_here += higher;
    }
    if (lane == 0) of_warp[warp] = from_here;
  }
  __syncthreads();
  if (counts_four) {
    const bool is_higher = lane > warp && lane < COUNTING_THREADS / WARP_SIZE;
    int above = from_here - sum + __reduce_add_sync(WHOLE_WARP, is_higher ? of_warp[lane] : 0u);
#pragma unroll
    for (int k = 3; k >= 0; --k) {
      const int at = four[k];
      if (above < quota && quota <= above + at) *found = {threadIdx.x * 4 + k, above, at};
      above += at;
    }
  }
  __syncthreads();
  return *found;
}

// Whether all eligible slots of the block have the same survival; there is one at least.
template <int POSITIONS>
__device__ __forceinline__ bool are_equal(const unsigned (&survivals)[POSITIONS], unsigned eligible,
                                          unsigned (*of_warp)[MAX_WARPS]) {
  const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
  unsigned least = 0xFFFFFFFFu, greatest = 0;
#pragma unroll
  for (int i = 0; i < POSITIONS; ++i) {
    if (!(eligible >> i & 1u)) continue;
    least = min(least, survivals[i]);
    greatest = max(greatest, survivals[i]);
  }
  least = __reduce_min_sync(WHOLE_WARP, least);
  greatest = __reduce_max_sync(WHOLE_WARP, greatest);
  if (lane == 0) {
    of_warp[0][warp] = least;
    of_warp[1][warp] = greatest;
  }
  __syncthreads();
  const bool exists = lane < blockDim.x / WARP_SIZE;
  return __reduce_min_sync(WHOLE_WARP, exists ? of_warp[0][lane] : 0xFFFFFFFFu) ==
         __reduce_max_sync(WHOLE_WARP, exists ? of_warp[1][lane] : 0u);
}

// The `quota` first of equal slots, by position and then by request, as a mask of each thread's slots.
template <int POSITIONS>
__device__ __forceinline__ unsigned select_first(unsigned eligible, int quota,
                                                 unsigned (*of_warp)[MAX_WARPS]) {
  const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
#pragma unroll
  for (int i = 0; i < POSITIONS; ++i) {
    const unsigned here = __ballot_sync(WHOLE_WARP, eligible >> i & 1u);
    if (lane == 0) of_warp[i][warp] = __popc(here);
  }
  __syncthreads();
  unsigned admitted = 0;
  int before = 0;  // slots of lower positions
#pragma unroll
  for (int i = 0; i < POSITIONS; ++i) {
    const unsigned here = __ballot_sync(WHOLE_WARP, eligible >> i & 1u);
    const unsigned count = lane < blockDim.x / WARP_SIZE ? of_warp[i][lane] : 0u;
    const int rank = before + __reduce_add_sync(WHOLE_WARP, lane < warp ? count : 0u) +
                     __popc(here & (1u << lane) - 1);
    if (rank < quota) admitted |= eligible & 1u << i;
    before += __reduce_add_sync(WHOLE_WARP, count);
  }
  return admitted;
}

// The `quota` best of `candidates` eligible slots of the block, as a mask of each thread's slots. `counts` are
// 0 before and after, with a barrier since.
template <int POSITIONS>
__device__ __forceinline__ unsigned select_greatest(const unsigned (&survivals)[POSITIONS],
                                                    unsigned eligible, int candidates, int quota,
                                                    unsigned* counts, unsigned (*of_warp)[MAX_WARPS],
                                                    Cut* found) {
  unsigned admitted = 0;
  for (int shift = SURVIVAL_BITS - DIGIT_BITS; shift >= 0; shift -= DIGIT_BITS) {
    unsigned digits[POSITIONS];
#pragma unroll
    for (int i = 0; i < POSITIONS; ++i) {
      digits[i] = survivals[i] >> shift & DIGIT_MASK;
      if (eligible >> i & 1u) atomicAdd(counts + digits[i], 1u);
    }
    __syncthreads();
    const Cut cut = find_cut(counts, quota, of_warp[0], found);
#pragma unroll
    for (int i = 0; i < POSITIONS; ++i) {
      const unsigned bit = eligible & 1u << i;
      if (digits[i] > cut.digit) admitted |= bit;
      if (digits[i] != cut.digit) eligible &= ~bit;
    }
    quota -= cut.above;
    if (quota == cut.at) return admitted | eligible;
    // A digit that all candidates share suggests that they are equal, as saturated confidences are.
    if (cut.at == candidates && are_equal(survivals, eligible, of_warp)) break;
    candidates = cut.at;
  }
  __syncthreads();  // all have read `of_warp`
  return admitted | select_first<POSITIONS>(eligible, quota, of_warp);
}

template <int POSITIONS>
__device__ __forceinline__ void trim_pack(
    const float* __restrict__ confidence, const int* __restrict__ draft_lens,
    const int* __restrict__ base_lens, const int* __restrict__ min_verify_lens,
    const int* __restrict__ draft_budget, int rows, int positions, float* __restrict__ survival,
    int* __restrict__ verify_lens, int* __restrict__ cu_seqlens, int* __restrict__ pack_index,
    int stride, int capacity, const Gather& gather) {
  __shared__ int starts[MAX_ROWS + 1], bases[MAX_ROWS], lengths_of_warp[MAX_WARPS];
  __shared__ unsigned of_warp[MAX_POSITIONS][MAX_WARPS], counts[DIGITS];
  __shared__ Request requests[MAX_ROWS];
  __shared__ float staged[MAX_WARPS][STAGED_ROWS * MAX_POSITIONS];
  __shared__ unsigned char nonempty[MAX_WARPS][WARP_SIZE];
  __shared__ Cut found;

  const int row = threadIdx.x;
  const bool exists = row < rows;
  const int budget = draft_budget[0];
  float p[POSITIONS];
#pragma unroll
  for (int i = 0; i < POSITIONS; ++i)
    p[i] = exists && i < positions ? confidence[row * positions + i] : 0.0f;
  const int base = exists ? base_lens[row] : 0;
  int drafted = exists ? draft_lens[row] : 0;
  int floor = exists ? min_verify_lens[row] : 0;
  if (exists && gather.token_ids != nullptr) requests[row] = load_request(gather, row);
  if (threadIdx.x < COUNTING_THREADS)
    for (int k = 0; k < 4; ++k) counts[threadIdx.x * 4 + k] = 0;

  drafted = base > 0 ? min(max(drafted, 0), positions) : 0;
  floor = min(max(floor, 0), drafted);

  unsigned survivals[POSITIONS];  // as bits, which order like the floats from 0 to 1
  float product = 1.0f;
#pragma unroll
  for (int i = 0; i < POSITIONS; ++i) {
    const float factor = p[i] >= FLOAT_TINY ? fminf(p[i], 1.0f) : 0.0f;  // NaN becomes 0
    product = __fmul_rn(product, factor);
    if (product < FLOAT_TINY) product = 0.0f;
    p[i] = i < drafted ? product : 0.0f;
    survivals[i] = __float_as_uint(product);
  }

  store_rows(p, rows, positions, survival, staged);

  const unsigned eligible = (1u << drafted) - (1u << floor);
  const unsigned totals = block_sum(floor | drafted << 16, of_warp[0]);
  const int floors = totals & 0xFFFFu, drafts = totals >> 16;
  const int quota = min(max(budget, floors), drafts) - floors;
  unsigned admitted = 0;
  if (quota == drafts - floors)
    admitted = eligible;
  else if (quota > 0)
    admitted =
        select_greatest(survivals, eligible, drafts - floors, quota, counts, of_warp, &found);
  const int verified = floor + __popc(admitted);

  if (exists) {
    verify_lens[row] = verified;
    bases[row] = base;
  }
  scan_lengths(base + verified, rows, starts, lengths_of_warp);
  if (exists) cu_seqlens[row + 1] = starts[row + 1];
  if (row == 0) cu_seqlens[0] = 0;
  if (pack_index == nullptr) return;
  if (gather.token_ids == nullptr)
    pack<false>(starts, bases, requests, nonempty, rows, stride, capacity, pack_index, gather);
  else
    pack<true>(starts, bases, requests, nonempty, rows, stride, capacity, pack_index, gather);
}

// One block of a multiple of 32 threads, COUNTING_THREADS or more and at least one a row. `pack_index` may
// be null.
#define TRIM_PACK_KERNEL(NAME, POSITIONS)                                                               \
  extern "C" __global__ void __launch_bounds__(MAX_ROWS, 1)                                                \
      NAME(const float* confidence, const int* draft_lens, const int* base_lens,                        \
           const int* min_verify_lens, const int* draft_budget, int rows, int positions,                \
           float* survival, int* verify_lens, int* cu_seqlens, int* pack_index, int stride,             \
           int capacity, Gather gather) {                                                               \
    trim_pack<POSITIONS>(confidence, draft_lens, base_lens, min_verify_lens, draft_budget, rows,        \
                         positions, survival, verify_lens, cu_seqlens, pack_index, stride, capacity,    \
                         gather);                                                                       \
  }

TRIM_PACK_KERNEL(trim_pack_4, 4)
TRIM_PACK_KERNEL(trim_pack_8, 8)
TRIM_PACK_KERNEL(trim_pack_16, 16)

// Packing alone, for lengths that are given; launched like the kernels above.
extern "C" __global__ void __launch_bounds__(MAX_ROWS, 1)
    pack_lengths(const int* __restrict__ base_lens, const int* __restrict__ verify_lens, int rows,
                 int stride, int capacity, int* __restrict__ pack_index) {
  __shared__ int starts[MAX_ROWS + 1], bases[MAX_ROWS], lengths_of_warp[MAX_WARPS];
  __shared__ unsigned char nonempty[MAX_WARPS][WARP_SIZE];
  const int row = threadIdx.x;
  const int base = row < rows ? base_lens[row] : 0;
  if (row < rows) bases[row] = base;
  scan_lengths(row < rows ? base + verify_lens[row] : 0, rows, starts, lengths_of_warp);
  pack<false>(starts, bases, nullptr, nonempty, rows, stride, capacity, pack_index, Gather{});
}
