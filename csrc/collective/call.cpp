#include "collective/call.h"

#include "base/error.h"

namespace pydist {

// | num_elements : 40 | root : 12 | op : 3 | dtype : 4 | operation : 4 | in_arena : 1 |

uint64_t Call::pack() const {
  return static_cast<uint64_t>(num_elements) << 24 | static_cast<uint64_t>(root) << 12 |
         static_cast<uint64_t>(op) << 9 | static_cast<uint64_t>(dtype) << 5 |
         static_cast<uint64_t>(operation) << 1 | static_cast<uint64_t>(in_arena);
}

Call Call::unpack(uint64_t word) {
  Call call;
  call.num_elements = static_cast<int64_t>(word >> 24);
  call.root = static_cast<int>(word >> 12 & 0xfff);
  call.op = static_cast<ReduceOp>(word >> 9 & 0x7);
  call.dtype = static_cast<DType>(word >> 5 & 0xf);
  call.operation = static_cast<Operation>(word >> 1 & 0xf);
  call.in_arena = word & kInArenaBit;
  return call;
}

std::string Call::describe() const {
  const std::string amount = concat(" of ", num_elements, " ", dtype_name(dtype));
  switch (operation) {
    case Operation::kInvalid:
      return "an invalid call";
    case Operation::kAllReduce:
      return concat("all_reduce(", reduce_op_name(op), ")", amount);
    case Operation::kReduceScatter:
      return concat("reduce_scatter(", reduce_op_name(op), ")", amount, " per rank");
    case Operation::kAllGather:
      return concat("all_gather", amount, " per rank");
    case Operation::kBroadcast:
      return concat("broadcast(from rank ", root, ")", amount);
    case Operation::kBroadcastMany:
      return concat("broadcast(from rank ", root, ") of tensors with ", num_elements, " bytes");
    case Operation::kBarrier:
      return "barrier";
    case Operation::kAllToAll:
      return concat("all_to_all of ", dtype_name(dtype));
  }
  return "";
}

}  // namespace pydist
