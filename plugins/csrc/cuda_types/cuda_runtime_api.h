// The two opaque types of the CUDA runtime that TensorRT's headers name; nothing else of CUDA is needed to
// compile against them, so no toolkit has to be installed.

#pragma once

struct CUstream_st;
struct CUevent_st;
using cudaStream_t = CUstream_st*;
using cudaEvent_t = CUevent_st*;
