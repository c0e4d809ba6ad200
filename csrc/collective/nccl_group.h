// NcclCommunicator over NCCL's own functions.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "collective/nccl_calls.h"
#include "collective/nccl_communicator.h"
#include "collective/nccl_memory.h"
#include "collective/nccl_watch.h"

namespace pydist {

class NcclGroup final : public NcclCommunicator, public std::enable_shared_from_this<NcclGroup> {
 public:
  NcclGroup(const nccl::Api& api, std::unique_ptr<Store> store, const NcclOptions& options)
      : options_(options), watch_(std::make_shared<NcclWatch>(api, std::move(store), options)) {}
  ~NcclGroup() override;
  void set_up();

  int rank() const override { return options_.rank; }
  int size() const override { return options_.size; }
  int device() const override { return options_.device; }
  std::string describe(int rank) const override { return watch_->meeting().describe(rank); }
  Stream stream() const override { return on_device_->stream.get(); }

  std::shared_ptr<void> allocate(size_t nbytes) override;
  std::shared_ptr<void> allocate_scratch(size_t nbytes) override;
  bool is_registering() const override { return on_device_->memory.is_registering(); }

  void after(Stream stream) override;
  void before(Stream stream) override;

  void all_reduce(const void* from, void* to, int64_t count, DType dtype, ReduceOp op, int divisor,
                  const std::string& what) override;
  void reduce_scatter(const void* from, void* to, int64_t count, DType dtype, ReduceOp op,
                      int divisor, const std::string& what) override;
  void all_gather(const void* from, void* to, int64_t count, DType dtype,
                  const std::string& what) override;
  void broadcast(void* data, int64_t count, DType dtype, int root,
                 const std::string& what) override;
  void broadcast(const std::vector<Piece>& pieces, int root, const std::string& what) override;
  void all_to_all(const void* from, void* to, size_t nbytes, const std::string& what) override;
  void exchange(const std::vector<Transfer>& transfers, const std::string& what) override;

  uint64_t mark() override;
  bool is_done(uint64_t mark) override;
  void wait(uint64_t mark) override;

  void check() override { watch_->check(); }
  void fail(const std::string& reason) noexcept override {
    watch_->fail({NcclFailure::Kind::kPeer, reason});
  }
  Counters counters() const override;

 private:
  // What lives on the device; a forked child leaves it alone.
  struct OnDevice {
    explicit OnDevice(NcclWatch& watch) : calls(stream.get()), memory(watch, stream.get()) {}
    OwnedStream stream;
    OwnedEvent after;
    OwnedEvent before;
    NcclCalls calls;
    NcclMemory memory;
  };

  // A mean by another divisor than the group's size: NCCL multiplies before it adds.
  struct Divisor {
    nccl::DataType type;
    int divisor;
    nccl::RedOp op;
  };

  const nccl::Api& api() const { return watch_->handle().api(); }
  bool is_capturing() const;
  std::shared_ptr<void> own(const NcclMemory::Block& block);
  void meet();
  void connect();
  template <class Call>
  void enqueue(const char* verb, const std::string& what, size_t nbytes, const Call& call);
  template <class Call>
  void make(const char* verb, const std::string& what, const Call& call);
  nccl::RedOp op_for(DType dtype, ReduceOp op, int divisor);
  nccl::RedOp mean_by(nccl::DataType type, int divisor);
  void require_rank(int rank) const;
  bool nothing_left();
  bool drain();
  bool await_abort() noexcept;
  void tear_down();

  const NcclOptions options_;
  const std::shared_ptr<NcclWatch> watch_;
  std::unique_ptr<OnDevice> on_device_;
  std::mutex order_mutex_;         // of after() and before()
  mutable std::mutex call_mutex_;  // calls are made one after another; guards what follows
  std::vector<Divisor> divisors_;
  Counters counters_;
};

}  // namespace pydist
