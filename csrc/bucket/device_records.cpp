#include "bucket/device_records.h"

#include <unistd.h>

#include <utility>

#include "base/clock.h"

namespace pydist {

namespace {

constexpr double kDestruction_s = 5;
constexpr useconds_t kSleep_us = 50;

}  // namespace

DeviceRecords::DeviceRecords(std::shared_ptr<NcclCommunicator> communicator, int num_parameters)
    : communicator_(std::move(communicator)),
      num_words_(RoundRecord(num_parameters).num_words()),
      records_(communicator_->size(), RoundRecord(num_parameters)) {}

DeviceRecords::~DeviceRecords() {
  try {
    const DeviceGuard guard(communicator_->device());
    if (!wait_for_all()) return;
    for (Slot& slot : pending_) free_.push_back(std::move(slot));
    for (Slot& slot : captured_) free_.push_back(std::move(slot));
    for (const Slot& slot : free_) {
      device_runtime()->free_pinned(slot.pinned);
      device_runtime()->deallocate(slot.device);
    }
  } catch (const std::exception&) {
    // The device has failed: what it may still use is left to the end of the process.
  }
}

bool DeviceRecords::wait_for_all() const {
  const double deadline_s = monotonic_s() + kDestruction_s;
  for (const Slot& slot : pending_) {
    while (!slot.received.is_complete()) {
      if (monotonic_s() > deadline_s) return false;
      ::usleep(kSleep_us);
    }
  }
  return true;
}

DeviceRecords::Slot DeviceRecords::take_slot() {
  if (!free_.empty()) {
    Slot slot = std::move(free_.back());
    free_.pop_back();
    return slot;
  }
  const size_t nbytes = (1 + records_.size()) * num_words_ * sizeof(uint64_t);
  Slot slot;
  slot.pinned = static_cast<uint64_t*>(device_runtime()->allocate_pinned(nbytes));
  slot.device = static_cast<uint64_t*>(device_runtime()->allocate(nbytes));
  return slot;
}

void DeviceRecords::send(const RoundRecord& mine) {
  DeviceRuntime& runtime = *device_runtime();
  const Stream stream = communicator_->stream();
  const size_t nbytes = num_words_ * sizeof(uint64_t);
  Slot slot = take_slot();
  mine.write(slot.pinned);
  runtime.copy(slot.device, slot.pinned, nbytes, stream);
  communicator_->all_gather(slot.device, slot.device + num_words_, static_cast<int64_t>(num_words_),
                            DType::kInt64, "what ranks tell of a backward");
  runtime.copy(slot.pinned + num_words_, slot.device + num_words_, records_.size() * nbytes,
               stream);
  if (runtime.is_capturing(stream)) {
    captured_.push_back(std::move(slot));
  } else {
    slot.received.record(stream);
    slot.mark = communicator_->mark();
    pending_.push_back(std::move(slot));
  }
}

const std::vector<RoundRecord>& DeviceRecords::read(Slot slot) {
  const uint64_t* words = slot.pinned + num_words_;
  for (size_t r = 0; r < records_.size(); ++r) records_[r].read(words + r * num_words_);
  free_.push_back(std::move(slot));
  return records_;
}

const std::vector<RoundRecord>& DeviceRecords::wait() {
  communicator_->wait(pending_.back().mark);
  while (!pending_.back().received.is_complete()) ::usleep(kSleep_us);  // it was recorded before
  Slot slot = std::move(pending_.back());
  pending_.pop_back();
  return read(std::move(slot));
}

const std::vector<RoundRecord>* DeviceRecords::poll() {
  if (pending_.empty() || !pending_.front().received.is_complete()) return nullptr;
  Slot slot = std::move(pending_.front());
  pending_.pop_front();
  return &read(std::move(slot));
}

}  // namespace pydist
