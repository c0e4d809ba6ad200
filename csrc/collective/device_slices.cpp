// The steps of the mean by slices, all in the communicator's stream.
#include "collective/device_slices.h"

#include <utility>
#include <vector>

namespace pydist {

namespace {

constexpr int kVectorNbytes = 16;  // of the kernels' accesses

// Equal slices where that leaves all of them well aligned, else whole blocks.
int64_t slice_elements(const MeanTask& task, int size) {
  const int64_t even = task.count / size;
  if (task.own == task.wire && task.count % size == 0 &&
      element_nbytes(task.own, even) % kVectorNbytes == 0) {
    return even;
  }
  const int64_t unit = WireParts::kAlignment * size;
  return (task.count + unit - 1) / unit * WireParts::kAlignment;
}

}  // namespace

void DeviceSlices::mean(const MeanTask& task) {
  const int size = communicator_->size();
  const WireParts slices(task, size, slice_elements(task, size));
  if (size == 1 && task.scale == 1 && !slices.are_apart()) return;
  const size_t received_nbytes = size > 1 ? slices.nbytes() : 0;
  uint8_t* scratch =
      scratch_.reserve(received_nbytes + (slices.are_apart() ? slices.nbytes() : 0));
  uint8_t* apart = scratch + received_nbytes;
  uint8_t* travelling = slices.travelling(apart);
  slices.encode(apart, communicator_->stream());
  if (size > 1) exchange(slices, travelling, scratch, task.what);
  add(task, slices, travelling, scratch);
  if (size > 1) gather(slices, travelling, task.what);
  slices.decode(apart, communicator_->stream());
}

// One message to and from every other rank; `send(rank)` and `receive(rank)` say what lies where.
template <class Send, class Receive>
void DeviceSlices::swap(Send&& send, Receive&& receive, const std::string& what) {
  const int rank = communicator_->rank();
  const int size = communicator_->size();
  std::vector<NcclCommunicator::Transfer> transfers;
  for (int distance = 1; distance < size; ++distance) {
    const int to = (rank + distance) % size;
    const int from = (rank + size - distance) % size;
    const Place sent = send(to);
    const Place received = receive(from);
    if (sent.nbytes > 0) transfers.push_back({sent.data, sent.nbytes, to, true});
    if (received.nbytes > 0) transfers.push_back({received.data, received.nbytes, from, false});
  }
  communicator_->exchange(transfers, what);
}

void DeviceSlices::exchange(const WireParts& slices, uint8_t* travelling, uint8_t* received,
                            const std::string& what) {
  const size_t own_nbytes = slices.nbytes(communicator_->rank());
  swap([&](int to) { return Place{travelling + slices.offset(to), slices.nbytes(to)}; },
       [&](int from) { return Place{received + from * slices.part_nbytes(), own_nbytes}; }, what);
}

void DeviceSlices::add(const MeanTask& task, const WireParts& slices, uint8_t* travelling,
                       uint8_t* received) {
  const int rank = communicator_->rank();
  ReduceSegmentsArguments arguments;
  arguments.inputs = received;
  arguments.stride_nbytes = static_cast<int64_t>(slices.part_nbytes());
  arguments.own_input = travelling + slices.offset(rank);
  arguments.own = rank;
  arguments.num_inputs = communicator_->size();
  arguments.output = travelling + slices.offset(rank);
  arguments.num_elements = slices.num_elements(rank);
  arguments.scale = task.scale;
  reduce_segments(task.wire, task.wire, arguments, communicator_->stream());
}

// Equal slices are NCCL's all-gather. The last slices of the caller's memory may be shorter, and
// then all are sent one by one.
void DeviceSlices::gather(const WireParts& slices, uint8_t* travelling, const std::string& what) {
  const int rank = communicator_->rank();
  const auto place = [&](int owner) {
    return Place{travelling + slices.offset(owner), slices.nbytes(owner)};
  };
  if (slices.are_apart() || slices.nbytes(communicator_->size() - 1) == slices.part_nbytes()) {
    communicator_->all_gather(place(rank).data, travelling, slices.part_nbytes(), DType::kUInt8,
                              what);
  } else {
    swap([&](int) { return place(rank); }, place, what);
  }
}

}  // namespace pydist
