// The choice of an algorithm, and the way to it.
#include "collective/device_all_reduce.h"

#include <algorithm>
#include <optional>

#include "base/check.h"
#include "collective/cost_measurement.h"
#include "collective/device_ring.h"
#include "collective/device_slices.h"

namespace pydist {

namespace {

// Ring and slices take larger buffers in pieces, which bounds their scratch memory.
constexpr int64_t kPieceNbytes = 128 << 20;

// As on the other transports, elements that are no wider than the wire's travel as they are.
Element wire_of(WireType wire, Element own) {
  constexpr Element kWires[] = {Element::kFloat16, Element::kBFloat16, Element::kFloat8};
  if (wire == WireType::kSame) return own;
  const Element wanted = kWires[static_cast<int>(wire) - 1];
  // Without float8's scales.
  const int64_t nbytes = wanted == Element::kFloat8 ? 1 : element_nbytes(wanted, 1);
  return nbytes < element_nbytes(own, 1) ? wanted : own;
}

bool is_power_of_two(int number) { return (number & (number - 1)) == 0; }

class AllReduce : public DeviceAllReduce {
 public:
  AllReduce(std::shared_ptr<NcclCommunicator> communicator, Algorithm algorithm)
      : communicator_(std::move(communicator)),
        algorithm_(algorithm),
        scratch_(communicator_),
        ring_(communicator_, scratch_),
        slices_(communicator_, scratch_) {
    const bool is_open = algorithm == Algorithm::kAuto && communicator_->size() > 1;
    // A graph that is being captured can be timed by nobody.
    if (is_open && !device_runtime()->is_capturing(device_runtime()->current_stream())) {
      costs_ = measure_costs(communicator_);
    }
  }

  void mean(void* data, int64_t count, DType dtype, WireType wire, int divisor,
            const std::string& what) override {
    const DeviceGuard guard(communicator_->device());
    if (divisor == 0) divisor = communicator_->size();
    const Element own = element_of(dtype);
    const MeanTask task{static_cast<uint8_t*>(data), count,         own,
                        wire_of(wire, own),          1.0 / divisor, what};
    if (count == 0) return;
    switch (choose(count, dtype, wire)) {
      case Algorithm::kRing:
        return in_pieces(task, [this](const MeanTask& piece) { ring_mean(piece); });
      case Algorithm::kSlices:
        return in_pieces(task, [this](const MeanTask& piece) { slices_.mean(piece); });
      default:
        return nccl_mean(task, dtype, divisor);
    }
  }

  Algorithm choose(int64_t count, DType dtype, WireType wire) const override {
    const Element own = element_of(dtype);
    if (algorithm_ != Algorithm::kAuto) return algorithm_;
    if (own == Element::kFloat16 || wire != WireType::kSame) return Algorithm::kSlices;
    return costs_ ? costs_->fastest(element_nbytes(own, count)) : Algorithm::kNccl;
  }

 private:
  // bfloat16 is divided after the sum where 1 / divisor would have to be rounded to it, which it
  // can hold.
  void nccl_mean(const MeanTask& task, DType dtype, int divisor) {
    PYDIST_CHECK(task.own == task.wire, UsageError, task.what, " is of ", element_name(task.own),
                 ", which algorithm=\"nccl\" cannot send as ", element_name(task.wire),
                 "; take \"auto\", \"slices\" or \"ring\"");
    const bool divides = task.own != Element::kBFloat16 || is_power_of_two(divisor);
    communicator_->all_reduce(task.data, task.data, task.count, dtype,
                              divides ? ReduceOp::kMean : ReduceOp::kSum, divisor, task.what);
    if (divides) return;
    ReduceSegmentsArguments arguments;
    arguments.inputs = task.data;
    arguments.output = task.data;
    arguments.num_elements = task.count;
    arguments.scale = task.scale;
    reduce_segments(task.own, task.own, arguments, communicator_->stream());
  }

  // One rank alone is no ring; it rounds as often by slices.
  void ring_mean(const MeanTask& task) {
    if (communicator_->size() == 1) return slices_.mean(task);
    ring_.mean(task);
  }

  template <class Mean>
  void in_pieces(const MeanTask& task, Mean&& mean) {
    const int64_t unit = WireParts::kAlignment * communicator_->size();
    const int64_t piece_elements =
        std::max(kPieceNbytes / element_nbytes(task.own, 1) / unit, int64_t{1}) * unit;
    for (int64_t begin = 0; begin < task.count; begin += piece_elements) {
      const int64_t count = std::min(piece_elements, task.count - begin);
      mean({task.data + element_nbytes(task.own, begin), count, task.own, task.wire, task.scale,
            task.what});
    }
  }

  const std::shared_ptr<NcclCommunicator> communicator_;
  const Algorithm algorithm_;
  DeviceScratch scratch_;
  DeviceRing ring_;
  DeviceSlices slices_;
  std::optional<CostModel> costs_;
};

}  // namespace

std::unique_ptr<DeviceAllReduce> DeviceAllReduce::create(
    std::shared_ptr<NcclCommunicator> communicator, Algorithm algorithm) {
  const DeviceGuard guard(communicator->device());
  return std::make_unique<AllReduce>(std::move(communicator), algorithm);
}

}  // namespace pydist
