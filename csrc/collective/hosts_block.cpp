#include "collective/hosts_block.h"

#include <algorithm>
#include <cstring>
#include <ios>

#include "base/error.h"
#include "collective/call_rules.h"

namespace pydist {

namespace {

// What a small call's data is; null where it is none that a block can hold.
const Buffer* data_of(const Collective& collective) {
  switch (collective.operation) {
    case Operation::kAllReduce:
    case Operation::kReduce:
    case Operation::kBroadcast:
      return &collective.output;
    case Operation::kAllGather:
      return &collective.input;
    default:
      return nullptr;
  }
}

}  // namespace

bool HostsBlock::holds(const Collective& collective) {
  const Buffer* data = data_of(collective);
  return data != nullptr && data->nbytes() <= kDataNbytes;
}

HostsBlock HostsBlock::of(const Collective& collective, const std::string& why) {
  HostsBlock block;
  if (!why.empty()) {
    block.call = Call().pack();
    std::memcpy(block.data, why.data(), std::min(why.size(), kDataNbytes - 1));
    return block;
  }
  block.call = call_of(collective).pack();
  block.layout = layout_hash(collective.buffers);
  block.pieces = collective.buffers.size();
  block.wire = collective.wire ? static_cast<uint64_t>(*collective.wire) + 1 : 0;
  block.divisor = static_cast<uint64_t>(collective.divisor);
  if (holds(collective)) {
    const Buffer& data = *data_of(collective);
    if (data.num_elements > 0) std::memcpy(block.data, data.data, data.nbytes());
  }
  return block;
}

std::string HostsBlock::describe() const {
  const Call unpacked = Call::unpack(call);
  if (unpacked.operation == Operation::kInvalid) {
    return concat("made an invalid call (", reinterpret_cast<const char*>(data), ")");
  }
  std::string text = concat("called ", unpacked.describe());
  if (unpacked.operation == Operation::kBroadcastMany) {
    text += concat(" in ", pieces, " pieces, layout ", std::hex, layout);
  }
  if (wire != 0) text += concat(" sent as ", dtype_name(static_cast<DType>(wire - 1)));
  if (divisor != 0) text += concat(" divided by ", divisor);
  return text;
}

}  // namespace pydist
