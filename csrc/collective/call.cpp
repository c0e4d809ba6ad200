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

const char* operation_name(Operation operation) {
  constexpr const char* kNames[kNumOperations] = {
      "an invalid call", "all_reduce", "reduce_scatter", "all_gather", "broadcast", "broadcast",
      "barrier",         "all_to_all", "reduce",         "gather",     "scatter"};
  return kNames[static_cast<size_t>(operation)];
}

std::string Call::describe() const {
  const char* name = operation_name(operation);
  const std::string amount = concat(" of ", num_elements, " ", dtype_name(dtype));
  switch (operation) {
    case Operation::kInvalid:
    case Operation::kBarrier:
      return name;
    case Operation::kAllReduce:
      return concat(name, "(", reduce_op_name(op), ")", amount);
    case Operation::kReduceScatter:
      return concat(name, "(", reduce_op_name(op), ")", amount, " per rank");
    case Operation::kReduce:
      return concat(name, "(", reduce_op_name(op), ", to rank ", root, ")", amount);
    case Operation::kAllGather:
      return concat(name, amount, " per rank");
    case Operation::kGather:
      return concat(name, "(to rank ", root, ")", amount, " per rank");
    case Operation::kScatter:
      return concat(name, "(from rank ", root, ")", amount, " per rank");
    case Operation::kBroadcast:
      return concat(name, "(from rank ", root, ")", amount);
    case Operation::kBroadcastMany:
      return concat(name, "(from rank ", root, ") of tensors with ", num_elements, " bytes");
    case Operation::kAllToAll:
      return concat(name, " of ", dtype_name(dtype));
  }
  return "";
}

}  // namespace pydist
