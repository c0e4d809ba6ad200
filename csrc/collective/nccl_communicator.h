// One group's collectives on a device, over NCCL.
//
// Calls enqueue on the communicator's own stream, in the order of the calls, which is the same on
// all ranks; nothing here waits for the device but create(), wait() and the destructor. What the
// caller's stream does is ordered by after() and before():
//
//   communicator.after(compute);       // what was enqueued on `compute` so far comes first
//   communicator.all_reduce(...);
//   communicator.before(compute);      // what is enqueued on `compute` from now on comes later
//
// A watchdog thread of the process looks at all communicators: it polls NCCL's asynchronous errors,
// the peers' failures in the Store, and how long the oldest call has been under way. On any of
// these it aborts the communicator, so that the device's streams go on, and every later call here
// raises what happened. After a timeout all ranks write into the Store how far they have come, so
// that the message names the ranks that are behind, and the call that they have not made.
//
// Calls that a graph has captured have no timeout, as nobody sees when they run: of those, errors
// and peers that have ended are noticed, but not a peer that does not replay its graph.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/device_handles.h"
#include "collective/dtype.h"
#include "collective/reduce.h"
#include "transport/nccl_api.h"
#include "transport/store.h"

namespace pydist {

struct NcclOptions {
  int rank = 0;
  int size = 1;
  int device = 0;
  double timeout_s = 1800;         // of set-up, and of every call on the device
  int max_ctas = 0;                // blocks of the device that a call may occupy; 0: NCCL's choice
  std::string name = "the group";  // for messages
  std::string remedy = {};         // after a failure, for messages
  std::vector<int> global_ranks = {};  // for messages; empty: 0..size-1
};

class NcclCommunicator {
 public:
  // Collective. `store` has a prefix of its own. Raises TimeoutError that names the ranks that did
  // not come.
  static std::shared_ptr<NcclCommunicator> create(std::unique_ptr<Store> store,
                                                  const NcclOptions& options);
  // Process-wide, set once: what calls the end of communicators, on the thread that lets go last,
  // also of memory from allocate(). As that waits for the device, Python's lock must not be held
  // there.
  static void set_around_end(void (*around)(const std::function<void()>& end));
  // In any order among communicators. Waits until what is enqueued is done, or aborts it.
  virtual ~NcclCommunicator() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual int device() const = 0;
  // "rank 1 (pid 1234)"
  virtual std::string describe(int rank) const = 0;
  virtual Stream stream() const = 0;

  // Memory that peers may reach directly, where NCCL's version can; zeroed, aligned to 512 bytes,
  // on the communicator's and the caller's current stream. It keeps the communicator, and is freed
  // once these two streams are past what was enqueued when it was let go. Collective where
  // is_registering(): all ranks, in the same order, of the same size. Raises UsageError while a
  // graph is captured.
  virtual std::shared_ptr<void> allocate(size_t nbytes) = 0;
  virtual bool is_registering() const = 0;
  // Memory of this rank alone, with whatever is there, for what works within stream(); freed
  // likewise. Not collective, and at any time, also while a graph is captured.
  virtual std::shared_ptr<void> allocate_scratch(size_t nbytes) = 0;

  virtual void after(Stream stream) = 0;
  virtual void before(Stream stream) = 0;

  // `what` says in messages what the call is for: "bucket 3 of DataParallel(GPT)". Counts are
  // elements; kMean divides by `divisor`, by size() where it is 0, and is of floating types.
  //
  // NCCL adds in the type itself, in an order of its own; a mean multiplies each element by
  // 1/divisor, rounded to the type, before it adds. So a mean does not overflow where the elements
  // do not. But elements that are subnormal after that lose bits (float32 below 2^-126 * divisor;
  // float16 below 2^-14 * divisor, which gradients do reach), and in float16 and bfloat16 a divisor
  // that is no power of two scales the whole result by the rounding of 1/divisor (up to 2^-9 in
  // bfloat16). DeviceAllReduce has what avoids both. kMin and kMax need not propagate NaN. Raises
  // UsageError for what NCCL cannot reduce: int16, product, min and max of complex numbers.
  virtual void all_reduce(const void* from, void* to, int64_t count, DType dtype, ReduceOp op,
                          int divisor, const std::string& what) = 0;
  // `count` per rank: `to` has that many, `from` size() times as many.
  virtual void reduce_scatter(const void* from, void* to, int64_t count, DType dtype, ReduceOp op,
                              int divisor, const std::string& what) = 0;
  virtual void all_gather(const void* from, void* to, int64_t count, DType dtype,
                          const std::string& what) = 0;
  virtual void broadcast(void* data, int64_t count, DType dtype, int root,
                         const std::string& what) = 0;
  // The same of many pieces of memory, as one call; empty ones are left out.
  struct Piece {
    void* data;
    size_t nbytes;
  };
  virtual void broadcast(const std::vector<Piece>& pieces, int root, const std::string& what) = 0;
  // nbytes per pair of ranks.
  virtual void all_to_all(const void* from, void* to, size_t nbytes, const std::string& what) = 0;
  // Any number of messages that need each other, as one call; each pair of ranks sees its messages
  // in the order of the calls.
  struct Transfer {
    void* data;
    size_t nbytes;
    int peer;
    bool sends;  // else receives
  };
  virtual void exchange(const std::vector<Transfer>& transfers, const std::string& what) = 0;

  // Marks what has been enqueued on stream() so far, calls or not. While a graph is captured, what
  // was enqueued before.
  virtual uint64_t mark() = 0;
  virtual bool is_done(uint64_t mark) = 0;  // also after a failure, when the device is through
  // Waits on the host, looking at signals and failures. Not while a graph is captured.
  virtual void wait(uint64_t mark) = 0;

  // Raises PeerError or TimeoutError if the communicator has failed (Error where this rank's own
  // device or NCCL has), as all calls here do but is_done().
  virtual void check() = 0;
  // Tells all ranks, aborts. Never throws. For good.
  virtual void fail(const std::string& reason) noexcept = 0;

  // Since the start, for tests and reports.
  struct Counters {
    uint64_t num_calls = 0;
    uint64_t moved_nbytes = 0;  // payload that this rank handed to NCCL
  };
  virtual Counters counters() const = 0;
};

}  // namespace pydist
