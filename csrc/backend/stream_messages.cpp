#include "backend/stream_messages.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/check.h"
#include "base/clock.h"
#include "base/fork.h"
#include "base/interrupt.h"

namespace pydist {

namespace {

constexpr size_t kBlockNbytes = size_t{4} << 10;  // most small messages fit
constexpr size_t kPayloadBegin = 64;              // behind the header
constexpr double kLook_s = 0.1;                   // between looks at whether all is to end
constexpr double kSending_s = 5;                  // at the end, for what is still being sent

MessageHeader header_of(const uint8_t* bytes) {
  MessageHeader header;
  std::memcpy(&header, bytes, sizeof(header));
  return header;
}

size_t run_nbytes(const uint8_t* block) { return kPayloadBegin + header_of(block).nbytes(); }

}  // namespace

StreamMessages::StreamMessages(c10::intrusive_ptr<c10d::ProcessGroup> group,
                               std::shared_ptr<Board> board, std::vector<std::string> ranks,
                               std::string name)
    : group_(std::move(group)),
      board_(std::move(board)),
      ranks_(std::move(ranks)),
      name_(std::move(name)) {
  watch_forks();
}

StreamMessages::~StreamMessages() {
  if (!streams_) return;
  if (in_forked_child()) {  // the threads are not there
    (void)streams_.release();
    deliverer_.detach();
    return;
  }
  const double deadline_s = monotonic_s() + kSending_s;
  for (;;) {
    const uint64_t seen = streams_->num_events();
    const int peer = streams_->sending_to();
    if (peer < 0 || !streams_->lost(peer).empty() || monotonic_s() > deadline_s) break;
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!failure_.empty()) break;
    streams_->wait_for_event(seen, kLook_s);
  }
  end_all(concat(name_, " has ended"));
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  deliverer_.join();
}

ByteStreams& StreamMessages::streams() {
  if (!streams_) {
    streams_ = std::make_unique<ByteStreams>(group_, kBlockNbytes, &run_nbytes);
    deliverer_ = std::thread([this] { deliver(); });
  }
  return *streams_;
}

// -- the calls -----------------------------------------------------------------------------------

void StreamMessages::send(const Buffer& buffer, int destination, int64_t tag) {
  const std::lock_guard<std::mutex> lock(mutex_);
  PYDIST_CHECK(failure_.empty(), PeerError, failure_);
  ByteStreams& to = streams();
  if (!to.lost(destination).empty()) std::rethrow_exception(loss_of(destination));
  const MessageHeader header = MessageHeader::of(buffer, tag);
  at::Tensor run = to.make_run(kPayloadBegin + header.nbytes());
  auto* bytes = run.mutable_data_ptr<uint8_t>();
  std::memset(bytes, 0, kPayloadBegin);
  std::memcpy(bytes, &header, sizeof(header));
  if (header.nbytes() > 0) std::memcpy(bytes + kPayloadBegin, buffer.data, header.nbytes());
  to.send(destination, std::move(run));
}

void StreamMessages::receive(const Buffer& buffer, int source, int64_t tag,
                             std::shared_ptr<void> keep_alive, std::shared_ptr<Request> request) {
  std::vector<Ended> ended;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    Receive receive{buffer, source, tag, std::move(keep_alive), std::move(request)};
    const auto found = std::find_if(parked_.begin(), parked_.end(), [&](const Arrived& arrived) {
      return receive.takes(arrived.source, header_of(arrived.bytes.const_data_ptr<uint8_t>()).tag);
    });
    streams();
    if (!failure_.empty()) {
      ended.push_back({std::move(receive), std::make_exception_ptr(PeerError(failure_)), -1});
    } else if (found != parked_.end()) {
      const Arrived arrived = std::move(*found);
      parked_.erase(found);
      ended.push_back(hand_over(std::move(receive), arrived));
    } else {
      posted_.push_back(std::move(receive));
      deliver_once(ended);  // its source may have been lost
    }
  }
  finish(ended);
}

void StreamMessages::end_all(const std::string& reason) noexcept {
  std::vector<Ended> ended;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (failure_.empty()) failure_ = reason;
    for (Receive& receive : posted_) {
      ended.push_back({std::move(receive), std::make_exception_ptr(PeerError(failure_)), -1});
    }
    posted_.clear();
  }
  finish(ended);
}

// -- what arrives --------------------------------------------------------------------------------

void StreamMessages::deliver() {
  const WithoutInterrupts without_interrupts;
  uint64_t seen = 0;
  for (;;) {
    if (board_->failed()) end_all(board_->failure());
    std::vector<Ended> ended;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (stopping_) return;
      seen = streams_->num_events();
      deliver_once(ended);
    }
    finish(ended);
    streams_->wait_for_event(seen, kLook_s);
  }
}

void StreamMessages::deliver_once(std::vector<Ended>& ended) {
  for (Arrived& arrived : streams_->take()) {
    const int64_t tag = header_of(arrived.bytes.const_data_ptr<uint8_t>()).tag;
    const auto taker = std::find_if(posted_.begin(), posted_.end(), [&](const Receive& receive) {
      return receive.takes(arrived.source, tag);
    });
    if (taker == posted_.end()) {
      parked_.push_back(std::move(arrived));
      continue;
    }
    ended.push_back(hand_over(std::move(*taker), arrived));
    posted_.erase(taker);
  }
  if (streams_->first_lost() < 0) return;
  for (auto it = posted_.begin(); it != posted_.end();) {
    const int peer = lost_peer(*it);
    if (peer < 0) {
      ++it;
      continue;
    }
    ended.push_back({std::move(*it), loss_of(peer), -1});
    it = posted_.erase(it);
  }
}

StreamMessages::Ended StreamMessages::hand_over(Receive receive, const Arrived& arrived) const {
  const auto* bytes = arrived.bytes.const_data_ptr<uint8_t>();
  const MessageHeader found = header_of(bytes);
  if (found.fits(receive.buffer)) {
    if (found.nbytes() > 0) {
      std::memcpy(receive.buffer.data, bytes + kPayloadBegin, found.nbytes());
    }
    return {std::move(receive), nullptr, arrived.source};
  }
  const std::string text = concat(
      "recv expected ", MessageHeader::of(receive.buffer, receive.tag).describe(), ", but ",
      ranks_[arrived.source], " sent ", found.describe(), "; make the tensors of the two agree");
  return {std::move(receive), std::make_exception_ptr(MismatchError(text)), arrived.source};
}

// Whose loss ends this receive: one from any rank might wait for the one that is lost.
int StreamMessages::lost_peer(const Receive& receive) {
  if (receive.source < 0) return streams_->first_lost();
  return streams_->lost(receive.source).empty() ? -1 : receive.source;
}

std::exception_ptr StreamMessages::loss_of(int peer) {
  return std::make_exception_ptr(PeerError(
      concat(ranks_[peer], " died or left (what did it print last?; the connection says: ",
             streams_->lost(peer), "); ", name_, " cannot send or receive with it any more")));
}

// Runs what others have hung on the requests, so no lock may be held.
void StreamMessages::finish(std::vector<Ended>& ended) {
  for (Ended& one : ended) {
    one.receive.keep_alive.reset();
    one.receive.request->finish(one.error, one.source);
  }
}

}  // namespace pydist
