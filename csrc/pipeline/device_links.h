// Carries the memory of a channel's tensors from device to device, beside its messages.
//
// Each directed pair of ranks has a communicator and a stream of its own. A message still goes
// through the host: when it arrives, the sender has enqueued its send, and only then the receiver
// enqueues the receive, so that neither waits for what comes later, whatever the schedule. What a
// value looks like (its structure, dtypes, shapes, strides) is told when it changes, else by
// number.
//
//   sender     take_out()   current stream --> link's stream: send; the tensors are kept until done
//   receiver   announce()   the message is here
//              post()       memory of torch's; link's stream: receive
//              hand_out()   link's stream --> current stream, which uses the tensors from then on
//
// Nothing waits on the host. What was announced is received, even if nobody wants it any more:
// after a step that failed, sends and receives still pair up.
#pragma once

#include <ATen/core/Tensor.h>

#include <deque>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>
#include <vector>

#include "base/device_handles.h"
#include "collective/nccl_communicator.h"
#include "pipeline/channel.h"
#include "pipeline/channel_options.h"
#include "pipeline/description_book.h"

namespace pydist {

struct DeviceLinkOptions {
  at::Device device;                       // of this rank's tensors
  std::vector<std::pair<int, int>> links;  // (from, to), the same on all ranks, each once
};

class DeviceLinks {
 public:
  // The tensors of one message, from its arrival on. Handed out, or left to the link.
  class Arrival;

  // Collective. `store` has a prefix of its own.
  DeviceLinks(const c10::intrusive_ptr<c10d::Store>& store, const ChannelOptions& options,
              const DeviceLinkOptions& device);
  ~DeviceLinks();
  DeviceLinks(const DeviceLinks&) = delete;
  DeviceLinks& operator=(const DeviceLinks&) = delete;

  at::Device device() const { return device_; }
  // Raises PeerError or TimeoutError where a link has failed: for good.
  void check();
  // A step runs on the stream that is current here.
  void begin_step();
  // The stream waits for all that the links have in flight: they join the end of a capture, and
  // launches of a graph, whose sends and receives go over the same links, come after it.
  void end_step();

  // Enqueues the send of tensors on the device; leaves in `message` what goes through the host.
  void take_out(int destination, Message& message, const std::string& what);
  // In the order in which `source` has sent. Gives the message back as it was, but that it has no
  // tensors on the device yet.
  std::shared_ptr<Arrival> announce(int source, Message& message, std::string what);
  // In a step: enqueues the receives of all that has been announced. Raises where there is no
  // memory for it; the next call tries again.
  void post();
  void hand_out(int source, Arrival& arrival, Message& message);

  // No step will work any more: what is enqueued here ends, as on the peers. Never throws.
  void abandon(const std::string& reason) noexcept;
  // In a forked child, where nothing of the device may be touched.
  void forget() noexcept;

  uint64_t moved_nbytes() const { return moved_nbytes_; }
  uint64_t num_described() const;

 private:
  struct InFlight {
    OwnedEvent done;
    std::vector<at::Tensor> tensors;
    bool captured;
  };
  struct Outbox;
  struct Inbox;

  void connect(const c10::intrusive_ptr<c10d::Store>& store, const ChannelOptions& options,
               std::pair<int, int> link);
  Outbox& outbox(int destination) { return *outboxes_[static_cast<size_t>(destination)]; }
  Inbox& inbox(int source) { return *inboxes_[static_cast<size_t>(source)]; }
  void receive(Inbox& inbox, Arrival& arrival);
  void prepare_next(Inbox& inbox, const Arrival& arrival);
  bool is_over(const OwnedEvent& done) const { return !capturing_ && done.is_complete(); }
  void drop_captured();
  template <class Visit>
  void for_each_communicator(Visit&& visit);

  const int rank_;
  const at::Device device_;
  int device_index_ = 0;     // among those of the device's runtime
  Stream stream_ = nullptr;  // of the step
  bool capturing_ = false;
  // Since the first capture. Before a step a graph may have been launched, after which its receives
  // come: none has memory that was made before.
  bool has_graph_ = false;
  uint64_t moved_nbytes_ = 0;
  std::vector<std::unique_ptr<Outbox>> outboxes_;  // by destination
  std::vector<std::unique_ptr<Inbox>> inboxes_;    // by source
};

}  // namespace pydist
