// How many drafts of each tree are verified, with what the control block says: three launches, in order.
//
// read_control takes one consistent version of the block; tree_keys gives every draft a key, tree_trim admits
// the best of them. A request's drafts are numbered level by level and what is verified is a prefix of that
// order. Survival of a node is the product of the confidences along its path. Along the order it may rise, so
// it is replaced by the means of the pools that make it fall (pool adjacent violators): taking pools by their
// mean is the best use of a budget among prefixes. Survivals are 30-bit fixed-point numbers, so pools are
// compared exactly.
//
// Invariants: given confidences, lengths are bit-equal to the NumPy definition; total order of drafts: mean
// descending, position ascending, request ascending; a length is never below the floor nor above what was
// drafted; nothing here waits for the host.

#include "tree.cuh"

constexpr int MAX_COEFFICIENTS = 33;  // slope, then an intercept a level
constexpr int FRACTION_BITS = 30;
constexpr int MAX_WARPS = MAX_REQUESTS / WARP_SIZE;
constexpr int NODE_THREADS = 256;
constexpr int TRACE_HEADER = 8;
constexpr float TRACE_MARKER = 16726.0f;  // tells rows that a step wrote from memory that none did
constexpr int TRACE_COUNTER = (1 << 24) - 1;  // what a float counts exactly

// Layout of the control block, in 64-bit words; plugins/control_block.py defines it.
constexpr int PROGRESS = 8, SLOTS = 16, HEADER_WORDS = 4;
constexpr int SLOT_WORDS = HEADER_WORDS + MAX_COEFFICIENTS;
constexpr int NUM_SLOTS = 2, MODE = 0, ROUND = 1, BUDGET = 2, FLOOR = 3, TRIM = 1;
constexpr int MAX_ATTEMPTS = 16;
constexpr int NO_VERSION = -1;

// What one round is trimmed with; version NO_VERSION verifies all.
struct Snapshot {
  int round, version, budget, floor;
  float coefficients[MAX_COEFFICIENTS];
};

// A word of memory that the host writes meanwhile.
__device__ __forceinline__ uint64 load_shared_with_host(const uint64* address) {
  uint64 word;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(word) : "l"(address) : "memory");
  return word;
}

__device__ __forceinline__ void store_shared_with_host(uint64* address, uint64 word) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" : : "l"(address), "l"(word) : "memory");
}

// One block of NUM_SLOTS warps, a warp a slot, so that all words are on their way at once.
extern "C" __global__ void __launch_bounds__(NUM_SLOTS* WARP_SIZE)
    read_control(uint64* __restrict__ block, Snapshot* snapshot) {
  __shared__ unsigned versions[NUM_SLOTS], rounds[NUM_SLOTS];
  __shared__ int modes[NUM_SLOTS];
  const int lane = threadIdx.x % WARP_SIZE, slot = threadIdx.x / WARP_SIZE;
  const uint64* words = block + SLOTS + slot * SLOT_WORDS;
  const int last = min(lane + WARP_SIZE, SLOT_WORDS - 1);
  const unsigned round = static_cast<unsigned>(load_shared_with_host(block + PROGRESS)) + 1;
  uint64 low, high;
  bool is_whole, was_written;
  for (int attempt = 0; attempt < MAX_ATTEMPTS; ++attempt) {
    low = load_shared_with_host(words + lane);
    high = load_shared_with_host(words + last);
    const unsigned version = __shfl_sync(WHOLE_WARP, static_cast<unsigned>(low >> 32), 0);
    const bool is_one_write = __all_sync(WHOLE_WARP, low >> 32 == version && high >> 32 == version);
    is_whole = is_one_write && version != 0;
    was_written = version != 0;
    if (lane == 0) versions[slot] = is_whole ? version : 0;
    if (lane == MODE) modes[slot] = static_cast<int>(low);
    if (lane == ROUND) rounds[slot] = static_cast<unsigned>(low);
    // Both torn: the host wrote twice meanwhile.
    if (__syncthreads_or(is_whole) || !__syncthreads_or(was_written)) break;
  }
  int chosen = -1;
  for (int s = 0; s < NUM_SLOTS; ++s) {
    const bool is_usable = versions[s] != 0 && static_cast<int>(round - rounds[s]) > 0;  // never in its own round
    if (is_usable && (chosen < 0 || static_cast<int>(versions[s] - versions[chosen]) > 0)) chosen = s;
  }
  if (chosen >= 0 && modes[chosen] != TRIM) chosen = -1;
  const int version = chosen < 0 ? NO_VERSION : static_cast<int>(versions[chosen]);
  if (threadIdx.x == 0) {
    snapshot->round = round;
    snapshot->version = version;
    store_shared_with_host(block + PROGRESS, static_cast<uint64>(static_cast<unsigned>(version)) << 32 | round);
  }
  if (slot != max(chosen, 0)) return;
  if (lane == BUDGET) snapshot->budget = static_cast<int>(low);
  if (lane == FLOOR) snapshot->floor = static_cast<int>(low);
  if (lane >= HEADER_WORDS)
    snapshot->coefficients[lane - HEADER_WORDS] = __uint_as_float(static_cast<unsigned>(low));
  if (lane + WARP_SIZE < SLOT_WORDS)
    snapshot->coefficients[lane + WARP_SIZE - HEADER_WORDS] =
        __uint_as_float(static_cast<unsigned>(high));
}

// One block a request: confidence [requests, drafts], keys [drafts, requests], and the features' part of
// the trace [requests, TRACE_HEADER + drafts].
extern "C" __global__ void __launch_bounds__(NODE_THREADS)
    tree_keys(const float* __restrict__ features, const int* __restrict__ lens,
              const int* __restrict__ paths, const Snapshot* __restrict__ snapshot, int nodes, int depths,
              float* confidence, unsigned* keys, float* trace) {
  __shared__ Tree tree;
  __shared__ float survival[MAX_NODES], p[MAX_NODES];
  __shared__ unsigned parts[MAX_NODES];  // survivals in fixed point
  __shared__ uint64 sums[MAX_NODES];     // of each pool's parts
  __shared__ short ends[MAX_NODES];      // of each pool
  __shared__ int num_pools;
  const int request = blockIdx.x, requests = gridDim.x, drafts = nodes - 1;
  const int len = min(max(lens[request], 0), drafts);
  for (int i = threadIdx.x; i < drafts; i += NODE_THREADS)
    trace[static_cast<int64>(request) * (TRACE_HEADER + drafts) + TRACE_HEADER + i] =
        features[request * drafts + i];
  if (snapshot->version == NO_VERSION) return;

  decode_tree(paths + static_cast<int64>(request) * nodes * depths, nodes, depths, tree);
  for (int k = threadIdx.x; k < nodes; k += NODE_THREADS) {
    const int depth = tree.depth[k];
    float own = 0.0f;
    if (depth > 0 && k <= len) {
      const float log_odds = __fadd_rn(__fmul_rn(snapshot->coefficients[0],
                                                 features[request * drafts + k - 1]),
                                       snapshot->coefficients[depth]);
      own = is_finite(log_odds) ? 1.0f / (1.0f + expf(-log_odds)) : 0.0f;
      if (!(own >= FLOAT_TINY)) own = 0.0f;
    }
    p[k] = own;
    survival[k] = k == 0 ? 1.0f : 0.0f;
    if (k > 0) confidence[request * drafts + k - 1] = own;
  }
  for (int depth = 1; depth < depths; ++depth) {
    __syncthreads();
    for (int k = threadIdx.x; k < nodes; k += NODE_THREADS) {
      if (tree.depth[k] != depth) continue;
      const float product = __fmul_rn(survival[tree.parent[k]], p[k]);
      survival[k] = product >= FLOAT_TINY ? product : 0.0f;
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < len; i += NODE_THREADS)
    parts[i] = static_cast<unsigned>(survival[i + 1] * (1 << FRACTION_BITS));
  __syncthreads();
  if (threadIdx.x == 0) {
    int pools = 0;
    uint64 sum = 0, below_sum = 0;  // of the last pool and the one before
    int count = 0, below_count = 0;
    for (int i = 0; i < len; ++i) {
      if (count > 0) {
        sums[pools] = sum;
        ends[pools++] = i;
        below_sum = sum;
        below_count = count;
      }
      sum = parts[i];
      count = 1;
      while (pools > 0 && below_sum * count < sum * below_count) {
        sum += below_sum;
        count += below_count;
        if (--pools == 0) break;
        below_sum = sums[pools - 1];
        below_count = ends[pools - 1] - (pools > 1 ? ends[pools - 2] : 0);
      }
    }
    if (count > 0) {
      sums[pools] = sum;
      ends[pools++] = len;
    }
    num_pools = pools;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < len; i += NODE_THREADS) {
    int pool = 0, last = num_pools - 1;  // the first pool that ends behind i
    while (pool < last) {
      const int middle = (pool + last) / 2;
      if (ends[middle] > i)
        last = middle;
      else
        pool = middle + 1;
    }
    const int count = ends[pool] - (pool > 0 ? ends[pool - 1] : 0);
    keys[i * requests + request] = static_cast<unsigned>(sums[pool] / count);
  }
}

// Slots of one request from `from` on whose key is at least `key`, as the position behind the last; the
// answer lies in [from, to], and keys fall.
__device__ __forceinline__ int end_of_keys(const unsigned* __restrict__ keys, int requests, int from,
                                           int to, unsigned key) {
  while (from < to) {
    const int middle = (from + to) / 2;
    if (keys[middle * requests + threadIdx.x] >= key)
      from = middle + 1;
    else
      to = middle;
  }
  return from;
}

// One block of a multiple of 32 threads, at least one a request. Behind tree_keys.
extern "C" __global__ void __launch_bounds__(MAX_REQUESTS, 1)
    tree_trim(const unsigned* __restrict__ keys, const int* __restrict__ lens,
              const Snapshot* __restrict__ snapshot, const int* __restrict__ draft_lens,
              const int* __restrict__ num_accepted, const int* __restrict__ accepted_paths, int requests,
              int drafts, int min_draft_len, int total_multiple, int* trimmed_lens, float* trace) {
  __shared__ int of_warp[2][MAX_WARPS];
  const int request = threadIdx.x, lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
  const bool exists = request < requests;
  const int given = exists ? lens[request] : 0;
  const int len = min(max(given, 0), drafts);
  const bool trims = snapshot->version != NO_VERSION;
  int turn = 0;
  const auto total = [&](int value) { return sum_over_block(value, of_warp[turn++ & 1]); };

  int end = given;  // of what is verified
  if (trims) {
    const int floor = min(max(max(min_draft_len, snapshot->floor), 1), len);
    const int floors = total(floor), all = total(len);
    int wanted = max(min(snapshot->budget, all), floors) + requests;
    wanted += (total_multiple - wanted % total_multiple) % total_multiple;
    const int quota = min(wanted - requests, all) - floors;
    if (quota == all - floors) {
      end = len;
    } else {
      // The greatest key that `quota` drafts reach; [from, to] holds the end of the keys that do.
      unsigned key = 0;
      int from = floor, to = len, reached = all - floors;
      for (int bit = FRACTION_BITS; bit >= 0 && reached != quota; --bit) {
        const unsigned higher = key | 1u << bit;
        const int middle = end_of_keys(keys, requests, from, to, higher);
        const int count = total(middle - floor);
        if (count >= quota) {
          key = higher;
          to = middle;
          reached = count;
        } else {
          from = middle;
        }
      }
      end = to;
      if (reached > quota) {
        // Drafts [from, to) have this very key: those in front by position, then by request.
        int left = quota - total(from - floor);
        int position = 0;
        for (int bit = 1 << 8; bit > 0; bit /= 2) {
          const int further = position | bit;
          if (total(min(max(further - from, 0), to - from)) <= left) position = further;
        }
        end = from + min(max(position - from, 0), to - from);
        left -= total(end - from);
        const bool is_next = from <= position && position < to;
        const unsigned votes = __ballot_sync(WHOLE_WARP, is_next);
        int* counts = of_warp[turn & 1];
        if (lane == 0) counts[warp] = __popc(votes);
        __syncthreads();
        const int before = __reduce_add_sync(WHOLE_WARP, lane < warp ? counts[lane] : 0);
        if (is_next && before + __popc(votes & ((1u << lane) - 1)) < left) ++end;
      }
    }
  }
  if (!exists) return;
  trimmed_lens[request] = end;
  float* row = trace + static_cast<int64>(request) * (TRACE_HEADER + drafts);
  row[0] = TRACE_MARKER;
  row[1] = static_cast<float>(snapshot->round & TRACE_COUNTER);
  row[2] = static_cast<float>(trims ? snapshot->version & TRACE_COUNTER : NO_VERSION);
  row[3] = static_cast<float>(draft_lens[request]);
  row[4] = static_cast<float>(num_accepted[request]);
  row[5] = static_cast<float>(accepted_paths[request]);
  row[6] = static_cast<float>(given);
  row[7] = static_cast<float>(end);
}
