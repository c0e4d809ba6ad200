// What the device's thread does for one call of NCCL's, a chunk at a time, without ever waiting.
#pragma once

#include <memory>
#include <string>

#include "nccl_communicator.h"

namespace pydist::emulation {

enum class CallKind { kAllReduce, kReduceScatter, kAllGather, kBroadcast, kSend, kRecv };

struct NcclCall {
  CallKind kind;
  const void* from = nullptr;
  void* to = nullptr;
  size_t count = 0;
  nccl::DataType dtype = nccl::kFloat32;
  int op = nccl::kSum;
  PreMulSum scale = {};  // where op is one that was made
  int root = 0;          // or the peer
  std::string what;
};

size_t nbytes_of(nccl::DataType dtype);
const char* name_of(nccl::DataType dtype);  // null where there is none

double scalar_value(const void* scalar, nccl::DataType dtype);

Step make_step(const std::shared_ptr<CommState>& comm, const NcclCall& call);

}  // namespace pydist::emulation
