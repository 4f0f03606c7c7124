// Packed rows of a verify pass from the lengths of its requests, by one block with a thread a request.
//
// Invariants: row t of the pass belongs to the request r with starts[r] <= t < starts[r + 1]; nothing behind
// the capacity of the results is written, and all of it is written.

#pragma once

#include "intrinsics.cuh"

constexpr int MAX_ROWS = 1024;  // requests
constexpr int MAX_WARPS = MAX_ROWS / WARP_SIZE;
constexpr int PACK_UNROLL = 2;

// What a packed row needs besides its index; null `token_ids` leaves it out. Integers are int64 if `wide`,
// int32 otherwise.
struct Gather {
  const void *last_tokens, *draft_tokens, *kv_lens, *slots;
  int64 draft_tokens_stride, slot_stride, pad_offset;
  int64 *token_ids, *positions, *write_offsets;
  int wide;
};

__device__ __forceinline__ int64 load_index(const void* values, int64 i, bool wide) {
  return wide ? static_cast<const int64*>(values)[i] : static_cast<const int*>(values)[i];
}

// starts[r] = sum of the lengths before r, for all requests and one more.
__device__ __forceinline__ void scan_lengths(int length, int rows, int* starts, int* of_warp) {
  const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
  int sum = length;
#pragma unroll
  for (int step = 1; step < WARP_SIZE; step *= 2) {
    const int before = __shfl_up_sync(WHOLE_WARP, sum, step);
    if (lane >= step) sum += before;
  }
  if (lane == WARP_SIZE - 1) of_warp[warp] = sum;
  __syncthreads();
  sum += __reduce_add_sync(WHOLE_WARP, lane < warp ? of_warp[lane] : 0);
  if (threadIdx.x == 0) starts[0] = 0;
  if (threadIdx.x < rows) starts[threadIdx.x + 1] = sum;
  __syncthreads();
}

// One request as its packed rows need it, fetched before the lengths are known.
struct Request {
  int64 write_offset;
  int last_token, position;
};

__device__ __forceinline__ Request load_request(const Gather& gather, int row) {
  const int64 cached = load_index(gather.kv_lens, row, gather.wide);
  const int64 slot = load_index(gather.slots, row, gather.wide);
  const int64 token = load_index(gather.last_tokens, row, gather.wide);
  return {slot * gather.slot_stride + cached, static_cast<int>(token), static_cast<int>(cached)};
}

// Writes the packed rows of all requests. Those of 32 requests lie one after another; a warp, or several
// where there are few requests, write them a lane a row, so that stores are contiguous. Rows behind
// `capacity` are never written.
template <bool GATHERS>
__device__ __forceinline__ void pack(const int* starts, const int* bases, const Request* requests,
                                     unsigned char (*nonempty)[WARP_SIZE], int rows, int stride,
                                     int capacity, int* __restrict__ pack_index,
                                     const Gather& gather) {
  const int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
  const int groups = (rows + WARP_SIZE - 1) / WARP_SIZE;
  const int writers = groups == 0 ? 1 : blockDim.x / WARP_SIZE / groups;  // warps of each group
  const int writer = warp % writers;
  const int first_row = min(warp / writers * WARP_SIZE, rows);
  const int last_row = min(first_row + WARP_SIZE, rows), own = min(first_row + lane, rows);
  const int start = starts[own];
  const bool has_rows = own < rows && starts[own + 1] > start;
  const unsigned with_rows = __ballot_sync(WHOLE_WARP, has_rows);
  const unsigned up_to_here = WHOLE_WARP >> (WARP_SIZE - 1 - lane);
  if (has_rows) nonempty[warp][__popc(with_rows & up_to_here) - 1] = lane;
  __syncwarp();
  const int end = min(starts[last_row], capacity);
  for (int chunk = starts[first_row] + writer * WARP_SIZE; chunk < end;
       chunk += PACK_UNROLL * writers * WARP_SIZE) {
    int row[PACK_UNROLL], offset[PACK_UNROLL];
    int64 token[PACK_UNROLL];
#pragma unroll
    for (int u = 0; u < PACK_UNROLL; ++u) {  // all loads are on their way before the first store
      const int ahead = start - (chunk + u * writers * WARP_SIZE);
      const int packed = chunk + u * writers * WARP_SIZE + lane;
      // Requests that start before these 32 rows, and those that start at each of them.
      const int begun = __popc(__ballot_sync(WHOLE_WARP, has_rows && ahead < 0));
      const bool starts_here = has_rows && ahead >= 0 && ahead < WARP_SIZE;
      const unsigned marks =
          __reduce_or_sync(WHOLE_WARP, starts_here ? 1u << (ahead & WARP_SIZE - 1) : 0u);
      row[u] = -1;
      if (packed >= end) continue;
      row[u] = first_row + nonempty[warp][begun + __popc(marks & up_to_here) - 1];
      offset[u] = packed - starts[row[u]];
      const int drafted = offset[u] - bases[row[u]];
      if (GATHERS)
        token[u] = drafted < 0
                       ? requests[row[u]].last_token
                       : load_index(gather.draft_tokens,
                                    row[u] * gather.draft_tokens_stride + drafted, gather.wide);
    }
#pragma unroll
    for (int u = 0; u < PACK_UNROLL; ++u) {
      const int packed = chunk + u * writers * WARP_SIZE + lane;
      if (row[u] < 0) continue;
      pack_index[packed] = row[u] * stride + offset[u];
      if (GATHERS) {
        const Request& request = requests[row[u]];
        gather.token_ids[packed] = token[u];
        gather.positions[packed] = request.position + offset[u];
        gather.write_offsets[packed] = request.write_offset + offset[u];
      }
    }
  }
  for (int i = starts[rows] + threadIdx.x; i < capacity; i += blockDim.x) {
    pack_index[i] = -1;
    if (GATHERS) {
      gather.token_ids[i] = gather.positions[i] = 0;
      gather.write_offsets[i] = gather.pad_offset;
    }
  }
}
