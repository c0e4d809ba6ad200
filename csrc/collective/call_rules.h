// What makes a call of a collective sound, as far as one rank can know; the same for every
// transport. Pure.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "collective/call.h"
#include "collective/communicator.h"

namespace pydist {

// What all ranks must agree on.
Call call_of(const Collective& collective);
// Empty where the call is sound.
std::string why_invalid(const Collective& collective, int rank, int size);
// Whether the output is the input too.
bool works_in_place(Operation operation);
// How tensors are cut, for broadcast_many: over their sizes, dtypes and orders.
uint64_t layout_hash(const std::vector<Buffer>& buffers);

}  // namespace pydist
