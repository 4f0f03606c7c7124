// The memory of the control block in this process; its layout is plugins/control_block.py's.

#pragma once

#include <cstddef>

namespace av {

constexpr std::size_t CONTROL_BLOCK_BYTES = 4096;  // one page

// The block: shared memory if TRTLLM_AV_CONTROL_BLOCK names some (".<rank>" is appended where
// OMPI_COMM_WORLD_RANK is set), this library's own page otherwise. The same at every call; nullptr if the
// shared memory does not exist.
void* control_block();

}  // namespace av
