// Labels and statistics of a round, and the overlap of two distributions.
//
// Invariants: every sum is taken in an order that depends on the shapes alone, so equal inputs give equal
// bits on every run; non-finite features and unlabelled positions add nothing.

#include "intrinsics.cuh"

constexpr double CURVATURE_FLOOR = 0.125;
constexpr int NUM_STATISTICS = 6;
constexpr int STATISTICS_THREADS = 256;
constexpr int OVERLAP_THREADS = 256;
constexpr int OVERLAP_UNROLL = 4;

// labels [rows, positions]: one thread a slot. `confidence` may be null.
extern "C" __global__ void label_drafts(const int* __restrict__ draft_lens,
                                        const int* __restrict__ verify_lens,
                                        const int* __restrict__ accepted_lens,
                                        const int* __restrict__ trainable_lens,
                                        const float* __restrict__ overlap,
                                        const float* __restrict__ confidence, int slots,
                                        int positions, float* labels) {
  const int slot = blockIdx.x * blockDim.x + threadIdx.x;
  if (slot >= slots) return;
  const int row = slot / positions, i = slot % positions;
  const int drafted = draft_lens[row], verified = verify_lens[row], accepted = accepted_lens[row];
  float label = __int_as_float(0x7FC00000);  // NaN: nothing learned
  if (i < accepted)
    label = 1.0f;
  else if (i == accepted && i < drafted)
    label = accepted < verified ? 0.0f : overlap[row];
  if (i >= trainable_lens[row] || (confidence != nullptr && !(confidence[slot] > 0.0f)))
    label = __int_as_float(0x7FC00000);
  labels[slot] = label;
}

// statistics [positions, 6]: one block of STATISTICS_THREADS a position.
extern "C" __global__ void __launch_bounds__(STATISTICS_THREADS, 1)
    accumulate_statistics(const float* __restrict__ features, const float* __restrict__ labels,
                          const float* __restrict__ coefficients, int rows, int positions,
                          double* statistics) {
  __shared__ double of_warp[STATISTICS_THREADS / WARP_SIZE][NUM_STATISTICS];
  const int position = blockIdx.x, lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
  const double slope = coefficients[0], intercept = coefficients[1 + position];
  double sums[NUM_STATISTICS] = {};
  for (int row = threadIdx.x; row < rows; row += STATISTICS_THREADS) {
    const float feature = features[row * positions + position];
    const float label = labels[row * positions + position];
    if (!is_finite(feature) || !is_finite(label)) continue;
    const double f = feature, y = label, log_odds = intercept + slope * f;
    const double p = log_odds - log_odds == 0.0 ? 1.0 / (1.0 + exp(-log_odds)) : 0.0;
    const double weight = fmax(p * (1.0 - p), CURVATURE_FLOOR), residual = y - p;
    const double terms[NUM_STATISTICS] = {weight * f * f, weight * f, weight,
                                          residual * f,   residual,   1.0};
#pragma unroll
    for (int k = 0; k < NUM_STATISTICS; ++k) sums[k] += terms[k];
  }
#pragma unroll
  for (int k = 0; k < NUM_STATISTICS; ++k) {
    sums[k] = warp_sum(sums[k]);
    if (lane == 0) of_warp[warp][k] = sums[k];
  }
  __syncthreads();
  if (threadIdx.x < NUM_STATISTICS) {
    double total = 0.0;
    for (int w = 0; w < STATISTICS_THREADS / WARP_SIZE; ++w) total += of_warp[w][threadIdx.x];
    statistics[position * NUM_STATISTICS + threadIdx.x] = total;
  }
}

// One thread's part of the sum of min(p, q), shared by the blocks of a row.
__device__ __forceinline__ float overlap_of(const float* __restrict__ p,
                                            const float* __restrict__ q, int columns) {
  const int step = OVERLAP_THREADS * gridDim.x;
  const int first = blockIdx.x * OVERLAP_THREADS + threadIdx.x;
  const bool is_aligned = (reinterpret_cast<uint64>(p) | reinterpret_cast<uint64>(q)) % 16 == 0;
  const int vectors = is_aligned ? columns / 4 : 0;
  float sums[OVERLAP_UNROLL] = {};
  for (int v = first; v < vectors; v += step * OVERLAP_UNROLL) {
    float4 a[OVERLAP_UNROLL], b[OVERLAP_UNROLL];
#pragma unroll
    for (int u = 0; u < OVERLAP_UNROLL; ++u) {
      const bool exists = v + u * step < vectors;
      a[u] = b[u] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (exists) {
        a[u] = __ldg(reinterpret_cast<const float4*>(p) + v + u * step);
        b[u] = __ldg(reinterpret_cast<const float4*>(q) + v + u * step);
      }
    }
#pragma unroll
    for (int u = 0; u < OVERLAP_UNROLL; ++u)
      sums[u] += (fminf(a[u].x, b[u].x) + fminf(a[u].y, b[u].y)) +
                 (fminf(a[u].z, b[u].z) + fminf(a[u].w, b[u].w));
  }
  for (int i = 4 * vectors + first; i < columns; i += step) sums[0] += fminf(p[i], q[i]);
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// overlap [rows]: sum of min(p, q) over the columns of row target_rows[r] of `target` and draft_rows[r] of
// `draft`, NaN where either is negative. Grid (splits <= 32, rows), OVERLAP_THREADS threads; `mailboxes`
// [rows * splits] are 0 before and after, null for one split.
extern "C" __global__ void __launch_bounds__(OVERLAP_THREADS, 4)
    overlap_mass(const float* __restrict__ target, const float* __restrict__ draft,
                 const int* __restrict__ target_rows, const int* __restrict__ draft_rows,
                 int64 target_stride, int64 draft_stride, int columns, uint64* mailboxes,
                 float* overlap) {
  __shared__ float of_warp[OVERLAP_THREADS / WARP_SIZE];
  const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
  const int row = blockIdx.y, split = blockIdx.x, splits = gridDim.x;
  const int of_target = target_rows[row], of_draft = draft_rows[row];
  if (of_target < 0 || of_draft < 0) {
    if (split == 0 && threadIdx.x == 0) overlap[row] = __int_as_float(0x7FC00000);
    return;
  }
  float sum = warp_sum(
      overlap_of(target + of_target * target_stride, draft + of_draft * draft_stride, columns));
  if (lane == 0) of_warp[warp] = sum;
  __syncthreads();
  if (warp != 0) return;
  constexpr int WARPS = OVERLAP_THREADS / WARP_SIZE;
  sum = warp_sum<WARPS>(of_warp[lane % WARPS]);
  if (splits > 1) {
    uint64* mailbox = mailboxes + row * splits;
    if (split != splits - 1) {
      if (lane == 0) send(mailbox + split, 0.0f, sum);
      return;
    }
    if (lane != split) sum = lane < split ? receive(mailbox + lane).y : 0.0f;
    sum = warp_sum(sum);
  }
  if (lane == 0) overlap[row] = sum;
}
