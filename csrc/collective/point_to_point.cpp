#include "collective/point_to_point.h"

#include <cmath>

#include "base/check.h"
#include "base/fork.h"
#include "base/interrupt.h"

namespace pydist {

// A thread that waits for a message, and meanwhile moves all of this rank's.
class PointToPoint::Driving {
 public:
  explicit Driving(PointToPoint& messages) : messages_(messages) {
    messages_.num_driving_.fetch_add(1);
  }
  ~Driving() {
    const bool last = messages_.num_driving_.fetch_sub(1) == 1;
    if (last && messages_.has_work()) messages_.wake_worker();
  }

 private:
  PointToPoint& messages_;
};

PointToPoint::PointToPoint(std::shared_ptr<Board> board, const PayloadLayout& layout)
    : board_(std::move(board)),
      inbox_(board_, layout),
      watched_(new std::atomic<int>[board_->size() + 1]()) {
  for (int r = 0; r < board_->size(); ++r) {
    outboxes_.push_back(std::make_unique<MessageOutbox>(board_, layout, r));
  }
}

void PointToPoint::send(const Buffer& buffer, int destination, int64_t tag) {
  Transfer transfer(Transfer::Direction::kSend, buffer, destination, tag);
  run(transfer);
}

int PointToPoint::receive(const Buffer& buffer, int source, int64_t tag) {
  Transfer transfer(Transfer::Direction::kReceive, buffer, source, tag);
  run(transfer);
  return transfer.source;
}

std::shared_ptr<Request> PointToPoint::start_send(const Buffer& buffer, int destination,
                                                  int64_t tag, std::shared_ptr<void> keep_alive) {
  return start(Transfer::Direction::kSend, buffer, destination, tag, std::move(keep_alive));
}

std::shared_ptr<Request> PointToPoint::start_receive(const Buffer& buffer, int source, int64_t tag,
                                                     std::shared_ptr<void> keep_alive) {
  return start(Transfer::Direction::kReceive, buffer, source, tag, std::move(keep_alive));
}

void PointToPoint::run(Transfer& transfer) {
  board_->check([&] { return transfer.describe(*board_); });
  post(transfer);
  try {
    if (!transfer.has_ended()) drive(transfer);
  } catch (...) {
    if (transfer.sends()) {
      outboxes_[transfer.peer]->withdraw(&transfer);
    } else {
      inbox_.withdraw(&transfer);
    }
    throw;
  }
  if (transfer.error) std::rethrow_exception(transfer.error);
  count(transfer);
}

std::shared_ptr<Request> PointToPoint::start(Transfer::Direction direction, const Buffer& buffer,
                                             int peer, int64_t tag,
                                             std::shared_ptr<void> keep_alive) {
  auto request =
      std::make_shared<MessageRequest>(*this, direction, buffer, peer, tag, std::move(keep_alive));
  Transfer& transfer = request->transfer_;
  board_->check([&] { return transfer.describe(*board_); });
  transfer.request = request;
  num_pending_.fetch_add(1);
  if (tag >= 0) watched(peer).fetch_add(1);
  post(transfer);
  if (!transfer.has_ended() && !transfer.sends()) progress();
  if (!transfer.has_ended() && has_work()) wake_worker();
  return request;
}

void PointToPoint::post(Transfer& transfer) {
  EndedRequests ended;
  if (transfer.sends()) {
    outboxes_[transfer.peer]->post(&transfer, ended);
  } else {
    inbox_.post(&transfer, ended);
  }
  finish(ended);
}

void PointToPoint::drive(const Transfer& transfer) {
  const Driving driving(*this);
  const int missing = transfer.peer == kAnySource ? Board::kAnybody : transfer.peer;
  board_->wait(
      [&] {
        if (transfer.has_ended()) return Board::kNobody;
        progress();
        return transfer.has_ended() ? Board::kNobody : missing;
      },
      [&] { return transfer.describe(*board_); });
}

// Moves what can be moved now.
void PointToPoint::progress() {
  EndedRequests ended;
  inbox_.pump(ended);
  for (auto& outbox : outboxes_) outbox->push(ended);
  finish(ended);
}

void PointToPoint::finish(const EndedRequests& ended) {
  for (const auto& request : ended) {
    const Transfer& transfer = request->transfer_;
    if (!transfer.error) count(transfer);
    if (transfer.tag >= 0) watched(transfer.peer).fetch_sub(1);
    num_pending_.fetch_sub(1);
    request->keep_alive_.reset();  // before the request is seen to have ended
    request->finish(transfer.error, transfer.source);
  }
}

void PointToPoint::count(const Transfer& transfer) {
  if (transfer.tag < 0) return;
  (transfer.sends() ? sent_ : received_).add(transfer.buffer.nbytes());
}

template <class ErrorOf>
void PointToPoint::end_all(ErrorOf&& error_of) {
  EndedRequests ended;
  inbox_.end_all(error_of, ended);
  for (auto& outbox : outboxes_) outbox->end_all(error_of, ended);
  finish(ended);
}

// Null while the group has not failed.
std::exception_ptr PointToPoint::failure_of(const Transfer& transfer) {
  try {
    board_->check([&] { return transfer.describe(*board_); });
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

void PointToPoint::close() {
  if (in_forked_child()) {
    (void)worker_.release();  // it does not run here
    return;
  }
  if (worker_) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
      changed_.notify_all();
    }
    board_->ring(board_->rank());
    worker_->join();
    worker_.reset();
  }
  const std::string leaving = board_->describe(board_->rank()) + " left " + board_->name();
  bool sending = false;
  for (const auto& outbox : outboxes_) sending |= !outbox->is_empty();
  if (sending) board_->fail(leaving + " while a send was in flight");
  end_all([&](const Transfer& transfer) {
    if (auto failure = failure_of(transfer)) return failure;
    return std::make_exception_ptr(
        PeerError(leaving + " while its " + transfer.describe(*board_) + " was in flight"));
  });
}

// ---- The worker.

void PointToPoint::wake_worker() {
  if (watching_.load()) return;  // it sees that there is more to do before it leaves
  const std::lock_guard<std::mutex> lock(mutex_);
  if (stopping_) return;
  if (!worker_) {
    const BlockSignals block_signals;
    worker_ = std::make_unique<std::thread>([this] { work(); });
  }
  changed_.notify_all();
}

void PointToPoint::work() {
  const WithoutInterrupts without_interrupts;
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return stopping_ || has_work(); });
    if (stopping_) return;
    watching_ = true;
    lock.unlock();
    watch();
    watching_ = false;
    lock.lock();
  }
}

// Until nothing is in flight, or somebody else moves things.
void PointToPoint::watch() {
  int peer = Board::kNobody;
  try {
    board_->watch(
        [&] {
          if (stopping_ || !has_work()) return Board::kNobody;
          progress();
          peer = missing();
          return has_work() ? peer : Board::kNobody;
        },
        [&] { return describe_one(peer); });
  } catch (...) {
    board_->fail(board_->describe(board_->rank()) + " failed in " + describe_one(peer));
    end_all([this](const Transfer& transfer) { return failure_of(transfer); });
  }
}

// A rank whose death would mean waiting in vain; one that has died before others.
int PointToPoint::missing() const {
  if (watched(kAnySource) > 0) return Board::kAnybody;
  int found = board_->rank();  // which is there
  for (int r = 0; r < board_->size(); ++r) {
    if (watched(r) == 0) continue;
    if (!board_->alive(r)) return r;
    found = r;
  }
  return found;
}

// What is in flight with a peer, for errors.
std::string PointToPoint::describe_one(int peer) {
  std::string text;
  const auto visit = [&](const Transfer& transfer) {
    const bool matches = transfer.tag >= 0 && (transfer.peer == peer || peer == Board::kAnybody);
    if (matches && text.empty()) text = transfer.describe(*board_);
  };
  inbox_.visit(visit);
  for (auto& outbox : outboxes_) outbox->visit(visit);
  return text.empty() ? "messages" : text;
}

// ---- Requests.

MessageRequest::MessageRequest(PointToPoint& messages, Transfer::Direction direction,
                               const Buffer& buffer, int peer, int64_t tag,
                               std::shared_ptr<void> keep_alive)
    : Request(messages.board_, ""),
      messages_(messages.weak_from_this()),
      transfer_(direction, buffer, peer, tag),
      keep_alive_(std::move(keep_alive)) {}

void MessageRequest::wait(double timeout_s) {
  if (std::isinf(timeout_s) && !transfer_.has_ended()) {
    if (const auto messages = messages_.lock()) messages->drive(transfer_);
  }
  Request::wait(timeout_s);
}

}  // namespace pydist
