// C entry points of the core, for processes that drive it without TensorRT, tests among them.
//
// `plugin` is a known name. Texts go into a buffer of `capacity` bytes; functions return 0, or 1 with the
// refusal in `text`.

#include <cstdio>

#include "control_block.h"
#include "driver.h"

namespace {

using av::Binding;
using av::Dims;
using av::DType;

int answer(std::string const& text, int code, char* buffer, int capacity) {
  std::snprintf(buffer, static_cast<size_t>(capacity), "%s", text.c_str());
  return code;
}

int refuse(std::string const& refusal, char* buffer, int capacity) {
  return answer(refusal, refusal.empty() ? 0 : 1, buffer, capacity);
}

// Dimensions of several tensors, one after another.
std::vector<Dims> split(int64_t const* dims, int const* ranks, int count) {
  std::vector<Dims> shapes;
  for (int i = 0; i < count; ++i) {
    shapes.emplace_back(dims, dims + ranks[i]);
    dims += ranks[i];
  }
  return shapes;
}

std::vector<Binding> bind(int64_t const* dims, int const* ranks, int const* dtypes, uint64_t const* addresses,
                          int count) {
  std::vector<Binding> bindings;
  std::vector<Dims> const shapes = split(dims, ranks, count);
  for (int i = 0; i < count; ++i) bindings.push_back({addresses[i], shapes[i], static_cast<DType>(dtypes[i])});
  return bindings;
}

std::string read_fields(av::Plugin const& plugin, char const* const* names, double const* values, int count,
                        av::Fields& fields) {
  av::Fields given;
  for (int i = 0; i < count; ++i) given[names[i]] = values[i];
  return av::read_fields(plugin, given, fields);
}

// Writes the expression it builds, so that a test sees which operations are asked for.
struct Writer {
  std::string constant(int64_t value) { return std::to_string(value); }
  std::string operation(char sign, std::string const& a, std::string const& b) { return "(" + a + sign + b + ")"; }
};

std::string hex(std::vector<unsigned char> const& bytes) {
  std::string text;
  char digits[3];
  for (unsigned char byte : bytes) {
    std::snprintf(digits, sizeof digits, "%02x", byte);
    text += digits;
  }
  return text;
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

void* av_control_block() { return av::control_block(); }

// All fields as "name=value" a line.
int av_fields(char const* plugin, char const* const* names, double const* values, int count, char* text,
              int capacity) {
  av::Fields fields;
  std::string const refusal = read_fields(*av::find_plugin(plugin), names, values, count, fields);
  if (!refusal.empty()) return refuse(refusal, text, capacity);
  std::string lines;
  char number[64];
  for (auto const& [name, value] : fields) {
    std::snprintf(number, sizeof number, "=%.17g\n", value);
    lines += name + number;
  }
  return answer(lines, 0, text, capacity);
}

int av_supports(char const* plugin, int position, int dtype, int is_linear, int num_inputs) {
  return av::supports(*av::find_plugin(plugin), position, static_cast<DType>(dtype), is_linear != 0,
                      num_inputs);
}

int av_output_dtype(char const* plugin, int output) {
  return av::output_dtype(*av::find_plugin(plugin), output);
}

// Shapes of the outputs, a line each, over inputs whose dimensions are called a0, a1, b0, …
int av_output_shapes(char const* plugin, int const* ranks, int num_inputs, int num_outputs, char* text,
                     int capacity) {
  av::Plugin const& found = *av::find_plugin(plugin);
  std::string refusal = av::check_counts(found, num_inputs, num_outputs);
  if (refusal.empty()) refusal = av::check_ranks(found, std::vector<int>(ranks, ranks + num_inputs));
  if (!refusal.empty()) return refuse(refusal, text, capacity);
  std::vector<std::vector<std::string>> inputs(num_inputs);
  for (int i = 0; i < num_inputs; ++i)
    for (int axis = 0; axis < ranks[i]; ++axis)
      inputs[i].push_back(std::string(1, static_cast<char>('a' + i)) + std::to_string(axis));
  Writer writer;
  std::string lines;
  for (int output = 0; output < num_outputs; ++output) {
    for (std::string const& dim : av::output_shape(found, output, inputs, writer)) lines += dim + " ";
    lines += "\n";
  }
  return answer(lines, 0, text, capacity);
}

int av_check_shapes(char const* plugin, char const* const* names, double const* values, int num_fields,
                    int64_t const* dims, int const* ranks, int num_inputs, char* text, int capacity) {
  av::Plugin const& found = *av::find_plugin(plugin);
  av::Fields fields;
  std::string refusal = read_fields(found, names, values, num_fields, fields);
  if (refusal.empty()) refusal = av::check_shapes(found, fields, split(dims, ranks, num_inputs));
  return refuse(refusal, text, capacity);
}

uint64_t av_workspace_bytes(char const* plugin, int64_t const* dims, int const* ranks, int num_inputs) {
  return av::workspace_bytes(*av::find_plugin(plugin), split(dims, ranks, num_inputs));
}

// What an execution puts on a stream, a line a launch: source, kernel, grid, threads and the arguments in
// hexadecimal. Tensors: inputs, then outputs.
int av_launches(char const* plugin, char const* const* names, double const* values, int num_fields,
             int64_t const* dims, int const* ranks, int const* dtypes, uint64_t const* addresses,
             int num_inputs, int num_tensors, uint64_t workspace, uint64_t mailboxes, uint64_t control,
             int num_processors, char* text, int capacity) {
  av::Plugin const& found = *av::find_plugin(plugin);
  av::Fields fields;
  std::string const refusal = read_fields(found, names, values, num_fields, fields);
  if (!refusal.empty()) return refuse(refusal, text, capacity);
  std::vector<Binding> const tensors = bind(dims, ranks, dtypes, addresses, num_tensors);
  av::Invocation const call = {{tensors.begin(), tensors.begin() + num_inputs},
                               {tensors.begin() + num_inputs, tensors.end()},
                               {workspace, mailboxes, control},
                               num_processors};
  std::string lines;
  for (av::Launch const& step : av::launches(found, fields, call)) {
    lines += step.source + " " + step.kernel;
    for (int size : step.grid) lines += " " + std::to_string(size);
    lines += " " + std::to_string(step.num_threads);
    for (auto const& argument : step.arguments) lines += " " + hex(argument);
    lines += "\n";
  }
  return answer(lines, 0, text, capacity);
}

uint64_t av_mailbox_bytes(char const* plugin, int num_processors) {
  return av::mailbox_bytes(*av::find_plugin(plugin), num_processors);
}

int av_prepare(char const* plugin, uint64_t* mailboxes, char* text, int capacity) {
  return refuse(av::prepare(*av::find_plugin(plugin), *mailboxes), text, capacity);
}

int av_enqueue(char const* plugin, char const* const* names, double const* values, int num_fields,
               int64_t const* dims, int const* ranks, int const* dtypes, uint64_t const* addresses,
               int num_inputs, int num_tensors, uint64_t workspace, uint64_t mailboxes, void* stream, char* text,
               int capacity) {
  av::Plugin const& found = *av::find_plugin(plugin);
  av::Fields fields;
  std::string refusal = read_fields(found, names, values, num_fields, fields);
  if (!refusal.empty()) return refuse(refusal, text, capacity);
  std::vector<Binding> const tensors = bind(dims, ranks, dtypes, addresses, num_tensors);
  refusal = av::enqueue(found, fields, {tensors.begin(), tensors.begin() + num_inputs},
                        {tensors.begin() + num_inputs, tensors.end()}, workspace, mailboxes, stream);
  return refuse(refusal, text, capacity);
}

}  // extern "C"
#pragma GCC visibility pop
