// The round over a device: every unit is reduced on the communicator's stream, and the host waits
// for nothing, but where this rank needs to know what the others used.
//
//   streams of backward      accumulate .. pack ─┐                   ┌─ unpack .. optimizer
//   the communicator's                           └─ mean .. mean ────┴─ records
//
// NCCL needs one order of calls on all ranks, so a unit waits for those before it. Which units are
// left out of rounds, ranks agree on through the Store, in the first round and where it changes.
//
// A large gradient is reduced where it lies. What is packed travels in memory of ours: buckets in
// NCCL's, the same on all ranks; large gradients that could not stay in torch's, for whether they
// could is up to each rank.
//
// Memory is safe by the streams alone: at the end of a round, every stream that accumulated in it
// waits for the communicator, so that what any of them allocates later is no longer in use.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "base/device_handles.h"
#include "bucket/device_pack.h"
#include "bucket/device_records.h"
#include "bucket/round.h"
#include "collective/device_all_reduce.h"
#include "collective/nccl_communicator.h"
#include "transport/store.h"

namespace pydist {

class DeviceRound final : public Round {
 public:
  // `all_reduce` is of the communicator; `store` has a prefix of its own; `device` is where the
  // gradients are. With the communicator's device as the current one.
  DeviceRound(std::shared_ptr<NcclCommunicator> communicator,
              std::unique_ptr<DeviceAllReduce> all_reduce, std::unique_ptr<Store> store,
              at::Device device, WireType wire, RoundOptions options);

  int rank() const override { return communicator_->rank(); }
  int size() const override { return communicator_->size(); }
  std::string describe(int rank) const override { return communicator_->describe(rank); }
  void* unit_memory(int unit) override;
  std::shared_ptr<void> hold_memory(int unit) override;
  // Not once gradients were seen on several streams: one may still read what another, which this
  // round does not know, hands to autograd as a gradient that nobody holds any more.
  bool reaches(const void*) const override { return !has_several_streams_; }
  bool publishes_all() const override { return true; }
  void begin(int divisor) override;
  bool leave_out(const Bitmap& units) override;
  void begin_second(int divisor) override;
  void accumulated(int unit) override;
  void open(int unit) override;
  void copy(int unit, CopyDirection direction, const std::vector<PackItem>& items) override;
  void publish(int unit, void* data) override;
  void progress() override {}
  const std::vector<RoundRecord>& end(const RoundRecord& mine) override;
  bool end_unanswered(const RoundRecord& mine) override;
  bool answers_late() const override { return true; }
  const std::vector<RoundRecord>* late_records() override;
  bool may_wait() const override;
  void finish() override {}  // what is enqueued later comes later, since end()
  void delivered() override;
  void check() override { communicator_->check(); }
  void fail(const std::string& reason) noexcept override { communicator_->fail(reason); }
  bool drain() noexcept override;

 private:
  struct UnitState {
    std::vector<Stream> sources;   // that what is published comes from, in this round
    std::shared_ptr<void> memory;  // made at first use
    void* data = nullptr;
    bool published = false;
    DevicePack to_unit, from_unit;
  };

  UnitState& state(int unit);
  DeviceRuntime& runtime() const { return *device_runtime(); }
  bool is_capturing() const;
  void launch(int begin, int end);
  void launch_published();
  void join();
  void wait_for_delivery(Stream stream);
  void mark_delivery();
  void agree_on_left_out(const Bitmap& units);
  void wait_for_peer(int peer, const std::string& key);
  void check_same(int peer, const Bitmap& mine, const Bitmap& theirs) const;
  void allocate_buckets();
  std::shared_ptr<void> allocate_alone(int unit) const;
  WireType wire_of(const Unit& unit) const;

  std::shared_ptr<NcclCommunicator> communicator_;
  std::unique_ptr<DeviceAllReduce> all_reduce_;
  std::unique_ptr<Store> store_;
  at::Device device_;
  WireType wire_;
  RoundOptions options_;
  DeviceRecords records_;
  std::vector<std::unique_ptr<UnitState>> states_;
  std::vector<Stream> seen_;  // in this round
  Bitmap left_out_;
  bool has_several_streams_ = false;
  uint64_t num_agreements_ = 0;
  int next_ = 0;  // the lowest unit that has not been launched in this round
  int divisor_ = 0;
  bool second_ = false;  // of the same backward
  OwnedEvent crossing_;
  OwnedEvent delivered_;  // of the last round, or of the memory's making
  Stream delivered_on_ = nullptr;
  bool has_delivered_ = false;
  bool delivered_in_capture_ = false;
};

}  // namespace pydist
