// The blocks that were handed out as memory of the device, and as pinned memory of the host.
#pragma once

#include <cstddef>

namespace pydist::emulation {

enum class Block { kDevice, kPinned, kNccl };

void* allocate_block(size_t nbytes, Block kind);
// A fault where it is no such block, or where work on it is not known to be done.
void free_block(void* memory, Block kind, const char* user);
// The nbytes from `data` on lie in a block of that kind.
bool lies_in(const void* data, size_t nbytes, Block kind);

}  // namespace pydist::emulation
