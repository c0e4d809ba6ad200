// The channel over a torch process group of its own, for ranks that share no memory.
//
// A message is one run of bytes (message_image.h), sent as a block of fixed size and, if there is
// more, the rest. One thread per source always has a receive posted: a process group can only be
// waited for, and a wait that is given up breaks the group. So the stream from a source survives a
// step that fails. One more thread waits for sends to end, which keep their bytes until then. A
// failure is told through the Store, which those that wait look at ten times a second; a death by
// the connection that breaks.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "backend/byte_streams.h"
#include "pipeline/channel_options.h"
#include "pipeline/step_channel.h"
#include "transport/store.h"

namespace pydist {

class ProcessGroupChannel final : public StepChannel {
 public:
  // Collective. `store` has a prefix of its own: ranks leave their failures there.
  ProcessGroupChannel(c10::intrusive_ptr<c10d::ProcessGroup> group, std::unique_ptr<Store> store,
                      const ChannelOptions& options);
  ~ProcessGroupChannel() override;

  int rank() const override { return options_.rank; }
  int size() const override { return options_.size; }
  std::string describe(int rank) const override;

 protected:
  void check() override;
  void post(int destination, const Message& message, const Stamp& stamp) override;
  void post_end_of_step(int destination, const Stamp& stamp) override;
  int hand_over() override;
  void take_in() override;
  void wait(const std::function<int()>& missing, const Describe& describe) override;
  void publish(const Failure& failure) noexcept override;
  std::optional<Failure> find_failure(const Stamp& stamp, bool urgent) override;
  void trim_memory() override {}

 private:
  [[noreturn]] void raise_lost(const std::string& operation);

  const ChannelOptions options_;
  const std::unique_ptr<Store> store_;
  std::vector<std::string> pids_;  // by rank
  std::unique_ptr<ByteStreams> streams_;
  uint64_t newest_generation_ = 0;  // that a peer has been heard to be in
  double next_look_s_ = 0;          // at the store
  std::vector<uint8_t> scratch_;    // the envelope that is being posted
};

}  // namespace pydist
