// What one rank brings to the meeting of a collective over hosts: its call, and the data where that
// is small. Pure.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "collective/communicator.h"

namespace pydist {

struct HostsBlock {
  // Costs nothing beside the message itself, and holds the records of a round.
  static constexpr size_t kDataNbytes = 984;

  uint64_t call = 0;  // Call::pack()
  uint64_t layout = 0;
  uint64_t pieces = 0;
  uint64_t wire = 0;
  uint64_t divisor = 0;
  uint8_t data[kDataNbytes] = {};  // or the text of what makes the call invalid

  // `why` it is invalid, else empty.
  static HostsBlock of(const Collective& collective, const std::string& why);
  // True where the data of such a call lies in the block.
  static bool holds(const Collective& collective);

  bool agrees_with(const HostsBlock& other) const {
    return call == other.call && layout == other.layout && pieces == other.pieces &&
           wire == other.wire && divisor == other.divisor;
  }
  // "called all_reduce(sum) of 3 float32".
  std::string describe() const;
};
static_assert(sizeof(HostsBlock) == 1024);

}  // namespace pydist
