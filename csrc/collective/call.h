// What a rank calls, packed into a word that all ranks compare before any byte moves.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "collective/dtype.h"
#include "collective/reduce.h"

namespace pydist {

enum class Operation : uint8_t {
  kInvalid,  // the caller's arguments were wrong; published so that peers raise instead of waiting
  kAllReduce,
  kReduceScatter,
  kAllGather,
  kBroadcast,
  kBroadcastMany,
  kBarrier,
  kAllToAll,
  kReduce,
  kGather,
  kScatter,
};
constexpr size_t kNumOperations = static_cast<size_t>(Operation::kScatter) + 1;

// "all_reduce", as users call it.
const char* operation_name(Operation operation);

struct Call {
  static constexpr int kMaxRanks = 1 << 12;
  static constexpr int64_t kMaxElements = (int64_t{1} << 40) - 1;
  // The only part of the word in which ranks may differ.
  static constexpr uint64_t kInArenaBit = 1;

  Operation operation = Operation::kInvalid;
  DType dtype = DType::kUInt8;
  ReduceOp op = ReduceOp::kSum;
  int root = 0;
  bool in_arena = false;     // this rank's memory is where its peers can reach it
  int64_t num_elements = 0;  // of one rank's share

  uint64_t pack() const;
  static Call unpack(uint64_t word);
  // "all_reduce(sum) of 12 float32"
  std::string describe() const;
};

}  // namespace pydist
