// What every channel does, whatever carries its bytes: matches messages, and agrees about steps.
//
// Every message carries the stamp of its sender's step: (generation, step, kind). A step that fails
// on one rank ends its generation there; the others learn it from that rank's failure record
// ("generation g failed, because ...") at their next look, which raises and ends generation g here
// too. One raise per generation: ranks that fail without waiting for each other have their failures
// seen one by one, so that all ranks make the same number of attempts, and the n-th of one pairs
// with the n-th of another. A rank that has raised for a peer's failure publishes nothing: fail()
// does nothing then. Two that fail in one generation on their own publish both, for that one.
//
// Messages of a past generation are dropped when they arrive, those of a future one or of the next
// step kept. In a step, a message of the other kind is a mismatch.
//
// end_step() tells all peers and waits until all have ended the step: so a step fails on all ranks
// or on none (but for a rank that is interrupted while the last one arrives). Links deliver in
// order: what a peer that has ended its step has not sent by then will not come.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "pipeline/channel.h"
#include "pipeline/device_links.h"
#include "pipeline/failure_record.h"
#include "pipeline/message_image.h"
#include "pipeline/storage_pool.h"

namespace pydist {

class StepChannel : public Channel {
 public:
  void begin_step(StepKind kind) final;
  void send(int destination, Message message) final;
  Message receive(int source, const MessageKey& key, const Describe& describe) final;
  bool has_arrived(int source, const MessageKey& key) final;
  void flush(const Describe& describe) final;
  void end_step(const Describe& describe) final;
  void fail(const std::string& reason) noexcept final;
  ChannelCounters counters() const override;
  // From now on tensors on the device go over these. Between steps.
  void use(std::unique_ptr<DeviceLinks> links) { links_ = std::move(links); }

 protected:
  static constexpr int kNobody = -1;

  explicit StepChannel(int size) : peers_(size) {}
  ~StepChannel() override;

  // -- what carries the bytes --------------------------------------------------------------------

  // Raises if this process may not use the channel, or no step will work any more.
  virtual void check() = 0;
  // Never waits. `payload` tells how many bytes of it went inline.
  virtual void post(int destination, const Message& message, const Stamp& stamp) = 0;
  virtual void post_end_of_step(int destination, const Stamp& stamp) = 0;
  // Hands over what was kept; returns the first rank that something is still kept for, or kNobody.
  virtual int hand_over() = 0;
  // Calls arrive() for everything that has come.
  virtual void take_in() = 0;
  // Until missing() returns kNobody. Raises TimeoutError, what a signal handler raises, PeerError
  // where the missing rank is dead. missing() does not throw.
  virtual void wait(const std::function<int()>& missing, const Describe& describe) = 0;
  // For all peers to see.
  virtual void publish(const Failure& failure) noexcept = 0;
  // A failure of some peer that ends this step: failure.ends(stamp). Where looking is dear, it may
  // look now and then only, unless it is `urgent`.
  virtual std::optional<Failure> find_failure(const Stamp& stamp, bool urgent) = 0;
  virtual void trim_memory() = 0;

  // One message or end of step, in the order in which `source` posted them.
  void arrive(int source, const uint8_t* envelope, const uint8_t* payload);

  ChannelCounters counters_;

 private:
  enum class State { kBetween, kInStep, kFailed };  // kFailed: until the next step begins
  struct Parked {
    Stamp stamp;
    Message message;
    std::shared_ptr<DeviceLinks::Arrival> arrival;  // null without links
  };
  struct Heard {
    std::list<Parked> parked = {};
    Stamp last = {};  // of what came last
    // The last step that the peer has ended, of each generation from ours on: it may be ahead, and
    // fail there.
    std::vector<Stamp> ended = {};
  };

  void check_step(const char* call) const;
  void check_peer(int peer, const char* call) const;
  std::list<Parked>::iterator find(int source, const MessageKey& key);
  std::optional<Message> take(int source, const MessageKey& key);
  void take_in_and_post();
  void begin_links();
  template <class Missing>
  void await(Missing&& missing, const Describe& describe);
  void look_for_failure(uint64_t step, bool urgent = false);
  void check_all();
  void look_for_mismatch();
  [[noreturn]] void raise_mismatch(const std::string& text);
  int first_in_step() const;
  void check_nothing_left();
  bool has_ended(int peer) const;
  void end_generation() noexcept;
  void drop_past(Heard& heard) noexcept;
  std::string describe_step(const Stamp& stamp) const;

  std::vector<Heard> peers_;
  StoragePool pool_;
  std::unique_ptr<DeviceLinks> links_;  // null where all tensors are on the CPU
  State state_ = State::kBetween;
  Stamp stamp_;
  bool is_mismatch_ = false;  // what ended this step here, once it has raised
  uint64_t num_parked_ = 0;
};

}  // namespace pydist
