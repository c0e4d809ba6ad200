// One group's collectives and messages over shared memory.
//
// Every collective begins with one synchronisation: each rank publishes its call, and reads
// everybody's. If they differ, all ranks raise before a byte has moved, and the group stays usable.
// Then the data takes one of three ways, with the same bits:
//
//   eager    small: the data lay beside the call, everything is there already
//   direct   the memory that peers need lies in arenas: they read it, and for all_reduce write it,
//            in place
//   staged   anything else: through slots of the board, two per rank, filled and emptied in turn
//
//   shm_communicator.cpp     the calls, what ranks agree on, failures
//   shm_communicator_eager.cpp, _direct.cpp, _staged.cpp
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "collective/call_counters.h"
#include "collective/communicator.h"
#include "collective/payload_layout.h"
#include "collective/point_to_point.h"
#include "transport/board.h"
#include "transport/store.h"

namespace pydist {

class ShmCommunicator final : public Communicator {
 public:
  // Collective over all ranks of the store; sets options.payload_nbytes. Raises HostError where
  // they do not share a host.
  static std::shared_ptr<ShmCommunicator> create(Store& store, BoardOptions options);
  ~ShmCommunicator() override;

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  const std::string& name() const override { return board_->name(); }
  std::string describe(int rank) const override { return board_->describe(rank); }
  double timeout_s() const override { return board_->timeout_s(); }
  void set_timeout_s(double timeout_s) override { board_->set_timeout_s(timeout_s); }
  Board& board() { return *board_; }

  void run(const Collective& collective) override;
  std::shared_ptr<Request> start(Collective collective, std::shared_ptr<void> keep_alive) override;
  void send(const Buffer& buffer, int destination, int64_t tag) override;
  int receive(const Buffer& buffer, int source, int64_t tag) override;
  std::shared_ptr<Request> start_send(const Buffer& buffer, int destination, int64_t tag,
                                      std::shared_ptr<void> keep_alive) override;
  std::shared_ptr<Request> start_receive(const Buffer& buffer, int source, int64_t tag,
                                         std::shared_ptr<void> keep_alive) override;
  CommunicatorCounts counts() const override;
  void fail(const std::string& reason) noexcept override { board_->fail(reason); }

 private:
  class ByteList;

  ShmCommunicator(std::shared_ptr<Board> board, const PayloadLayout& layout);

  // shm_communicator.cpp
  void execute(const Collective& collective);
  void carry_out(const Collective& collective, const Call& call);
  void check_destination(int destination) const;
  void check_source(int source) const;
  void execute_alone(const Collective& collective);
  void transfer(const Collective& collective, const Call& call);
  [[noreturn]] void refuse(const Call& call, const std::string& reason);
  void agree(const Call& call);
  [[noreturn]] void raise_mismatch();
  std::string describe_call_of(int r) const;
  void publish_splits(const Collective& collective);
  void check_splits();
  bool all_in_arena() const;
  void finish_reading(const Call& call);
  void wait_until_nobody_writes(const Collective& collective) noexcept;
  uint8_t* peer_memory(int r) const;

  // shm_communicator_eager.cpp
  size_t eager_nbytes(const Call& call) const;
  void fill_eager(const Collective& collective, size_t nbytes);
  void transfer_eager(const Collective& collective, size_t nbytes);
  const uint8_t* eager_data(int r, size_t nbytes) const;

  // shm_communicator_direct.cpp
  bool transfer_direct(const Collective& collective, const Call& call);
  void reduce_direct(const Collective& collective, const Call& call);
  int64_t claim_chunk(int64_t num_chunks);
  int64_t claim_of_run(int r, int64_t num_chunks);
  void reduce_chunk(const Collective& collective, int64_t begin, int64_t num_elements);
  void all_to_all_direct(const Collective& collective);

  // shm_communicator_staged.cpp
  struct StagedPlan;
  template <class Fill, class Combine, class Collect>
  void run_staged(const StagedPlan& plan, Fill&& fill, Combine&& combine, Collect&& collect);
  void transfer_staged(const Collective& collective, const Call& call);
  void reduce_staged(const Collective& collective, const Call& call);
  void reduce_scatter_staged(const Collective& collective, const Call& call);
  void gather_staged(const Collective& collective, const Call& call);
  void scatter_staged(const Collective& collective, const Call& call);
  void broadcast_staged(const Collective& collective, const Call& call);
  void all_to_all_staged(const Collective& collective, const Call& call);

  CallLine& line(int r) const {
    return *reinterpret_cast<CallLine*>(board_->payload() + layout_.call(sequence_, r));
  }
  RankFlags& flags(int r) const {
    return *reinterpret_cast<RankFlags*>(board_->payload() + layout_.flags(r));
  }
  // This call's splits of rank r: size_ of its input, then size_ of its output.
  int64_t* splits(int r) const {
    return reinterpret_cast<int64_t*>(board_->payload() + layout_.splits(sequence_, r));
  }
  uint8_t* slot(int64_t step, int r) const {
    return board_->payload() + layout_.slot(static_cast<uint64_t>(step), r);
  }
  uint8_t* result(int64_t step, int r) const {
    return board_->payload() + layout_.result(static_cast<uint64_t>(step), r);
  }
  void publish(std::atomic<uint64_t>& flag, uint64_t value) {
    flag.store(value, std::memory_order_release);
    board_->ring();
  }
  // Waits until every rank's flag (or only that of rank `only`) has reached the value.
  void await(Counter RankFlags::* flag, uint64_t value, const Call& call,
             int only = Board::kAnybody);

  const std::shared_ptr<Board> board_;
  const PayloadLayout layout_;
  const int rank_;
  const int size_;
  const std::shared_ptr<PointToPoint> messages_;

  CallCounters counters_;

  // Belongs to the operation whose turn it is. Equal on all ranks between operations.
  uint64_t sequence_ = 0;      // of the current call
  uint64_t staged_steps_ = 0;  // of all operations so far
  uint64_t chunks_ = 0;        // claimed by all ranks in all direct all_reduces so far
  std::vector<const void*> inputs_;
  std::vector<void*> outputs_;

  OperationQueue queue_;  // last: its worker ends first
};

}  // namespace pydist
