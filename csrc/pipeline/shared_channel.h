// The channel over shared memory: a board of its own, and the arenas.
//
//   | last failures of each rank | link of each ordered pair: {ring's counters, flags, ring} |
//
// A ring carries envelopes (message_image.h); payloads lie in the sender's arena, from where the
// receiver copies them as soon as it looks, and counts the message as consumed; then the block is
// the sender's again. Small payloads, and those that the arena has no room for, follow their
// envelope through the ring. What a ring has no room for is kept by the sender.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "pipeline/arena_blocks.h"
#include "pipeline/channel_options.h"
#include "pipeline/step_channel.h"
#include "transport/board.h"
#include "transport/store.h"

namespace pydist {

class SharedChannel final : public StepChannel {
 public:
  // Collective. Raises HostError where the ranks cannot share memory.
  static std::unique_ptr<SharedChannel> create(Store& store, const ChannelOptions& options);
  ~SharedChannel() override;

  int rank() const override { return board_->rank(); }
  int size() const override { return board_->size(); }
  std::string describe(int rank) const override { return board_->describe(rank); }
  ChannelCounters counters() const override;

 protected:
  void check() override;
  void post(int destination, const Message& message, const Stamp& stamp) override;
  void post_end_of_step(int destination, const Stamp& stamp) override;
  int hand_over() override;
  void take_in() override;
  void wait(const std::function<int()>& missing, const Describe& describe) override;
  void publish(const Failure& failure) noexcept override;
  std::optional<Failure> find_failure(const Stamp& stamp, bool urgent) override;
  void trim_memory() override { blocks_->end_step(); }

 private:
  class Inbox;
  class Outbox;
  class Layout;
  class Retired;

  SharedChannel(std::shared_ptr<Board> board, const Layout& layout, const ChannelOptions& options);
  ArenaBlocks::Block add_payload(const Message& message);

  const std::shared_ptr<Board> board_;
  FailureRecords* const failures_;  // by rank
  const size_t inline_nbytes_;      // payloads up to this size go through the ring
  std::shared_ptr<ArenaBlocks> blocks_;
  std::vector<std::unique_ptr<Inbox>> inboxes_;    // by source
  std::vector<std::unique_ptr<Outbox>> outboxes_;  // by destination
  std::vector<uint8_t> scratch_;                   // the message that is being posted
};

}  // namespace pydist
