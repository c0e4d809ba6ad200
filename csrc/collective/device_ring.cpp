// What the ring's template is given on a device.
#include "collective/device_ring.h"

#include <algorithm>
#include <utility>

#include "collective/ring.h"

namespace pydist {

// Scratch memory: places for the segments in flight, and behind them, where the elements travel in
// another type, all segments.
class DeviceRing::Transport {
 public:
  Transport(DeviceRing& ring, const MeanTask& task, const RingPlan& plan)
      : ring_(ring),
        task_(task),
        segments_(task, plan.num_segments(), plan.segment_elements()),
        next_((ring.communicator_->rank() + 1) % plan.size()),
        previous_((ring.communicator_->rank() + plan.size() - 1) % plan.size()) {
    const size_t places_nbytes = plan.segments_in_flight() * segments_.part_nbytes();
    places_ =
        ring.scratch_.reserve(places_nbytes + (delivers() ? segments_.nbytes() : 0));
    apart_ = places_ + places_nbytes;
    travelling_ = segments_.travelling(apart_);
  }

  Stream mover() const { return ring_.communicator_->stream(); }
  Stream adder() const { return ring_.adder_.get(); }
  OwnedEvent& moved(int k) { return ring_.moved_[k]; }
  OwnedEvent& added(int k) { return ring_.added_[k]; }
  bool delivers() const { return segments_.are_apart(); }

  void begin(Stream stream) { segments_.encode(apart_, stream); }

  void exchange(Stream, RingSegment sent, RingSegment received, int k, bool adds) {
    transfers_.clear();
    if (sent.count > 0) {
      transfers_.push_back({place_of(sent), segments_.nbytes(sent.index), next_, true});
    }
    if (received.count > 0) {
      uint8_t* to = adds ? place(k) : place_of(received);
      transfers_.push_back({to, segments_.nbytes(received.index), previous_, false});
    }
    ring_.communicator_->exchange(transfers_, task_.what);
  }

  void add(Stream stream, RingSegment segment, int k, bool completes) {
    ReduceSegmentsArguments arguments;
    arguments.inputs = place(k);
    arguments.own_input = place_of(segment);
    arguments.own = 1;
    arguments.num_inputs = 2;
    arguments.output = place_of(segment);
    arguments.num_elements = segment.count;
    arguments.scale = completes ? task_.scale : 1;
    reduce_segments(task_.wire, task_.wire, arguments, stream);
  }

  void deliver(Stream stream, RingSegment segment) {
    segments_.decode_part(apart_, segment.index, stream);
  }

 private:
  uint8_t* place(int k) const { return places_ + k * segments_.part_nbytes(); }
  uint8_t* place_of(RingSegment segment) const {
    return travelling_ + segments_.offset(segment.index);
  }

  DeviceRing& ring_;
  const MeanTask& task_;
  const WireParts segments_;
  const int next_;
  const int previous_;
  uint8_t* places_;
  uint8_t* apart_;
  uint8_t* travelling_;
  std::vector<NcclCommunicator::Transfer> transfers_;
};

DeviceRing::DeviceRing(std::shared_ptr<NcclCommunicator> communicator, DeviceScratch& scratch)
    : communicator_(std::move(communicator)),
      scratch_(scratch),
      moved_(kMaxInFlight),
      added_(kMaxInFlight) {}

void DeviceRing::mean(const MeanTask& task) {
  const int size = communicator_->size();
  const int64_t slice_nbytes = element_nbytes(task.wire, task.count / size);
  const auto in_flight =
      static_cast<int>(std::clamp<int64_t>(slice_nbytes / kSegmentNbytes, 1, kMaxInFlight));
  const RingPlan plan(task.count, size, communicator_->rank(), in_flight, WireParts::kAlignment);
  Transport transport(*this, task, plan);
  run_ring(plan, transport);
}

}  // namespace pydist
