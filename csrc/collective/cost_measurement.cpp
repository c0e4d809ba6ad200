#include "collective/cost_measurement.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <string>

#include "base/clock.h"
#include "collective/device_ring.h"
#include "collective/device_slices.h"

namespace pydist {

namespace {

// Of float32 as it is: from where latency is everything to where bandwidth is. Larger ones only
// while they are fast, but two sizes in any case.
constexpr int64_t kSizes_nbytes[] = {16 << 10, 256 << 10, 4 << 20, 32 << 20};
constexpr size_t kFewestSizes = 2;
constexpr double kLongest_s = 1e-3;
// The host takes the time of a batch of calls, as the device's events have none; the shortest batch
// is the one least disturbed.
constexpr int kNumBatches = 2;
constexpr int kCallsPerBatch = 3;
constexpr useconds_t kSleep_us = 50;

constexpr size_t kNumAlgorithms = CostModel::kAlgorithms.size();
using Times = std::array<double, kNumAlgorithms>;

class Measurement {
 public:
  explicit Measurement(const std::shared_ptr<NcclCommunicator>& communicator)
      : communicator_(communicator),
        scratch_(communicator),
        ring_(communicator, scratch_),
        slices_(communicator, scratch_) {}

  Times times(int64_t nbytes) {
    const std::shared_ptr<void> memory = communicator_->allocate(nbytes);
    Times own;
    for (size_t i = 0; i < kNumAlgorithms; ++i) {
      own[i] = time_s(CostModel::kAlgorithms[i], static_cast<uint8_t*>(memory.get()), nbytes);
    }
    return agree(own);
  }

 private:
  void call(Algorithm algorithm, uint8_t* data, int64_t nbytes) {
    const auto count = static_cast<int64_t>(nbytes / sizeof(float));
    const MeanTask task{data, count, Element::kFloat32, Element::kFloat32, 1, what_};
    if (algorithm == Algorithm::kRing) return ring_.mean(task);
    if (algorithm == Algorithm::kSlices) return slices_.mean(task);
    communicator_->all_reduce(data, data, count, DType::kFloat32, ReduceOp::kMean, 0, what_);
  }

  double time_s(Algorithm algorithm, uint8_t* data, int64_t nbytes) {
    call(algorithm, data, nbytes);  // the first connects ranks and allocates
    double shortest_s = std::numeric_limits<double>::infinity();
    for (int batch = 0; batch < kNumBatches; ++batch) {
      communicator_->wait(communicator_->mark());
      const double begin_s = monotonic_s();
      for (int i = 0; i < kCallsPerBatch; ++i) call(algorithm, data, nbytes);
      communicator_->wait(communicator_->mark());
      shortest_s = std::min(shortest_s, (monotonic_s() - begin_s) / kCallsPerBatch);
    }
    return shortest_s;
  }

  // The longest of all ranks.
  Times agree(const Times& own) {
    DeviceRuntime& runtime = *device_runtime();
    const int size = communicator_->size();
    const size_t nbytes = size * sizeof(Times);
    const std::shared_ptr<void> pinned(runtime.allocate_pinned(nbytes),
                                       [&](void* memory) { runtime.free_pinned(memory); });
    const std::shared_ptr<void> device = communicator_->allocate(nbytes);
    auto* mine = static_cast<uint8_t*>(device.get()) + communicator_->rank() * sizeof(Times);
    std::memcpy(pinned.get(), &own, sizeof(Times));
    runtime.copy(mine, pinned.get(), sizeof(Times), communicator_->stream());
    communicator_->all_gather(mine, device.get(), kNumAlgorithms, DType::kFloat64, what_);
    runtime.copy(pinned.get(), device.get(), nbytes, communicator_->stream());
    OwnedEvent received;
    received.record(communicator_->stream());
    communicator_->wait(communicator_->mark());
    while (!received.is_complete()) ::usleep(kSleep_us);  // it was recorded before
    Times longest = {};
    for (int rank = 0; rank < size; ++rank) {
      Times theirs;
      std::memcpy(&theirs, static_cast<uint8_t*>(pinned.get()) + rank * sizeof(Times),
                  sizeof(Times));
      for (size_t i = 0; i < kNumAlgorithms; ++i) longest[i] = std::max(longest[i], theirs[i]);
    }
    return longest;
  }

  const std::string what_ = "a measurement of how fast ranks exchange";
  std::shared_ptr<NcclCommunicator> communicator_;
  DeviceScratch scratch_;
  DeviceRing ring_;
  DeviceSlices slices_;
};

}  // namespace

CostModel measure_costs(const std::shared_ptr<NcclCommunicator>& communicator) {
  Measurement measurement(communicator);
  std::array<std::vector<Timing>, kNumAlgorithms> timings;
  for (const int64_t nbytes : kSizes_nbytes) {
    const Times times = measurement.times(nbytes);
    for (size_t i = 0; i < kNumAlgorithms; ++i) timings[i].push_back({nbytes, times[i]});
    const double longest_s = *std::max_element(times.begin(), times.end());
    if (timings[0].size() >= kFewestSizes && longest_s > kLongest_s) break;
  }
  return CostModel(timings);
}

}  // namespace pydist
