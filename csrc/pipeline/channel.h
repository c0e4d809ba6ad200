// What stages on different ranks send each other: whole values, each matched by what it is.
//
// A sender never waits: what does not fit into the ring is kept, and handed over at the next call.
// A receiver that waits for one message takes in all others that arrive meanwhile. So the size of a
// ring cannot cause a deadlock, and the order of messages on a link means nothing.
//
// A step that raised anywhere is over everywhere: whoever waits raises PeerError with the cause,
// and messages of that step that are still under way are dropped when they arrive. The next step
// works; only a dead process is the end.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace pydist {

enum class MessageKind : uint8_t { kActivation, kGradient, kResult };

struct MessageKey {
  MessageKind kind = MessageKind::kActivation;
  int32_t stage = 0;  // that receives it
  int32_t microbatch = 0;
  int32_t port = 0;  // 0: from one stage to the next; else the number of a skip portal
};

// One tensor of a value. Undefined: none (a gradient that nobody wanted).
struct Slot {
  at::Tensor tensor;
  bool requires_grad = false;
};

struct Message {
  MessageKey key;
  bool absent = false;         // the batch has too few rows for this microbatch: nothing to compute
  std::string structure = {};  // how the slots form a value (value_codec.h); empty for gradients
  std::vector<Slot> slots = {};
  int32_t num_rows = -1;  // of the microbatch, as the first stage's rank knows; -1: it does not
};

// What all ranks must be doing together.
enum class StepKind : uint8_t { kTrain, kEvaluate, kForward };

// "to run 2F3 on rank 1", for error messages.
using Describe = std::function<std::string()>;

// Since the channel was made.
struct ChannelCounters {
  uint64_t num_messages = 0;  // sent
  uint64_t moved_nbytes = 0;  // of their tensors
  uint64_t num_inline = 0;   // of them with tensors that went through the ring: small, or the arena
                             // was full
  uint64_t peak_parked = 0;  // messages that had come and were not wanted yet, at once
  uint64_t num_dropped = 0;  // of steps that had failed
  uint64_t device_nbytes = 0;  // sent from device to device
  uint64_t num_described = 0;  // structures and lists of shapes that receivers did not know
  // Now: memory for messages on their way (lent to receivers), and for tensors that were received.
  uint64_t lent_nbytes = 0;
  uint64_t pool_nbytes = 0;
};

// One per pipeline group and module, used by one thread at a time; all calls without the GIL.
class Channel {
 public:
  virtual ~Channel() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  // "rank 1 (pid 1234)"
  virtual std::string describe(int rank) const = 0;

  // The first call of a step, before anything that may fail on one rank only. A peer that is in a
  // step of another kind is a MismatchError, on both, at the wait that finds out. Raises PeerError
  // where a peer has failed since all ended the last step, or is dead.
  virtual void begin_step(StepKind kind) = 0;
  // Never waits for the receiver. The tensors may be changed or freed as soon as it returns (those
  // on a device: by work that is enqueued on the current stream later). What is sent in a step is
  // received in it.
  virtual void send(int destination, Message message) = 0;
  // Waits for the message; its tensors are this process's own. Raises PeerError (a peer died or its
  // step raised), TimeoutError, MismatchError, or what a signal handler raises; `describe` says
  // what the message is wanted for. After any of these the step is over: call fail().
  virtual Message receive(int source, const MessageKey& key, const Describe& describe) = 0;
  // Whether receive() would return at once. Cheap.
  virtual bool has_arrived(int source, const MessageKey& key) = 0;
  // Returns once nothing that was sent is kept here: so that this rank may wait for others than the
  // group's. Raises as receive() does.
  virtual void flush(const Describe& describe) = 0;
  // Returns once all ranks have called it, so that a step fails on all ranks or on none. Raises as
  // receive() does.
  virtual void end_step(const Describe& describe) = 0;
  // Ends the step on all ranks: `reason` is a whole sentence that names this rank, the action and
  // the cause. Never throws. Does nothing where the step is over already, as after a PeerError. The
  // next begin_step() starts anew.
  virtual void fail(const std::string& reason) noexcept = 0;
  virtual ChannelCounters counters() const = 0;
};

}  // namespace pydist
