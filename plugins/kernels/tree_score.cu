// Log-odds of the children of one level of a draft tree, from the drafter's logits of that level.
//
// The rows of a level are packed by request, then by node with children; row x gives its node's children
// the features log(q_j / (1 - q_j)), q_j being the j-th greatest probability of the row. As for chains the
// sum over the others never contains the top token, so nothing cancels. A row with NaN, +inf or only -inf
// gives NaN: not scored. Two passes over a row: its maxima, then the sum together with the few values
// above the C-th greatest of the threads' maxima, among which are the C greatest.
//
// Invariants: every feature of [requests, nodes - 1] is written once, 0 where this level has no say; rows
// behind `num_rows` are not read; results do not depend on the order in which threads finish.

#include "tree.cuh"

constexpr int THREADS = 1024;
constexpr int WARPS = THREADS / WARP_SIZE;
constexpr int WORDS = 4;  // of a 16-byte load
constexpr int NODE_THREADS = 256;
// Values above the threshold come from MAX_CHILDREN - 1 threads, each with 1/1024 of the vocabulary.
constexpr int MAX_FOUND = 4096;

// Nodes of a tree as words: parent, depth, place among siblings, place among the nodes with children of its
// level counted from 1 (0: a leaf); 0 is a node that no path names. The root has depth 0.
constexpr int DEPTH_SHIFT = 9, SIBLING_SHIFT = 15, INNER_SHIFT = 23;
__device__ __forceinline__ int parent_of(unsigned node) { return node & 0x1FF; }
__device__ __forceinline__ int depth_of(unsigned node) { return node >> DEPTH_SHIFT & 0x3F; }
__device__ __forceinline__ int sibling_of(unsigned node) { return node >> SIBLING_SHIFT & 0xFF; }
__device__ __forceinline__ int inner_of(unsigned node) { return node >> INNER_SHIFT & 0x1FF; }

// One block a request: words of its nodes [requests, nodes], and how many of `level` have children [requests].
extern "C" __global__ void __launch_bounds__(NODE_THREADS)
    tree_nodes(const int* __restrict__ paths, int nodes, int depths, int level, unsigned* words,
               int* counts) {
  __shared__ Tree tree;
  const int request = blockIdx.x;
  decode_tree(paths + static_cast<int64>(request) * nodes * depths, nodes, depths, tree);
  for (int k = threadIdx.x; k < nodes; k += NODE_THREADS) {
    const int depth = tree.depth[k];
    const bool exists = k == 0 || depth > 0;
    int siblings = 0, inner = 0;
    for (int j = 0; j < k; ++j) {
      const bool is_there = j == 0 || tree.depth[j] > 0;
      if (j > 0 && is_there && tree.parent[j] == tree.parent[k]) ++siblings;
      if (is_there && tree.depth[j] == depth && tree.has_child[j]) ++inner;
    }
    const unsigned parent = k > 0 && exists ? tree.parent[k] : 0;
    words[request * nodes + k] = !exists ? 0u
                                         : parent | static_cast<unsigned>(depth) << DEPTH_SHIFT |
                                               static_cast<unsigned>(siblings) << SIBLING_SHIFT |
                                               (tree.has_child[k] ? inner + 1u : 0u) << INNER_SHIFT;
  }
  if (threadIdx.x >= WARP_SIZE) return;
  int count = 0;
  for (int k = threadIdx.x; k < nodes; k += WARP_SIZE)
    if ((k == 0 || tree.depth[k] > 0) && tree.depth[k] == level && tree.has_child[k]) ++count;
  count = __reduce_add_sync(WHOLE_WARP, count);
  if (threadIdx.x == 0) counts[request] = count;
}

// An unsigned number that orders like the float.
__device__ __forceinline__ unsigned ordered(float x) {
  const unsigned bits = __float_as_uint(x);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float from_ordered(unsigned key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7FFFFFFFu : ~key);
}

// Calls `take(value)` for this thread's share of a row of `size` values.
template <class Format, class Take>
__device__ __forceinline__ void for_each_value(const char* __restrict__ values, int size, Take take) {
  constexpr int PER_VECTOR = WORDS * Format::PER_WORD;
  const int misaligned = static_cast<int>(reinterpret_cast<uint64>(values) % 16);
  const int head = min((16 - misaligned) % 16 / Format::BYTES, size);
  const int vectors = (size - head) / PER_VECTOR, tail = head + vectors * PER_VECTOR;
  const uint4* body = reinterpret_cast<const uint4*>(values + static_cast<int64>(head) * Format::BYTES);
#pragma unroll 4
  for (int v = threadIdx.x; v < vectors; v += THREADS) {
    const uint4 vector = body[v];
    const unsigned words[WORDS] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
    for (int w = 0; w < WORDS; ++w)
#pragma unroll
      for (int h = 0; h < Format::PER_WORD; ++h) take(Format::value(words[w], h));
  }
  const int single = static_cast<int>(threadIdx.x) < head ? static_cast<int>(threadIdx.x)
                                                          : static_cast<int>(threadIdx.x) - head + tail;
  if (single < size) take(Format::load(values, single));
}

template <class Format>
__device__ __forceinline__ void score_level(const char* __restrict__ logits, int64 row_stride,
                                            int vocab_size, const int* __restrict__ num_rows,
                                            const unsigned* __restrict__ words,
                                            const int* __restrict__ counts, int nodes, int level,
                                            float feature_bound,
                                            const int* __restrict__ lens, float* features,
                                            int* passed_lens) {
  __shared__ unsigned own[MAX_NODES];
  __shared__ int of_warp[WARPS];
  __shared__ float floats_of_warp[WARPS];
  __shared__ float found[MAX_FOUND], best[MAX_CHILDREN];
  __shared__ int node, num_children, num_found;
  const int place = blockIdx.x, request = blockIdx.y;
  const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;

  if (threadIdx.x == 0) node = num_children = num_found = 0;
  for (int k = threadIdx.x; k < nodes; k += THREADS) own[k] = words[request * nodes + k];
  const bool is_before = static_cast<int>(threadIdx.x) < request;
  const int first = sum_over_block(is_before ? counts[threadIdx.x] : 0, of_warp);  // and a barrier
  const int count = counts[request], row = first + place;
  features += static_cast<int64>(request) * (nodes - 1) - 1;  // node k is draft k - 1
  if (place == 0) {
    if (threadIdx.x == 0) passed_lens[request] = lens[request];
    for (int k = threadIdx.x + 1; k < nodes; k += THREADS) {  // nodes that no block scores
      const unsigned parent = own[parent_of(own[k])];
      if (depth_of(own[k]) != level + 1 || depth_of(parent) != level ||
          inner_of(parent) > static_cast<int>(gridDim.x))
        features[k] = 0.0f;
    }
  }
  if (place >= count) return;

  for (int k = threadIdx.x; k < nodes; k += THREADS)
    if (depth_of(own[k]) == level && inner_of(own[k]) == place + 1) node = k;
  __syncthreads();
  const auto is_child = [&](int k) { return depth_of(own[k]) == level + 1 && parent_of(own[k]) == node; };
  for (int k = threadIdx.x + 1; k < nodes; k += THREADS)
    if (is_child(k)) atomicMax(&num_children, sibling_of(own[k]) + 1);

  const float nothing = -infinity();
  const char* values = logits + row * row_stride * Format::BYTES;
  const bool is_there = row < num_rows[0];
  float own_top = nothing;
  if (is_there)
    for_each_value<Format>(values, vocab_size, [&](float x) { own_top = max_or_nan(own_top, x); });
  float top = warp_max_or_nan(own_top);
  if (lane == 0) floats_of_warp[warp] = top;
  __syncthreads();
  top = warp_max_or_nan(floats_of_warp[lane]);
  if (!is_finite(top)) {
    for (int k = threadIdx.x + 1; k < nodes; k += THREADS)
      if (is_child(k)) features[k] = __int_as_float(0x7FC00000);
    return;
  }

  // The C-th greatest of the threads' maxima; C = 1 needs no list.
  const int wanted = min(num_children, MAX_CHILDREN);
  float threshold = infinity();
  if (wanted > 1) {
    unsigned key = 0;
    for (int bit = 31; bit >= 0; --bit) {
      const unsigned higher = key | 1u << bit;
      if (__syncthreads_count(ordered(own_top) >= higher) >= wanted) key = higher;
    }
    threshold = from_ordered(key);
  }
  float sum = 0.0f;
  int tops = 0;
  for_each_value<Format>(values, vocab_size, [&](float x) {
    if (x == top)
      ++tops;
    else
      sum += exp2_fast((x - top) * LOG2_E);
    if (x > threshold) {
      const int at = atomicAdd(&num_found, 1);
      if (at < MAX_FOUND) found[at] = x;
    }
  });
  sum = warp_sum(sum);
  __syncthreads();  // floats_of_warp has been read
  if (lane == 0) floats_of_warp[warp] = sum;
  tops = sum_over_block(tops, of_warp);
  const float rest = warp_sum(floats_of_warp[lane]) + static_cast<float>(tops - 1);

  const int listed = min(num_found, MAX_FOUND);
  for (int i = threadIdx.x; i < listed; i += THREADS) {
    const float x = found[i];
    int rank = 0;
    for (int j = 0; j < listed; ++j) rank += found[j] > x || (found[j] == x && j < i);
    if (rank < wanted) best[rank] = x;
  }
  for (int i = threadIdx.x + listed; i < wanted; i += THREADS) best[i] = threshold;
  __syncthreads();
  for (int k = threadIdx.x + 1; k < nodes; k += THREADS) {
    if (!is_child(k)) continue;
    const int sibling = sibling_of(own[k]);
    float feature = -logf(rest);
    if (sibling >= MAX_CHILDREN) {
      feature = -feature_bound;
    } else if (sibling > 0) {
      const float gap = best[sibling] - top;
      feature = gap - logf(fmaxf(1.0f + rest - expf(gap), 1.0f));
    }
    features[k] = fminf(fmaxf(feature, -feature_bound), feature_bound);
  }
}

// Grid (nodes with children that a level may have, requests), THREADS threads; `words` and `counts` as
// tree_nodes wrote them. `passed_lens` is a copy of `lens`: what needs these features waits for it.
#if __CUDA_ARCH__ >= 1000  // two blocks a multiprocessor leave 32 registers, too few there
#define SCORE_BOUNDS __launch_bounds__(THREADS, 1)
#else
#define SCORE_BOUNDS __launch_bounds__(THREADS)
#endif
#define SCORE_LEVEL_KERNEL(NAME, FORMAT)                                                               \
  extern "C" __global__ void SCORE_BOUNDS                                                             \
      NAME(const char* logits, int64 row_stride, int vocab_size, const int* num_rows,                  \
           const unsigned* words, const int* counts, int nodes, int level, float feature_bound,        \
           const int* lens, float* features, int* passed_lens) {                                       \
    score_level<FORMAT>(logits, row_stride, vocab_size, num_rows, words, counts, nodes, level,         \
                        feature_bound, lens, features, passed_lens);                                   \
  }

SCORE_LEVEL_KERNEL(score_level_bf16, BFloat16)
SCORE_LEVEL_KERNEL(score_level_f16, Float16)
SCORE_LEVEL_KERNEL(score_level_f32, Float32)
