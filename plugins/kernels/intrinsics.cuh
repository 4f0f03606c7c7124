// What the kernels need from the hardware, with no header of the CUDA toolkit: types, loads, NaN-aware
// maxima of packed floats, and reductions over a warp in a fixed order.
//
// Invariants: every function of a whole warp is called by all of its 32 lanes and returns the same value
// to each; a reduction adds in the same order on every run.

#pragma once

using int64 = long long;
using uint64 = unsigned long long;

constexpr unsigned WHOLE_WARP = 0xFFFFFFFFu;
constexpr int WARP_SIZE = 32;
constexpr float LOG2_E = 1.4426950408889634f;
constexpr float FLOAT_MAX = 3.402823466e+38f;
constexpr float FLOAT_TINY = 1.175494351e-38f;  // smallest normal number

__device__ __forceinline__ float infinity() { return __int_as_float(0x7F800000); }

__device__ __forceinline__ bool is_finite(float x) { return fabsf(x) <= FLOAT_MAX; }

// 2^x for the running sums: relative error 2^-22, results below 2^-126 are 0.
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 16 bytes that this kernel reads once and nobody writes meanwhile.
__device__ __forceinline__ uint4 load_once(const void* address) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address));
  return v;
}

// Volatile statements keep their order, so that a load is issued before what need not wait for it.
__device__ __forceinline__ int load_now(const int* address) {
  int v;
  asm volatile("ld.global.nc.s32 %0, [%1];" : "=r"(v) : "l"(address));
  return v;
}

__device__ __forceinline__ float load_now(const float* address) {
  float v;
  asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(v) : "l"(address));
  return v;
}

__device__ __forceinline__ float reciprocal_now(float x) {
  float y;
  asm volatile("rcp.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The larger of two, NaN if either is: a plain maximum drops NaN and would hide a broken row.
__device__ __forceinline__ float max_or_nan(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

// 32-bit words of logits: one f32 or two 16-bit floats. `larger` keeps NaN, `smaller` need not.
struct Float32 {
  static constexpr int BYTES = 4, PER_WORD = 1;
  static constexpr unsigned MINUS_INFINITY = 0xFF800000u;
  static __device__ __forceinline__ unsigned larger(unsigned a, unsigned b) {
    return __float_as_uint(max_or_nan(__uint_as_float(a), __uint_as_float(b)));
  }
  static __device__ __forceinline__ unsigned smaller(unsigned a, unsigned b) {
    return __float_as_uint(fminf(__uint_as_float(a), __uint_as_float(b)));
  }
  static __device__ __forceinline__ float value(unsigned word, int) { return __uint_as_float(word); }
  static __device__ __forceinline__ float load(const char* row, int64 index) {
    return reinterpret_cast<const float*>(row)[index];
  }
};

struct BFloat16 {
  static constexpr int BYTES = 2, PER_WORD = 2;
  static constexpr unsigned MINUS_INFINITY = 0xFF80FF80u;
  static __device__ __forceinline__ unsigned larger(unsigned a, unsigned b) {
    unsigned y;
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
  }
  static __device__ __forceinline__ unsigned smaller(unsigned a, unsigned b) {
    unsigned y;
    asm("min.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
  }
  static __device__ __forceinline__ float value(unsigned word, int half) {
    return __uint_as_float(half ? word & 0xFFFF0000u : word << 16);
  }
  static __device__ __forceinline__ float load(const char* row, int64 index) {
    return value(reinterpret_cast<const unsigned short*>(row)[index], 0);
  }
};

struct Float16 {
  static constexpr int BYTES = 2, PER_WORD = 2;
  static constexpr unsigned MINUS_INFINITY = 0xFC00FC00u;
  static __device__ __forceinline__ unsigned larger(unsigned a, unsigned b) {
    unsigned y;
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
  }
  static __device__ __forceinline__ unsigned smaller(unsigned a, unsigned b) {
    unsigned y;
    asm("min.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
  }
  static __device__ __forceinline__ float value(unsigned word, int half) {
    const unsigned short bits = static_cast<unsigned short>(half ? word >> 16 : word);
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(bits));
    return y;
  }
  static __device__ __forceinline__ float load(const char* row, int64 index) {
    return value(reinterpret_cast<const unsigned short*>(row)[index], 0);
  }
};

// Over each group of LANES neighbouring lanes, a power of two.
template <int LANES = WARP_SIZE>
__device__ __forceinline__ float warp_max_or_nan(float x) {
#pragma unroll
  for (int step = LANES / 2; step > 0; step /= 2)
    x = max_or_nan(x, __shfl_xor_sync(WHOLE_WARP, x, step));
  return x;
}

template <int LANES = WARP_SIZE, class Number>
__device__ __forceinline__ Number warp_sum(Number x) {
#pragma unroll
  for (int step = LANES / 2; step > 0; step /= 2) x += __shfl_xor_sync(WHOLE_WARP, x, step);
  return x;
}

// The blocks of one row send their partial results to the last block of the row, through one word each in
// `mailboxes` [rows * blocks], which are 0 before and after the launch. The value is the message: there is
// no fence and no counter to wait for. Blocks start in the order of their index, so those that the last
// one waits for already run.
__device__ __forceinline__ void send(uint64* mailbox, float first, float second) {
  const uint64 message = static_cast<uint64>(~__float_as_uint(first)) << 32 | __float_as_uint(second);
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" : : "l"(mailbox), "l"(message) : "memory");
}

// Waits for a message and empties the mailbox; `first` is no NaN with all bits set, which reads as empty.
__device__ __forceinline__ float2 receive(uint64* mailbox) {
  uint64 message;
  do {
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(message) : "l"(mailbox) : "memory");
  } while (message >> 32 == 0);
  *mailbox = 0;
  return make_float2(__uint_as_float(~static_cast<unsigned>(message >> 32)),
                     __uint_as_float(static_cast<unsigned>(message)));
}
