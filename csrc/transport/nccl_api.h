// NCCL's functions, as far as they are used, found at run time in the copy that torch has loaded:
// so there are never two, and nothing here needs NCCL's header. The CUDA build checks every
// declaration against the real one (csrc/cuda/nccl_abi_check.cpp).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/device_runtime.h"

namespace pydist::nccl {

struct Communicator;  // ncclComm
using Comm = Communicator*;
using Window = void*;  // ncclWindow_t

struct UniqueId {
  char bytes[128];
};

enum Result : int {
  kSuccess = 0,
  kUnhandledCudaError = 1,
  kSystemError = 2,
  kInternalError = 3,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,
  kInProgress = 7,
};

enum DataType : int {
  kInt8 = 0,
  kUint8 = 1,
  kInt32 = 2,
  kUint32 = 3,
  kInt64 = 4,
  kUint64 = 5,
  kFloat16 = 6,
  kFloat32 = 7,
  kFloat64 = 8,
  kBfloat16 = 9,
};

enum RedOp : int { kSum = 0, kProd = 1, kMax = 2, kMin = 3, kAvg = 4 };
enum ScalarResidence : int { kScalarDevice = 0, kScalarHostImmediate = 1 };

// The fields of ncclConfig_t that 2.18 has; later versions take the shorter struct.
struct Config {
  static constexpr int kUndefined = INT32_MIN;
  size_t size = sizeof(Config);
  unsigned int magic = 0xcafebeef;
  unsigned int version = 21800;
  int blocking = kUndefined;
  int cga_cluster_size = kUndefined;
  int min_ctas = kUndefined;
  int max_ctas = kUndefined;
  const char* net_name = nullptr;
  int split_share = kUndefined;
};

constexpr int kWindowCollSymmetric = 0x01;
constexpr int kOldestVersion = 21800;

// Pointers that are null where the version has no such function.
struct Api {
  int version = 0;   // as 22807 for 2.28.7
  std::string path;  // of the library

  Result (*get_version)(int*) = nullptr;
  Result (*get_unique_id)(UniqueId*) = nullptr;
  Result (*comm_init_rank_config)(Comm*, int, UniqueId, int, Config*) = nullptr;
  Result (*comm_finalize)(Comm) = nullptr;
  Result (*comm_destroy)(Comm) = nullptr;
  Result (*comm_abort)(Comm) = nullptr;
  Result (*comm_get_async_error)(Comm, Result*) = nullptr;
  const char* (*get_error_string)(Result) = nullptr;
  const char* (*get_last_error)(Comm) = nullptr;
  Result (*red_op_create_pre_mul_sum)(RedOp*, void*, DataType, ScalarResidence, Comm) = nullptr;
  Result (*red_op_destroy)(RedOp, Comm) = nullptr;
  Result (*all_reduce)(const void*, void*, size_t, DataType, RedOp, Comm, Stream) = nullptr;
  Result (*reduce_scatter)(const void*, void*, size_t, DataType, RedOp, Comm, Stream) = nullptr;
  Result (*all_gather)(const void*, void*, size_t, DataType, Comm, Stream) = nullptr;
  Result (*broadcast)(const void*, void*, size_t, DataType, int, Comm, Stream) = nullptr;
  Result (*send)(const void*, size_t, DataType, int, Comm, Stream) = nullptr;
  Result (*recv)(void*, size_t, DataType, int, Comm, Stream) = nullptr;
  Result (*group_start)() = nullptr;
  Result (*group_end)() = nullptr;
  // From 2.19.
  Result (*mem_alloc)(void**, size_t) = nullptr;
  Result (*mem_free)(void*) = nullptr;
  // From 2.27.
  Result (*comm_window_register)(Comm, void*, size_t, Window*, int) = nullptr;
  Result (*comm_window_deregister)(Comm, Window) = nullptr;
};

// The library's functions. The first call opens it: the one that this process has loaded already,
// else the one at `path` (empty: by its soname); later calls give the same. Raises UsageError that
// says what was looked for where it is missing, older than kOldestVersion, or lacks a function.
const Api& api(const std::string& path = "");

// From now on the library at `path` and no other, whatever is loaded: for tests. Before api().
void use_library(const std::string& path);

}  // namespace pydist::nccl
