// The calls of a communicator, each enqueued on its own stream.
#include "collective/nccl_group.h"

#include "base/check.h"
#include "base/fork.h"
#include "collective/nccl_types.h"

namespace pydist {

namespace {

constexpr useconds_t kWait_us = 20;  // between looks at NCCL's threads, or the device

// The group must end whatever its calls gave.
template <class Calls>
nccl::Result grouped(const nccl::Api& api, const Calls& calls) {
  nccl::Result first = api.group_start();
  if (first != nccl::kSuccess) return first;
  const auto note = [&first](nccl::Result result) {
    if (first == nccl::kSuccess && result != nccl::kInProgress) first = result;
  };
  calls(note);
  const nccl::Result ended = api.group_end();
  return first == nccl::kSuccess ? ended : first;
}

}  // namespace

// Makes one call of NCCL's, and waits on the host until NCCL's thread has enqueued it: what follows
// on the stream must come later. That is the cost of a communicator that can be aborted: every call
// waits for a thread to start and end, some 10 us, and the first between two ranks until both are
// there.
template <class Call>
void NcclGroup::make(const char* verb, const std::string& what, const Call& call) {
  NcclHandle& handle = watch_->handle();
  nccl::Result result = handle.run(call);
  if (result == nccl::kInProgress) {
    watch_->await([&] { return (result = handle.state()) != nccl::kInProgress; }, kWait_us,
                  watch_->last_resort_s(),
                  [&] { return concat(watch_->me(), ": NCCL does not begin ", verb, " ", what); });
  }
  if (result == nccl::kSuccess) return;
  watch_->check();  // an abort has taken the communicator away, perhaps
  watch_->raise(result, concat(verb, " ", what));
}

template <class Call>
void NcclGroup::enqueue(const char* verb, const std::string& what, size_t nbytes,
                        const Call& call) {
  watch_->check();
  const DeviceGuard guard(options_.device);
  const std::lock_guard<std::mutex> lock(call_mutex_);
  ++counters_.num_calls;
  counters_.moved_nbytes += nbytes;
  // What is captured now runs whenever the graph does: there is no event to look at.
  if (device_runtime()->is_capturing(stream())) {
    watch_->set_captured();
    return make(verb, what, call);
  }
  NcclCalls& calls = on_device_->calls;
  calls.begin(verb, what);
  try {
    make(verb, what, call);
  } catch (...) {
    calls.cancel();
    throw;
  }
  calls.end();
}

nccl::RedOp NcclGroup::op_for(DType dtype, ReduceOp op, int divisor) {
  const char* reason = why_not_reducible_by_nccl(dtype, op);
  PYDIST_CHECK(reason == nullptr, UsageError, reason, " is not defined (", reduce_op_name(op),
               " of ", dtype_name(dtype), ")");
  if (op != ReduceOp::kMean) return nccl_op(dtype, op);
  if (divisor == 0 || divisor == size()) return nccl::kAvg;
  return mean_by(nccl_elements(dtype, 0).type, divisor);
}

nccl::RedOp NcclGroup::mean_by(nccl::DataType type, int divisor) {
  watch_->check();
  const std::lock_guard<std::mutex> lock(call_mutex_);
  for (const Divisor& made : divisors_) {
    if (made.type == type && made.divisor == divisor) return made.op;
  }
  NcclScalar scalar = nccl_reciprocal(type, divisor);
  Divisor made{type, divisor, nccl::kSum};
  make("making", "a mean", [&](nccl::Comm comm) {
    return api().red_op_create_pre_mul_sum(&made.op, scalar.bytes, type, nccl::kScalarHostImmediate,
                                           comm);
  });
  divisors_.push_back(made);
  return made.op;
}

void NcclGroup::require_rank(int rank) const {
  PYDIST_CHECK(rank >= 0 && rank < size(), UsageError, "no rank ", rank, " in a group of ", size());
}

void NcclGroup::all_reduce(const void* from, void* to, int64_t count, DType dtype, ReduceOp op,
                           int divisor, const std::string& what) {
  const nccl::RedOp red_op = op_for(dtype, op, divisor);
  const NcclElements elements = nccl_elements(dtype, count);
  enqueue("all-reducing", what, count * dtype_nbytes(dtype), [&](nccl::Comm comm) {
    return api().all_reduce(from, to, elements.count, elements.type, red_op, comm, stream());
  });
}

void NcclGroup::reduce_scatter(const void* from, void* to, int64_t count, DType dtype, ReduceOp op,
                               int divisor, const std::string& what) {
  const nccl::RedOp red_op = op_for(dtype, op, divisor);
  const NcclElements elements = nccl_elements(dtype, count);
  enqueue("reduce-scattering", what, count * dtype_nbytes(dtype) * size(), [&](nccl::Comm comm) {
    return api().reduce_scatter(from, to, elements.count, elements.type, red_op, comm, stream());
  });
}

// As bytes, so that every type can travel.
void NcclGroup::all_gather(const void* from, void* to, int64_t count, DType dtype,
                           const std::string& what) {
  const size_t nbytes = count * dtype_nbytes(dtype);
  enqueue("all-gathering", what, nbytes, [&](nccl::Comm comm) {
    return api().all_gather(from, to, nbytes, nccl::kInt8, comm, stream());
  });
}

void NcclGroup::broadcast(void* data, int64_t count, DType dtype, int root,
                          const std::string& what) {
  require_rank(root);
  const size_t nbytes = count * dtype_nbytes(dtype);
  enqueue("broadcasting", what, rank() == root ? nbytes : 0, [&](nccl::Comm comm) {
    return api().broadcast(data, data, nbytes, nccl::kInt8, root, comm, stream());
  });
}

void NcclGroup::broadcast(const std::vector<Piece>& pieces, int root, const std::string& what) {
  require_rank(root);
  size_t nbytes = 0;
  for (const Piece& piece : pieces) nbytes += piece.nbytes;
  if (nbytes == 0) return;
  enqueue("broadcasting", what, rank() == root ? nbytes : 0, [&](nccl::Comm comm) {
    return grouped(api(), [&](const auto& note) {
      for (const Piece& p : pieces) {
        if (p.nbytes == 0) continue;
        note(api().broadcast(p.data, p.data, p.nbytes, nccl::kInt8, root, comm, stream()));
      }
    });
  });
}

void NcclGroup::all_to_all(const void* from, void* to, size_t nbytes, const std::string& what) {
  enqueue("exchanging all to all", what, nbytes * size(), [&](nccl::Comm comm) {
    return grouped(api(), [&](const auto& note) {
      for (int r = 0; r < size(); ++r) {
        const auto* out = static_cast<const char*>(from) + r * nbytes;
        auto* in = static_cast<char*>(to) + r * nbytes;
        note(api().send(out, nbytes, nccl::kInt8, r, comm, stream()));
        note(api().recv(in, nbytes, nccl::kInt8, r, comm, stream()));
      }
    });
  });
}

void NcclGroup::exchange(const std::vector<Transfer>& transfers, const std::string& what) {
  size_t sent_nbytes = 0;
  for (const Transfer& transfer : transfers) {
    require_rank(transfer.peer);
    if (transfer.sends) sent_nbytes += transfer.nbytes;
  }
  enqueue("exchanging", what, sent_nbytes, [&](nccl::Comm comm) {
    return grouped(api(), [&](const auto& note) {
      for (const Transfer& t : transfers) {
        note(t.sends ? api().send(t.data, t.nbytes, nccl::kInt8, t.peer, comm, stream())
                     : api().recv(t.data, t.nbytes, nccl::kInt8, t.peer, comm, stream()));
      }
    });
  });
}

// One event each is enough: a wait is for what was recorded before it, whatever is recorded later.
void NcclGroup::after(Stream other) {
  watch_->check();
  if (other == stream()) return;
  const DeviceGuard guard(options_.device);
  const std::lock_guard<std::mutex> lock(order_mutex_);
  on_device_->after.record(other);
  on_device_->after.block(stream());
}

void NcclGroup::before(Stream other) {
  watch_->check();
  if (other == stream()) return;
  const DeviceGuard guard(options_.device);
  const std::lock_guard<std::mutex> lock(order_mutex_);
  on_device_->before.record(stream());
  on_device_->before.block(other);
}

uint64_t NcclGroup::mark() {
  watch_->check();
  const DeviceGuard guard(options_.device);
  if (is_capturing()) return on_device_->calls.last_mark();
  return on_device_->calls.mark();
}

bool NcclGroup::is_done(uint64_t mark) {
  const DeviceGuard guard(options_.device);
  NcclCalls& calls = on_device_->calls;
  return is_capturing() ? calls.is_known_done(mark) : calls.is_done(mark);
}

// The current stream too: this thread may then ask nothing of the device.
bool NcclGroup::is_capturing() const {
  DeviceRuntime& runtime = *device_runtime();
  return runtime.is_capturing(stream()) || runtime.is_capturing(runtime.current_stream());
}

void NcclGroup::wait(uint64_t mark) {
  watch_->check();
  const DeviceGuard guard(options_.device);
  NcclCalls& calls = on_device_->calls;
  watch_->await([&] { return calls.is_done(mark); }, kWait_us, watch_->last_resort_s(),
                [&] {
                  return concat(watch_->me(), " waited ", watch_->last_resort_s(),
                                " s for its device");
                });
  watch_->check();
}

std::shared_ptr<void> NcclGroup::allocate(size_t nbytes) {
  watch_->check();
  const DeviceGuard guard(options_.device);
  on_device_->memory.sweep();
  std::shared_ptr<void> memory = own(on_device_->memory.allocate(nbytes));
  before(device_runtime()->current_stream());
  return memory;
}

std::shared_ptr<void> NcclGroup::allocate_scratch(size_t nbytes) {
  watch_->check();
  const DeviceGuard guard(options_.device);
  return own(on_device_->memory.allocate_scratch(nbytes));
}

// Whoever has memory keeps the communicator.
std::shared_ptr<void> NcclGroup::own(const NcclMemory::Block& block) {
  return std::shared_ptr<void>(block.data, [self = shared_from_this(), block](void*) {
    if (!in_forked_child()) self->on_device_->memory.release(block);
  });
}

NcclCommunicator::Counters NcclGroup::counters() const {
  const std::lock_guard<std::mutex> lock(call_mutex_);
  return counters_;
}

}  // namespace pydist
