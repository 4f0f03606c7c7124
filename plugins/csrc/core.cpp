#include "core.h"

#include <cstdio>

namespace av {
namespace {

std::string number(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%g", value);
  return text;
}

std::string text_of(Dims const& dims) {
  std::string text = "(";
  for (size_t i = 0; i < dims.size(); ++i) text += (i ? ", " : "") + std::to_string(dims[i]);
  return text + ")";
}

// -1 for a name that no input has, and for a size that is not known yet.
int64_t size_of(Plugin const& plugin, std::vector<Dims> const& inputs, std::string const& name) {
  for (size_t i = 0; i < inputs.size(); ++i)
    for (int axis = 0; axis < plugin.inputs[i].rank; ++axis)
      if (plugin.inputs[i].dims[axis].factors[0].name == name) return inputs[i][axis];
  return -1;
}

}  // namespace

Plugin const* find_plugin(std::string const& name) {
  for (Plugin const& plugin : PLUGINS)
    if (plugin.name == name) return &plugin;
  return nullptr;
}

std::string read_fields(Plugin const& plugin, Fields const& given, Fields& values) {
  values.clear();
  for (int f = 0; f < plugin.num_fields; ++f) {
    Field const& field = plugin.fields[f];
    auto const found = given.find(field.name);
    if (found == given.end() && !field.has_default)
      return std::string(plugin.name) + " needs the field " + field.name;
    double const value = found == given.end() ? field.default_value : found->second;
    if (!(field.least <= value && value <= field.most))
      return std::string(plugin.name) + ": " + field.name + "=" + number(value) + " must be in " +
             number(field.least) + " … " + number(field.most);
    values[field.name] = value;
  }
  for (auto const& [name, value] : given)
    if (values.count(name) == 0) return std::string(plugin.name) + " has no field " + name;
  return "";
}

std::string check_counts(Plugin const& plugin, int num_inputs, int num_outputs) {
  if (plugin.num_required <= num_inputs && num_inputs <= plugin.num_inputs &&
      num_outputs == plugin.num_outputs)
    return "";
  return std::string(plugin.name) + " takes " + std::to_string(plugin.num_required) + " … " +
         std::to_string(plugin.num_inputs) + " inputs and gives " + std::to_string(plugin.num_outputs) +
         " outputs, not " + std::to_string(num_inputs) + " and " + std::to_string(num_outputs);
}

bool supports(Plugin const& plugin, int position, DType dtype, bool is_linear, int num_inputs) {
  if (!is_linear || dtype == OTHER || position >= num_inputs + plugin.num_outputs) return false;
  Tensor const& tensor =
      position < num_inputs ? plugin.inputs[position] : plugin.outputs[position - num_inputs];
  return (tensor.dtypes >> dtype & 1u) != 0;
}

DType output_dtype(Plugin const& plugin, int output) {
  int dtype = 0;
  while ((plugin.outputs[output].dtypes >> dtype & 1u) == 0) ++dtype;
  return static_cast<DType>(dtype);
}

std::string check_ranks(Plugin const& plugin, std::vector<int> const& ranks) {
  for (size_t i = 0; i < ranks.size(); ++i)
    if (ranks[i] != plugin.inputs[i].rank)
      return std::string(plugin.name) + ": " + plugin.inputs[i].name + " has " + std::to_string(ranks[i]) +
             " dimensions; pass " + std::to_string(plugin.inputs[i].rank);
  return "";
}

std::string check_shapes(Plugin const& plugin, Fields const& fields, std::vector<Dims> const& inputs) {
  std::string const name = plugin.name;
  std::vector<int> ranks;
  for (Dims const& dims : inputs) ranks.push_back(static_cast<int>(dims.size()));
  std::string const refused = check_ranks(plugin, ranks);
  if (!refused.empty()) return refused;
  for (size_t i = 0; i < inputs.size(); ++i) {
    Tensor const& tensor = plugin.inputs[i];
    for (int axis = 0; axis < tensor.rank; ++axis) {
      Factor const& factor = tensor.dims[axis].factors[0];
      int64_t const wanted = factor.name[0] ? size_of(plugin, inputs, factor.name) : factor.plus;
      if (inputs[i][axis] != -1 && wanted != -1 && inputs[i][axis] != wanted)
        return name + ": " + tensor.name + " has shape " + text_of(inputs[i]) + ", not that of the others";
    }
  }
  std::string const beyond = check_limits(plugin, inputs);
  if (!beyond.empty()) return beyond;
  int64_t const width = size_of(plugin, inputs, "V");
  auto const vocab_size = fields.find("vocab_size");
  if (width >= 0 && vocab_size != fields.end() && width < vocab_size->second)
    return name + ": vocab_size=" + number(vocab_size->second) + " exceeds the " + std::to_string(width) +
           " columns of the logits";
  int64_t const drafts = size_of(plugin, inputs, "K"), nodes = size_of(plugin, inputs, "N");
  if (drafts != -1 && nodes != -1 && nodes != drafts + 1)
    return name + ": paths of " + std::to_string(nodes) + " nodes do not fit " + std::to_string(drafts) +
           " drafts; pass one more";
  return "";
}

std::string check_limits(Plugin const& plugin, std::vector<Dims> const& inputs) {
  std::string const name = plugin.name;
  for (int l = 0; l < plugin.num_limits; ++l) {
    int64_t const size = size_of(plugin, inputs, plugin.limits[l].name);
    if (size > plugin.limits[l].most)
      return name + ": " + plugin.limits[l].name + "=" + std::to_string(size) + " exceeds " +
             std::to_string(plugin.limits[l].most) + ", the most of its kernels";
  }
  return "";
}

}  // namespace av
