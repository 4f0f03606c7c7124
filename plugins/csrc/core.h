// What the plugins answer at build time: types, shapes, formats, fields. Plain C++17: no header of TensorRT
// or CUDA. The Python form is plugins/plugin_core.py; a test compares the two.
//
// Functions that can refuse return the reason in one line, an empty text if there is none.

#pragma once

#include <map>
#include <string>
#include <vector>

#include "plugin_tables.h"

namespace av {

using Dims = std::vector<int64_t>;
using Fields = std::map<std::string, double>;

// nullptr for an unknown name.
Plugin const* find_plugin(std::string const& name);

// All fields in `values` from those `given`.
std::string read_fields(Plugin const& plugin, Fields const& given, Fields& values);

std::string check_counts(Plugin const& plugin, int num_inputs, int num_outputs);

// Whether tensor `position`, inputs first, may have this type and layout.
bool supports(Plugin const& plugin, int position, DType dtype, bool is_linear, int num_inputs);

// The type of an output; it depends on no input.
DType output_dtype(Plugin const& plugin, int output);

std::string check_ranks(Plugin const& plugin, std::vector<int> const& ranks);

// Refuses sizes that contradict each other or that the kernels do not take; -1: not known yet.
std::string check_shapes(Plugin const& plugin, Fields const& fields, std::vector<Dims> const& inputs);

// Refuses sizes beyond the kernels; bounds of tensors, which need not agree, are checked by this alone.
std::string check_limits(Plugin const& plugin, std::vector<Dims> const& inputs);

// Dimensions of one output, built by `ops`: constant(int64_t) and operation(sign, a, b) with the sign +, - or
// *. The ranks of the inputs have been checked.
template <class Expr, class Ops>
std::vector<Expr> output_shape(Plugin const& plugin, int output, std::vector<std::vector<Expr>> const& inputs,
                               Ops& ops) {
  auto const value_of = [&](char const* name) -> Expr {
    for (size_t i = 0; i < inputs.size(); ++i)
      for (int axis = 0; axis < plugin.inputs[i].rank; ++axis)
        if (std::string(plugin.inputs[i].dims[axis].factors[0].name) == name) return inputs[i][axis];
    return Expr{};
  };
  auto const value = [&](Factor const& factor) -> Expr {
    if (factor.name[0] == '\0') return ops.constant(factor.plus);
    Expr const named = value_of(factor.name);
    if (factor.plus == 0) return named;
    return factor.plus > 0 ? ops.operation('+', named, ops.constant(factor.plus))
                           : ops.operation('-', named, ops.constant(-factor.plus));
  };
  std::vector<Expr> shape;
  Tensor const& tensor = plugin.outputs[output];
  for (int axis = 0; axis < tensor.rank; ++axis) {
    Dim const& dim = tensor.dims[axis];
    Expr product = value(dim.factors[0]);
    for (int f = 1; f < dim.num_factors; ++f) product = ops.operation('*', product, value(dim.factors[f]));
    shape.push_back(product);
  }
  return shape;
}

}  // namespace av
