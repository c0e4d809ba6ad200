#include "collective/call_rules.h"

#include <algorithm>

#include "base/error.h"

namespace pydist {

namespace {

std::string unequal(const char* what, int64_t found, int64_t expected) {
  if (found == expected) return "";
  return concat(what, " is ", found, " instead of ", expected);
}

std::string unequal_dtypes(const Buffer& input, const Buffer& output) {
  if (input.dtype == output.dtype) return "";
  return concat(dtype_name(input.dtype), " input, ", dtype_name(output.dtype), " output");
}

std::string why_not_reducible(const Collective& collective) {
  const char* reason = why_not_reducible(collective.output.dtype, collective.op);
  return reason == nullptr ? "" : concat(reason, " is not defined");
}

std::string why_not_root(int root, int size) {
  if (root >= 0 && root < size) return "";
  return concat("root ", root, " of ", size, " ranks");
}

std::string why_not_split(const std::vector<int64_t>& splits, const Buffer& buffer, int size) {
  const std::string count = unequal("number of splits", static_cast<int64_t>(splits.size()), size);
  if (!count.empty()) return count;
  if (*std::min_element(splits.begin(), splits.end()) < 0) return "a split is negative";
  int64_t sum = 0;
  for (const int64_t split : splits) sum += split;
  return unequal("sum of splits", sum, buffer.num_elements);
}

std::string first_of(std::initializer_list<std::string> reasons) {
  for (const std::string& reason : reasons) {
    if (!reason.empty()) return reason;
  }
  return "";
}

// Of the buffer that holds every rank's share.
std::string why_not_whole(const char* what, const Buffer& whole, const Buffer& share, int size) {
  return unequal(what, whole.num_elements, size * share.num_elements);
}

}  // namespace

Call call_of(const Collective& collective) {
  Call call;
  call.operation = collective.operation;
  call.op = collective.op;
  call.root = collective.root;
  const bool by_input =
      collective.operation == Operation::kAllGather || collective.operation == Operation::kGather;
  const Buffer& share = by_input ? collective.input : collective.output;
  call.dtype = share.dtype;
  if (collective.operation == Operation::kBroadcastMany) {
    for (const Buffer& buffer : collective.buffers) {
      call.num_elements += static_cast<int64_t>(buffer.nbytes());
    }
  } else if (collective.operation != Operation::kAllToAll) {  // whose sizes may differ
    call.num_elements = share.num_elements;
  }
  return call;
}

std::string why_invalid(const Collective& collective, int rank, int size) {
  const Buffer& input = collective.input;
  const Buffer& output = collective.output;
  const bool is_root = collective.root == rank;
  if (call_of(collective).num_elements > Call::kMaxElements) return "too many elements";
  switch (collective.operation) {
    case Operation::kAllReduce:
      return why_not_reducible(collective);
    case Operation::kReduce:
      return first_of({why_not_reducible(collective), why_not_root(collective.root, size)});
    case Operation::kReduceScatter:
      return first_of({why_not_reducible(collective), unequal_dtypes(input, output),
                       why_not_whole("input size", input, output, size)});
    case Operation::kAllGather:
      return first_of(
          {unequal_dtypes(input, output), why_not_whole("output size", output, input, size)});
    case Operation::kGather:
      if (!is_root) return why_not_root(collective.root, size);
      return first_of(
          {unequal_dtypes(input, output), why_not_whole("output size", output, input, size)});
    case Operation::kScatter:
      if (!is_root) return why_not_root(collective.root, size);
      return first_of(
          {unequal_dtypes(input, output), why_not_whole("input size", input, output, size)});
    case Operation::kBroadcast:
    case Operation::kBroadcastMany:
      return why_not_root(collective.root, size);
    case Operation::kAllToAll:
      return first_of({unequal_dtypes(input, output),
                       why_not_split(collective.input_splits, input, size),
                       why_not_split(collective.output_splits, output, size)});
    case Operation::kBarrier:
      return "";
    case Operation::kInvalid:
      return collective.why;
  }
  return "";
}

bool works_in_place(Operation operation) {
  return operation == Operation::kAllReduce || operation == Operation::kReduce ||
         operation == Operation::kBroadcast;
}

uint64_t layout_hash(const std::vector<Buffer>& buffers) {
  uint64_t hash = 0xcbf29ce484222325;  // FNV-1a
  for (const Buffer& buffer : buffers) {
    for (uint64_t word : {static_cast<uint64_t>(buffer.num_elements),
                          static_cast<uint64_t>(buffer.dtype), buffer.order}) {
      hash = (hash ^ word) * 0x100000001b3;
    }
  }
  return hash;
}

}  // namespace pydist
