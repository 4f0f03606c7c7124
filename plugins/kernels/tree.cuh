// A draft tree of one request, decoded from its paths by one block.
//
// `paths` [nodes, depths] of a request hold a path from the root in each row: node 0, then draft k as node
// k + 1, -1 behind its end. Nodes are numbered level by level, so a parent comes before its children.
// Invariants: an entry that names no earlier node as its parent is ignored, so that nothing is read outside
// the tables, whatever the paths hold; a node that no path names has depth 0.

#pragma once

#include "intrinsics.cuh"

constexpr int MAX_NODES = 257;   // the root and 256 drafts
constexpr int MAX_REQUESTS = 512;
constexpr int MAX_CHILDREN = 16;

struct Tree {
  short parent[MAX_NODES];
  unsigned char depth[MAX_NODES];  // levels below the root
  unsigned char has_child[MAX_NODES];
};

// Called by the whole block; the tables are complete for all threads afterwards.
__device__ __forceinline__ void decode_tree(const int* __restrict__ paths, int nodes, int depths,
                                            Tree& tree) {
  for (int k = threadIdx.x; k < nodes; k += blockDim.x) tree.depth[k] = tree.has_child[k] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < nodes * depths; i += blockDim.x) {
    const int depth = i % depths;
    if (depth == 0) continue;
    const int node = paths[i], parent = paths[i - 1];
    if (node <= 0 || node >= nodes || parent < 0 || parent >= node) continue;
    tree.parent[node] = parent;
    tree.depth[node] = depth;
    tree.has_child[parent] = 1;
  }
  __syncthreads();
}

// Sum over the block; every thread gets it. `of_warp` is free again behind the next barrier.
__device__ __forceinline__ int sum_over_block(int value, int* of_warp) {
  const int lane = threadIdx.x % WARP_SIZE;
  const int sum = __reduce_add_sync(WHOLE_WARP, value);
  if (lane == 0) of_warp[threadIdx.x / WARP_SIZE] = sum;
  __syncthreads();
  return __reduce_add_sync(WHOLE_WARP, lane < blockDim.x / WARP_SIZE ? of_warp[lane] : 0);
}
