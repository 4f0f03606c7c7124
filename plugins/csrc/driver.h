// The CUDA driver, opened at run time: the library links nothing of CUDA. Declares the few entry points used.
//
// Functions that can fail return the reason in one line, an empty text if there is none.

#pragma once

#include "launch.h"

namespace av {

// Machine code of one kernel source for one architecture (major * 10 + minor), generated at build time.
struct Cubin {
  char const* source;
  int architecture;
  unsigned char const* code;
};
extern Cubin const CUBINS[];
extern int const NUM_CUBINS;

// Loads what `plugin` needs on the current device, locks the control block's page if it reads it, and takes
// the mailboxes of one context (0 if it needs none), to be given back with `release`. Not for a stream capture.
std::string prepare(Plugin const& plugin, uint64_t& mailboxes);

void release(uint64_t mailboxes);

// Puts one execution on `stream`: neither allocates device memory nor waits. Behind `prepare` on this device.
std::string enqueue(Plugin const& plugin, Fields const& fields, std::vector<Binding> const& inputs,
                    std::vector<Binding> const& outputs, uint64_t workspace, uint64_t mailboxes, void* stream);

}  // namespace av
