#include "backend/byte_streams.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <chrono>
#include <cstring>

namespace pydist {

namespace {

constexpr int kBlockTag = 0;
constexpr int kRestTag = 1;
// Who waits for a peer decides how long; threads wait for as long as there is a connection.
constexpr std::chrono::milliseconds kForever = std::chrono::hours(24 * 365);

at::Tensor bytes(size_t nbytes) {
  return at::empty({static_cast<int64_t>(nbytes)}, at::TensorOptions(at::kByte));
}

at::Tensor part(const at::Tensor& run, size_t begin, size_t end) {
  return run.slice(0, static_cast<int64_t>(begin), static_cast<int64_t>(end));
}

}  // namespace

ByteStreams::ByteStreams(c10::intrusive_ptr<c10d::ProcessGroup> group, size_t block_nbytes,
                         Measure measure)
    : group_(std::move(group)),
      block_nbytes_(block_nbytes),
      measure_(std::move(measure)),
      lost_(group_->getSize()),
      waiting_(group_->getSize() + 1) {
  for (int r = 0; r < group_->getSize(); ++r) {
    if (r != group_->getRank()) threads_.emplace_back([this, r] { receive_from(r); });
  }
  threads_.emplace_back([this] { await_sends(); });
}

ByteStreams::~ByteStreams() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    for (const Work& work : waiting_) {
      if (work) work->abort();
    }
  }
  changed_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

at::Tensor ByteStreams::make_run(size_t nbytes) const {
  return bytes(std::max(nbytes, block_nbytes_));
}

void ByteStreams::add_event(const std::unique_lock<std::mutex>&) {
  ++num_events_;
  changed_.notify_all();
}

// -- sending -------------------------------------------------------------------------------------

void ByteStreams::send(int destination, at::Tensor run) {
  Sent sent{destination, run, {}};
  const auto nbytes = static_cast<size_t>(run.numel());
  try {
    std::vector<at::Tensor> block{part(run, 0, block_nbytes_)};
    sent.works.push_back(group_->send(block, destination, kBlockTag));
    if (nbytes > block_nbytes_) {
      std::vector<at::Tensor> rest{part(run, block_nbytes_, nbytes)};
      sent.works.push_back(group_->send(rest, destination, kRestTag));
    }
  } catch (const std::exception& error) {
    lose(destination, error.what());
  }
  std::unique_lock<std::mutex> lock(mutex_);
  sent_.push_back(std::move(sent));
  add_event(lock);
}

int ByteStreams::sending_to() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return sent_.empty() ? -1 : sent_.front().destination;
}

void ByteStreams::await_sends() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return stopping_ || !sent_.empty(); });
    if (stopping_) return;
    const Sent sent = sent_.front();  // stays there until it has gone
    for (const Work& work : sent.works) {
      waiting_.back() = work;
      lock.unlock();
      try {
        work->wait(kForever);
      } catch (const std::exception& error) {
        lose(sent.destination, error.what());
      }
      lock.lock();
      waiting_.back().reset();
      if (stopping_) return;
    }
    sent_.pop_front();
    add_event(lock);
  }
}

// -- receiving -----------------------------------------------------------------------------------

// False where the streams are to stop.
bool ByteStreams::receive(int source, at::Tensor into, int tag) {
  std::vector<at::Tensor> tensors{std::move(into)};
  Work work;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (stopping_) return false;
    work = group_->recv(tensors, source, tag);
    waiting_[source] = work;
  }
  work->wait(kForever);
  const std::lock_guard<std::mutex> lock(mutex_);
  waiting_[source].reset();
  return !stopping_;
}

void ByteStreams::receive_from(int source) {
  try {
    for (;;) {
      at::Tensor run = bytes(block_nbytes_);
      if (!receive(source, run, kBlockTag)) return;
      const size_t nbytes = measure_(run.const_data_ptr<uint8_t>());
      if (nbytes > block_nbytes_) {
        const at::Tensor whole = bytes(nbytes);
        std::memcpy(whole.mutable_data_ptr<uint8_t>(), run.const_data_ptr<uint8_t>(),
                    block_nbytes_);
        if (!receive(source, part(whole, block_nbytes_, nbytes), kRestTag)) return;
        run = whole;
      }
      std::unique_lock<std::mutex> lock(mutex_);
      arrived_.push_back({source, std::move(run)});
      add_event(lock);
    }
  } catch (const std::exception& error) {
    lose(source, error.what());
  }
}

std::vector<ByteStreams::Arrived> ByteStreams::take() {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<Arrived> arrived;
  arrived.swap(arrived_);
  return arrived;
}

// -- events --------------------------------------------------------------------------------------

void ByteStreams::lose(int peer, const std::string& why) {
  std::unique_lock<std::mutex> lock(mutex_);
  waiting_[peer].reset();
  if (stopping_) return;
  if (lost_[peer].empty()) lost_[peer] = why.empty() ? "unknown" : why;
  if (first_lost_ == -1) first_lost_ = peer;
  add_event(lock);
}

std::string ByteStreams::lost(int peer) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return lost_[peer];
}

int ByteStreams::first_lost() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return first_lost_;
}

uint64_t ByteStreams::num_events() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return num_events_;
}

void ByteStreams::wait_for_event(uint64_t seen, double at_most_s) {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait_for(lock, std::chrono::duration<double>(at_most_s),
                    [&] { return num_events_ != seen; });
}

}  // namespace pydist
