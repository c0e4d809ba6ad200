// NCCL's functions, under their names. With PYDIST_REAL_NCCL_HEADER their declarations are those of
// the real header, which the compiler then holds them against.
#include <unistd.h>

#include <cstring>
#include <utility>

#include "faults.h"
#include "memory.h"
#include "nccl_group.h"
#include "options.h"
#include "planted.h"

#ifdef PYDIST_REAL_NCCL_HEADER
#include <nccl.h>
#else
using ncclResult_t = pydist::nccl::Result;
using ncclComm_t = pydist::nccl::Comm;
using ncclDataType_t = pydist::nccl::DataType;
using ncclRedOp_t = pydist::nccl::RedOp;
using ncclScalarResidence_t = pydist::nccl::ScalarResidence;
using ncclUniqueId = pydist::nccl::UniqueId;
using ncclConfig_t = pydist::nccl::Config;
using ncclWindow_t = pydist::nccl::Window;
using cudaStream_t = void*;
#endif

// What the library says it is, and which functions it has.
#ifndef PYDIST_EMULATED_NCCL_VERSION
#define PYDIST_EMULATED_NCCL_VERSION 22807
#endif

namespace pydist::emulation {

namespace {

using CommPointer = std::shared_ptr<CommState>;
constexpr int kMaxOperators = 64;

std::string& thread_error() {
  static thread_local std::string text;
  return text;
}

// Runs a function's body: faults become a result, as exceptions must not cross the boundary.
template <class Body>
ncclResult_t guarded(const Body& body) {
  try {
    raise_fault();
    return static_cast<ncclResult_t>(body());
  } catch (const std::exception& error) {
    thread_error() = error.what();
    return static_cast<ncclResult_t>(nccl::kInvalidUsage);
  }
}

const char* op_name(int op) {
  constexpr const char* kNames[] = {"sum", "prod", "max", "min", "avg"};
  return op >= 0 && op <= nccl::kAvg ? kNames[op] : "a sum that multiplies first";
}

void check_call(CommState& comm, NcclCall& call) {
  if (name_of(call.dtype) == nullptr) {
    record_fault(concat(call.what, ": ", static_cast<int>(call.dtype), " is no data type"));
  }
  if (call.root < 0 || call.root >= comm.size) {
    record_fault(concat(call.what, ": there is no rank ", call.root));
  }
  if (call.op > nccl::kAvg) {
    const std::lock_guard<std::mutex> lock(comm.mutex);
    const size_t index = call.op - nccl::kAvg - 1;
    if (index >= comm.operators.size() || comm.operators[index].is_destroyed) {
      record_fault(concat(call.what, ": there is no such reduction, or no longer"));
    } else if (comm.operators[index].dtype != call.dtype) {
      record_fault(concat(call.what, ": the reduction is of another data type"));
    } else {
      call.scale = comm.operators[index];
    }
  }
  raise_fault();
}

nccl::Result run(const char* function, ncclComm_t handle, NcclCall call, cudaStream_t stream) {
  const CommPointer comm = comm_of(handle, function);
  if (strikes(Bug::kWrongCount) && call.count > 0) --call.count;
  if (strikes(Bug::kWrongDType)) {
    call.dtype = call.dtype == nccl::kFloat32 ? nccl::kInt32 : nccl::kUint8;
  }
  const char* dtype = name_of(call.dtype);
  call.what = concat(function, " of ", call.count, " ", dtype == nullptr ? "?" : dtype);
  if (call.kind <= CallKind::kReduceScatter) call.what += concat(", ", op_name(call.op));
  if (call.kind == CallKind::kBroadcast) call.what += concat(" from rank ", call.root);
  if (call.kind == CallKind::kSend) call.what += concat(" to rank ", call.root);
  if (call.kind == CallKind::kRecv) call.what += concat(" from rank ", call.root);
  check_call(*comm, call);
  if (call.count == 0) return nccl::kSuccess;
  return submit(comm, std::move(call), stream);
}

NcclCall make_call(CallKind kind, const void* from, void* to, size_t count, ncclDataType_t dtype,
                   int op, int root) {
  NcclCall call;
  call.kind = kind;
  call.from = from;
  call.to = to;
  call.count = count;
  call.dtype = static_cast<nccl::DataType>(dtype);
  call.op = op;
  call.root = root;
  return call;
}

nccl::Result init(ncclComm_t* handle, int size, const ncclUniqueId& id, int rank, bool blocks) {
  const CommPointer comm = add_comm();
  std::memcpy(&comm->name, &id, sizeof comm->name);
  comm->rank = rank;
  comm->size = size;
  comm->is_blocking = blocks;
  comm->num_sent.resize(size);
  comm->num_received.resize(size);
  *handle = reinterpret_cast<ncclComm_t>(comm.get());
  if (size < 1 || size > kMaxRanks || rank < 0 || rank >= size) return nccl::kInvalidArgument;
  comm->segment = open_segment(comm->name);
  if (comm->segment == nullptr) return nccl::kSystemError;
  int expected = 0;
  comm->segment->size.compare_exchange_strong(expected, size);
  if (comm->segment->pids[rank].exchange(getpid()) != 0 || comm->segment->size != size) {
    record_fault(concat("ncclCommInitRankConfig(): ", comm->describe(),
                        " joins ranks of which one is rank ", rank, " already, or that are ",
                        comm->segment->size.load()));
    raise_fault();
  }
  if (options().init_never_finishes == 0) ++comm->segment->num_attached;
  return pend(comm, "ncclCommInitRankConfig()", [comm] {
    if (comm->segment->num_attached < comm->size) return false;
    forget_segment(comm->name);
    const std::lock_guard<std::mutex> lock(comm->mutex);
    comm->state = State::kReady;
    return true;
  });
}

nccl::Result finalize(const CommPointer& comm) {
  {
    const std::lock_guard<std::mutex> lock(comm->mutex);
    if (comm->state != State::kReady || comm->pending) {
      record_fault("ncclCommFinalize(): " + comm->describe() + " is not ready");
    }
    comm->state = State::kFinalizing;
  }
  raise_fault();
  return pend(comm, "ncclCommFinalize()", [comm] {
    if (comm->num_pending > 0) return false;
    if (!std::exchange(comm->is_counted_finalizing, true)) ++comm->segment->num_finalizing;
    if (comm->segment->num_finalizing < comm->size) return false;
    Device::instance().host_learns(comm->clock);
    const std::lock_guard<std::mutex> lock(comm->mutex);
    comm->state = State::kFinalized;
    return true;
  });
}

nccl::Result destroy(const CommPointer& comm) {
  bool is_busy = false;
  {
    const std::lock_guard<std::mutex> lock(comm->mutex);
    is_busy = static_cast<bool>(comm->pending);
  }
  if (is_busy) {
    record_fault(concat("ncclCommDestroy(): ", comm->pending_what, " of ", comm->describe(),
                        " is still in progress"));
    raise_fault();
  }
  drain(comm);
  abort(comm);
  comm->state = State::kDestroyed;
  return nccl::kSuccess;
}

#if PYDIST_EMULATED_NCCL_VERSION >= 22700
nccl::Result register_window(const CommPointer& comm, void* memory, size_t nbytes,
                             ncclWindow_t* window) {
  if (!lies_in(memory, nbytes, Block::kNccl)) {
    record_fault("ncclCommWindowRegister(): the memory is not ncclMemAlloc's");
    raise_fault();
  }
  Segment& segment = *comm->segment;
  segment.window_nbytes[comm->rank] = nbytes;
  const uint64_t number = ++segment.num_windows[comm->rank];
  return pend(comm, "ncclCommWindowRegister()", [=, &segment] {
    for (int rank = 0; rank < comm->size; ++rank) {
      if (segment.num_windows[rank] < number) return false;
      if (segment.num_windows[rank] == number && segment.window_nbytes[rank] != nbytes) {
        record_fault(concat("ncclCommWindowRegister(): rank ", comm->rank, " registers ", nbytes,
                            " bytes, rank ", rank, " ", segment.window_nbytes[rank].load()));
      }
    }
    const std::lock_guard<std::mutex> lock(comm->mutex);
    comm->windows[memory] = nbytes;
    *window = reinterpret_cast<ncclWindow_t>(memory);
    return true;
  });
}
#endif

}  // namespace

}  // namespace pydist::emulation

using namespace pydist::emulation;
namespace nccl = pydist::nccl;

#pragma GCC visibility push(default)

extern "C" {

ncclResult_t ncclGetVersion(int* version) {
  const int wish = static_cast<int>(options().nccl_version);
  *version = wish == 0 ? PYDIST_EMULATED_NCCL_VERSION : wish;
  return static_cast<ncclResult_t>(nccl::kSuccess);
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  return guarded([&] {
    const SegmentName name = make_segment();
    std::memset(id, 0, sizeof *id);
    std::memcpy(id, &name, sizeof name);
    return nccl::kSuccess;
  });
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int nranks, ncclUniqueId id, int rank,
                                    ncclConfig_t* config) {
  return guarded([&] { return init(comm, nranks, id, rank, config->blocking != 0); });
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  return guarded([&] { return finalize(comm_of(comm, "ncclCommFinalize()")); });
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  return guarded([&] { return destroy(comm_of(comm, "ncclCommDestroy()")); });
}

// Works after a fault, too: the engine must come to its end.
ncclResult_t ncclCommAbort(ncclComm_t comm) {
  try {
    pydist::emulation::abort(comm_of(comm, "ncclCommAbort()"));
  } catch (const std::exception& error) {
    thread_error() = error.what();
    return static_cast<ncclResult_t>(nccl::kInvalidUsage);
  }
  return static_cast<ncclResult_t>(nccl::kSuccess);
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
  return guarded([&] {
    *error = static_cast<ncclResult_t>(poll(comm_of(comm, "ncclCommGetAsyncError()")));
    return nccl::kSuccess;
  });
}

const char* ncclGetErrorString(ncclResult_t result) {
  constexpr const char* kTexts[] = {"no error",
                                    "unhandled cuda error",
                                    "unhandled system error",
                                    "internal error",
                                    "invalid argument",
                                    "invalid usage",
                                    "remote process exited or there was a network error",
                                    "NCCL operation in progress"};
  const int index = static_cast<int>(result);
  return index >= 0 && index <= nccl::kInProgress ? kTexts[index] : "unknown result code";
}

const char* ncclGetLastError(ncclComm_t) { return thread_error().c_str(); }

ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void* scalar, ncclDataType_t datatype,
                                      ncclScalarResidence_t residence, ncclComm_t handle) {
  return guarded([&] {
    const CommPointer comm = comm_of(handle, "ncclRedOpCreatePreMulSum()");
    PreMulSum made;
    made.dtype = static_cast<nccl::DataType>(datatype);
    if (static_cast<int>(residence) == nccl::kScalarDevice) made.device_scalar = scalar;
    if (made.device_scalar == nullptr) made.value = scalar_value(scalar, made.dtype);
    const std::lock_guard<std::mutex> lock(comm->mutex);
    comm->operators.push_back(made);
    *op = static_cast<ncclRedOp_t>(nccl::kAvg + comm->operators.size());
    return nccl::kSuccess;
  });
}

ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t handle) {
  return guarded([&] {
    const CommPointer comm = comm_of(handle, "ncclRedOpDestroy()");
    const std::lock_guard<std::mutex> lock(comm->mutex);
    const size_t index = static_cast<size_t>(op) - nccl::kAvg - 1;
    if (index >= comm->operators.size() || comm->operators[index].is_destroyed) {
      record_fault("ncclRedOpDestroy(): there is no such reduction, or no longer");
      return nccl::kInvalidArgument;
    }
    comm->operators[index].is_destroyed = true;
    return nccl::kSuccess;
  });
}

ncclResult_t ncclAllReduce(const void* from, void* to, size_t count, ncclDataType_t datatype,
                           ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  return guarded([&] {
    return run("ncclAllReduce", comm,
               make_call(CallKind::kAllReduce, from, to, count, datatype, op, 0), stream);
  });
}

ncclResult_t ncclReduceScatter(const void* from, void* to, size_t recvcount,
                               ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm,
                               cudaStream_t stream) {
  return guarded([&] {
    return run("ncclReduceScatter", comm,
               make_call(CallKind::kReduceScatter, from, to, recvcount, datatype, op, 0), stream);
  });
}

ncclResult_t ncclAllGather(const void* from, void* to, size_t sendcount, ncclDataType_t datatype,
                           ncclComm_t comm, cudaStream_t stream) {
  return guarded([&] {
    return run("ncclAllGather", comm,
               make_call(CallKind::kAllGather, from, to, sendcount, datatype, 0, 0), stream);
  });
}

ncclResult_t ncclBroadcast(const void* from, void* to, size_t count, ncclDataType_t datatype,
                           int root, ncclComm_t comm, cudaStream_t stream) {
  return guarded([&] {
    return run("ncclBroadcast", comm,
               make_call(CallKind::kBroadcast, from, to, count, datatype, 0, root), stream);
  });
}

ncclResult_t ncclSend(const void* from, size_t count, ncclDataType_t datatype, int peer,
                      ncclComm_t comm, cudaStream_t stream) {
  return guarded([&] {
    return run("ncclSend", comm,
               make_call(CallKind::kSend, from, nullptr, count, datatype, 0, peer), stream);
  });
}

ncclResult_t ncclRecv(void* to, size_t count, ncclDataType_t datatype, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return guarded([&] {
    return run("ncclRecv", comm, make_call(CallKind::kRecv, nullptr, to, count, datatype, 0, peer),
               stream);
  });
}

ncclResult_t ncclGroupStart() {
  return guarded([] {
    start_group();
    return nccl::kSuccess;
  });
}

ncclResult_t ncclGroupEnd() {
  return guarded([] { return end_group(); });
}

#if PYDIST_EMULATED_NCCL_VERSION >= 21900
ncclResult_t ncclMemAlloc(void** memory, size_t nbytes) {
  return guarded([&] {
    Device::instance().check_capture_allows("ncclMemAlloc()");
    *memory = allocate_block(nbytes, Block::kNccl);
    return nccl::kSuccess;
  });
}

ncclResult_t ncclMemFree(void* memory) {
  return guarded([&] {
    check_no_window(memory);
    free_block(memory, Block::kNccl, "ncclMemFree()");
    return nccl::kSuccess;
  });
}
#endif

#if PYDIST_EMULATED_NCCL_VERSION >= 22700
ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void* memory, size_t nbytes,
                                    ncclWindow_t* window, int) {
  return guarded([&] {
    return register_window(comm_of(comm, "ncclCommWindowRegister()"), memory, nbytes, window);
  });
}

ncclResult_t ncclCommWindowDeregister(ncclComm_t handle, ncclWindow_t window) {
  return guarded([&] {
    const CommPointer comm = comm_of(handle, "ncclCommWindowDeregister()");
    const std::lock_guard<std::mutex> lock(comm->mutex);
    if (comm->windows.erase(window) == 0) {
      record_fault("ncclCommWindowDeregister(): there is no such window, or no longer");
    }
    return nccl::kSuccess;
  });
}
#endif

}  // extern "C"

#pragma GCC visibility pop
