// One group's collectives and messages on memory of the CPU, over whatever transport.
//
// Calls of collectives are matched by their order, which must be the same on all ranks; messages by
// peer and tag. Groups are independent of each other. See shm_communicator.h for one host.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "collective/buffer.h"
#include "collective/call.h"
#include "collective/monitored_barrier.h"
#include "collective/request.h"

namespace pydist {

// One call of a collective. What an operation does not use stays as it is.
//
//   kAllReduce      output, in place
//   kReduce         output, in place; only the root's is written
//   kReduceScatter  input -> output
//   kAllGather      input -> output
//   kGather         input -> output, which only the root has
//   kScatter        input, which only the root has -> output
//   kBroadcast      output (the root's is the source)
//   kBroadcastMany  buffers
//   kAllToAll       input, input_splits -> output, output_splits (in elements)
//   kInvalid        why: what is wrong with a call that came no further, so that peers raise
//                   instead of waiting for it
struct Collective {
  Operation operation = Operation::kBarrier;
  ReduceOp op = ReduceOp::kSum;
  int root = 0;
  Buffer input;
  Buffer output;
  std::vector<Buffer> buffers = {};
  std::vector<int64_t> input_splits = {};
  std::vector<int64_t> output_splits = {};
  std::string why = {};
  // Of kMean: what the sum is divided by; 0: by the number of ranks, and on one host by nothing
  // else.
  int divisor = 0;
  // What float32 travels as between hosts, for all_reduce: half types, whose rounding is the same
  // on all ranks.
  std::optional<DType> wire = std::nullopt;
  // All ranks are known to make this call: between hosts they do not ask each other first.
  bool agreed = false;
};

// Calls that ended well, and the bytes of this rank's tensors in them: of a collective's input, or
// of its output where it works in place.
struct OperationCount {
  uint64_t calls = 0;
  uint64_t nbytes = 0;
};

struct CommunicatorCounts {
  std::array<OperationCount, kNumOperations> collectives;  // by Operation
  OperationCount sent;
  OperationCount received;
};

class Communicator {
 public:
  static constexpr int kAnySource = -1;
  // Tags below 0 are the engine's own. Their messages are not counted, and nobody minds if the
  // source of one that is only started dies.
  static constexpr int64_t kMonitoredBarrierTag = -1;

  virtual ~Communicator() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  // For messages: "the default group".
  virtual const std::string& name() const = 0;
  // "rank 1 (pid 1234)"; a subgroup's rank also gets its global rank.
  virtual std::string describe(int rank) const = 0;
  virtual double timeout_s() const = 0;
  virtual void set_timeout_s(double timeout_s) = 0;

  // In the order of calls, in the calling thread.
  virtual void run(const Collective& collective) = 0;
  // In the order of calls, on this communicator's worker thread. The memory must stay until the
  // request has ended, or `keep_alive` must hold it.
  virtual std::shared_ptr<Request> start(Collective collective,
                                         std::shared_ptr<void> keep_alive) = 0;

  // Any thread, at once: messages do not wait for collectives. Users' tags start at 0. Messages
  // of one peer and tag are received in the order in which they were sent, whatever mixture of
  // these verbs sends and receives them.
  virtual void send(const Buffer& buffer, int destination, int64_t tag) = 0;
  // Returns the source.
  virtual int receive(const Buffer& buffer, int source, int64_t tag) = 0;
  // The same without waiting; they go on while the caller does something else. The memory must
  // stay until the request has ended, or `keep_alive` must hold it. A sent message's memory may
  // change then. Request::source() is the source of a received one.
  virtual std::shared_ptr<Request> start_send(const Buffer& buffer, int destination, int64_t tag,
                                              std::shared_ptr<void> keep_alive) = 0;
  virtual std::shared_ptr<Request> start_receive(const Buffer& buffer, int source, int64_t tag,
                                                 std::shared_ptr<void> keep_alive) = 0;

  // Of this rank, since the communicator was made.
  virtual CommunicatorCounts counts() const = 0;

  // Ends the group: every rank raises PeerError with this reason. Never throws.
  virtual void fail(const std::string& reason) noexcept = 0;

  void all_reduce(const Buffer& buffer, ReduceOp op) {
    run({Operation::kAllReduce, op, 0, {}, buffer});
  }
  void reduce_scatter(const Buffer& input, const Buffer& output, ReduceOp op) {
    run({Operation::kReduceScatter, op, 0, input, output});
  }
  void all_gather(const Buffer& input, const Buffer& output) {
    run({Operation::kAllGather, ReduceOp::kSum, 0, input, output});
  }
  void broadcast(const Buffer& buffer, int root) {
    run({Operation::kBroadcast, ReduceOp::kSum, root, {}, buffer});
  }
  void broadcast_many(std::vector<Buffer> buffers, int root) {
    run({Operation::kBroadcastMany, ReduceOp::kSum, root, {}, {}, std::move(buffers)});
  }
  void barrier() { run({}); }

  // A barrier for finding out who does not come: rank 0 hears from every rank, then answers. Where
  // some do not come within timeout_s, rank 0 raises TimeoutError that names all of them (without
  // wait_all_ranks: the first), and so do the ranks that came. The group stays usable.
  void monitored_barrier(double timeout_s, bool wait_all_ranks);

 private:
  MonitoredBarrier monitored_barrier_;
};

}  // namespace pydist
