// What the plugins put on a stream: kernels with their grids and arguments, from sizes and addresses alone.
// The Python form is plugins/plugin_launch.py; a test compares the two, argument by argument.

#pragma once

#include <cstring>

#include "core.h"

namespace av {

// A tensor as enqueue gets it; address 0 is an absent one.
struct Binding {
  uint64_t address;
  Dims dims;
  DType dtype;
};

// One kernel of kernels/<source>.cu with its arguments by value.
struct Launch {
  std::string source, kernel;
  int grid[3] = {1, 1, 1};
  int num_threads = 1;
  std::vector<std::vector<unsigned char>> arguments;

  template <class Value>
  Launch& pass(Value value) {
    std::vector<unsigned char> bytes(sizeof value);
    std::memcpy(bytes.data(), &value, sizeof value);
    arguments.push_back(bytes);
    return *this;
  }
};

// Memory besides the tensors, by address. `workspace` is undefined between executions; `mailboxes` are the
// context's own and 0 between them; `control`: the control block as the device sees it.
struct Scratch {
  uint64_t workspace, mailboxes, control;
};

struct Invocation {
  std::vector<Binding> inputs, outputs;
  Scratch scratch;
  int num_processors;
};

// Bytes that one execution needs besides its outputs, at most, for inputs of these dimensions.
uint64_t workspace_bytes(Plugin const& plugin, std::vector<Dims> const& inputs);

// Bytes that a context keeps at 0 for the plugin: a word for every block that shares a row.
uint64_t mailbox_bytes(Plugin const& plugin, int num_processors);

// What an execution enqueues, in order.
std::vector<Launch> launches(Plugin const& plugin, Fields const& fields, Invocation const& call);

// The kernel source that a plugin needs.
std::string source_of(Plugin const& plugin);

}  // namespace av
