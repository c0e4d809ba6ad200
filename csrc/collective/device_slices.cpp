// The steps of the mean by slices, all in the communicator's stream.
#include "collective/device_slices.h"

#include <utility>
#include <vector>

namespace pydist {

namespace {

// Equal slices where that leaves none of them crooked, else all but the last of whole blocks.
int64_t slice_elements(const MeanTask& task, int size) {
  const int64_t even = task.count / size;
  if (task.own == task.wire && task.count % size == 0 &&
      element_nbytes(task.own, even) % kVectorNbytes == 0) {
    return even;
  }
  return rounded_up(divided_up(task.count, size), WireParts::kAlignment);
}

}  // namespace

void DeviceSlices::mean(const MeanTask& task) {
  const int size = communicator_->size();
  const WireParts slices(task, size, slice_elements(task, size));
  const int64_t received_nbytes = size > 1 ? slices.nbytes() : 0;
  uint8_t* scratch =
      scratch_.reserve(received_nbytes + (slices.are_apart() ? slices.nbytes() : 0), task.what);
  uint8_t* apart = scratch + received_nbytes;
  uint8_t* travelling = slices.travelling(apart);
  slices.encode(apart, communicator_->stream());
  if (size > 1) exchange(slices, travelling, scratch, task.what);
  add(task, slices, travelling, scratch);
  if (size > 1) gather(slices, travelling, task.what);
  slices.decode(apart, communicator_->stream());
}

void DeviceSlices::exchange(const WireParts& slices, uint8_t* travelling, uint8_t* received,
                            const std::string& what) {
  const int rank = communicator_->rank();
  const int size = communicator_->size();
  std::vector<NcclCommunicator::Transfer> transfers;
  for (int distance = 1; distance < size; ++distance) {
    const int to = (rank + distance) % size;
    const int from = (rank + size - distance) % size;
    const auto sent_nbytes = static_cast<size_t>(slices.nbytes(to));
    const auto own_nbytes = static_cast<size_t>(slices.nbytes(rank));
    if (sent_nbytes > 0) {
      transfers.push_back({travelling + slices.offset(to), sent_nbytes, to, true});
    }
    if (own_nbytes > 0) {
      transfers.push_back({received + from * slices.part_nbytes(), own_nbytes, from, false});
    }
  }
  communicator_->exchange(transfers, what);
}

void DeviceSlices::add(const MeanTask& task, const WireParts& slices, uint8_t* travelling,
                       uint8_t* received) {
  const int rank = communicator_->rank();
  ReduceSegmentsArguments arguments;
  arguments.inputs = received;
  arguments.stride_nbytes = slices.part_nbytes();
  arguments.own_input = travelling + slices.offset(rank);
  arguments.own = rank;
  arguments.num_inputs = communicator_->size();
  arguments.output = travelling + slices.offset(rank);
  arguments.num_elements = slices.num_elements(rank);
  arguments.scale = task.scale;
  reduce_segments(task.wire, task.wire, arguments, communicator_->stream());
}

// Slices of different lengths, of which the last lie at the end of the caller's memory, are sent
// one by one.
void DeviceSlices::gather(const WireParts& slices, uint8_t* travelling, const std::string& what) {
  const int rank = communicator_->rank();
  const int size = communicator_->size();
  uint8_t* own = travelling + slices.offset(rank);
  const bool equal = slices.are_apart() || slices.nbytes(size - 1) == slices.part_nbytes();
  if (equal) {
    communicator_->all_gather(own, travelling, slices.part_nbytes(), DType::kUInt8, what);
    return;
  }
  std::vector<NcclCommunicator::Transfer> transfers;
  for (int distance = 1; distance < size; ++distance) {
    const int to = (rank + distance) % size;
    const int from = (rank + size - distance) % size;
    const auto own_nbytes = static_cast<size_t>(slices.nbytes(rank));
    const auto nbytes = static_cast<size_t>(slices.nbytes(from));
    if (own_nbytes > 0) transfers.push_back({own, own_nbytes, to, true});
    if (nbytes > 0) transfers.push_back({travelling + slices.offset(from), nbytes, from, false});
  }
  communicator_->exchange(transfers, what);
}

}  // namespace pydist
