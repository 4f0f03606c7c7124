// Types of the generated tables: what each plugin takes and gives (plugins/plugin_spec.py).

#pragma once

#include <cstdint>

namespace av {

enum DType : int { OTHER = -1, F32, F16, BF16, I32, BOOL, NUM_DTYPES };
constexpr int ITEM_BYTES[NUM_DTYPES] = {4, 2, 2, 4, 1};

// `name` plus `plus`; an empty name stands for 0.
struct Factor {
  char const* name;
  int64_t plus;
};

// A product of factors.
struct Dim {
  int num_factors;
  Factor factors[2];
};

struct Tensor {
  char const* name;
  unsigned dtypes;  // bit i: DType i is allowed
  int rank;
  Dim dims[3];
  bool is_optional;
};

struct Field {
  char const* name;
  bool is_float;
  double least, most;
  bool has_default;
  double default_value;
};

struct Limit {
  char const* name;
  int64_t most;
};

struct Plugin {
  char const* name;
  int num_inputs, num_required, num_outputs, num_fields, num_limits;
  Tensor inputs[6];
  Tensor outputs[4];
  Field fields[4];
  Limit limits[4];
};

// A kernel of kernels/<source>.cu.
struct KernelName {
  char const *source, *kernel;
};

}  // namespace av
