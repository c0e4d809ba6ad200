// One step's messages again and again, ready at once: what a rank's actions cost without peers.
//
// Benchmarks measure an executor with it. At first all goes through the real channel, and what is
// received is kept; after replay() nothing reaches another rank any more, and each message is there
// before anybody waits for it. All steps must then be of the same kind and shapes.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <tuple>

#include "pipeline/channel.h"

namespace pydist {

class ReplayChannel final : public Channel {
 public:
  explicit ReplayChannel(std::shared_ptr<Channel> real) : real_(std::move(real)) {}
  void replay() { replays_ = true; }

  int rank() const override { return real_->rank(); }
  int size() const override { return real_->size(); }
  std::string describe(int rank) const override { return real_->describe(rank); }

  void begin_step(StepKind kind) override;
  void send(int destination, Message message) override;
  Message receive(int source, const MessageKey& key, const Describe& describe) override;
  bool has_arrived(int source, const MessageKey& key) override;
  void flush(const Describe& describe) override;
  void end_step(const Describe& describe) override;
  void fail(const std::string& reason) noexcept override;
  ChannelCounters counters() const override { return real_->counters(); }

 private:
  // Source, kind, stage, microbatch, port.
  using Place = std::tuple<int, MessageKind, int32_t, int32_t, int32_t>;
  static Place place_of(int source, const MessageKey& key) {
    return {source, key.kind, key.stage, key.microbatch, key.port};
  }

  std::shared_ptr<Channel> real_;
  bool replays_ = false;
  std::map<Place, Message> kept_;
};

}  // namespace pydist
