#include "collective/hosts_watch.h"

#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <sstream>
#include <thread>
#include <utility>

#include "base/clock.h"
#include "base/error.h"
#include "base/fork.h"
#include "base/interrupt.h"

namespace pydist {

namespace {

constexpr double kLookInCall_s = 0.1;
constexpr double kLookIdle_s = 0.5;  // also how late a sign of life may be given
constexpr double kSigns_s = 2;       // for those of all others
constexpr double kGrace_s = 1;       // beyond that, for a Store that is slow
constexpr double kRead_s = 5e-3;     // between looks for signs
constexpr int kMaxErrors = 3;        // of the Store, in a row: it is gone then

struct Progress {
  uint64_t begun = 0;
  uint64_t ended = 0;
  std::string encode() const { return concat(begun, " ", ended); }
  static Progress decode(const std::string& text) {
    Progress progress;
    std::istringstream(text) >> progress.begun >> progress.ended;
    return progress;
  }
};

}  // namespace

struct HostsWatch::State {
  std::unique_ptr<Store> store;  // the thread's alone
  int rank = 0;
  int size = 1;

  std::mutex mutex;  // of what follows
  std::condition_variable changed;
  Host host;
  Progress progress;
  std::string to_tell;
  bool wants_signs = false;
  bool has_signs = false;
  Signs signs;
  bool stopping = false;
  bool stopped = false;

  // The thread's.
  bool has_told = false;
  bool has_heard = false;
  bool has_given_sign = false;

  void look();
  void tell(const std::string& reason);
  void hear();
  void give_sign();
  Signs collect_signs();
};

HostsWatch::HostsWatch(std::unique_ptr<Store> store, int rank, int size, Host host)
    : state_(std::make_shared<State>()) {
  state_->store = std::move(store);
  state_->rank = rank;
  state_->size = size;
  state_->host = std::move(host);
  const BlockSignals block_signals;
  std::thread([state = state_] { watch(state); }).detach();
}

HostsWatch::~HostsWatch() {
  if (in_forked_child()) return;  // the thread does not run here
  std::unique_lock<std::mutex> lock(state_->mutex);
  if (state_->to_tell.empty()) state_->to_tell = state_->host.failure();
  state_->host = {};
  state_->stopping = true;
  state_->changed.notify_all();
  state_->changed.wait_for(lock, std::chrono::duration<double>(kGrace_s),
                           [this] { return state_->stopped; });
}

void HostsWatch::begin() {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  ++state_->progress.begun;
}

void HostsWatch::end() {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  state_->progress.ended = state_->progress.begun;
}

void HostsWatch::tell(const std::string& reason) noexcept {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  if (state_->to_tell.empty()) state_->to_tell = reason;
  state_->changed.notify_all();
}

HostsWatch::Signs HostsWatch::ask() {
  std::unique_lock<std::mutex> lock(state_->mutex);
  state_->wants_signs = true;
  state_->changed.notify_all();
  state_->changed.wait_for(lock, std::chrono::duration<double>(kSigns_s + kGrace_s),
                           [this] { return state_->has_signs || state_->stopped; });
  if (state_->has_signs) return state_->signs;
  Signs none;
  for (int r = 0; r < state_->size; ++r) {
    if (r != state_->rank) none.silent.push_back(r);
  }
  return none;
}

// -- the thread ----------------------------------------------------------------------------------

void HostsWatch::watch(const std::shared_ptr<State>& state) {
  const WithoutInterrupts without_interrupts;
  int num_errors = 0;
  std::unique_lock<std::mutex> lock(state->mutex);
  while (num_errors < kMaxErrors) {
    const bool in_call = state->progress.begun != state->progress.ended;
    const std::chrono::duration<double> pause(in_call ? kLookInCall_s : kLookIdle_s);
    state->changed.wait_for(lock, pause, [&] {
      return state->stopping || (state->wants_signs && !state->has_signs) ||
             (!state->to_tell.empty() && !state->has_told);
    });
    const bool is_last = state->stopping;
    lock.unlock();
    try {
      state->look();
      num_errors = 0;
    } catch (const std::exception&) {  // the Store is gone together with the rank that kept it
      ++num_errors;
    }
    lock.lock();
    if (is_last) break;
  }
  state->stopped = true;
  state->changed.notify_all();
}

void HostsWatch::State::look() {
  std::unique_lock<std::mutex> lock(mutex);
  if (to_tell.empty() && host.failure) to_tell = host.failure();
  const std::string reason = to_tell;
  const bool asks = wants_signs && !has_signs;
  const bool stops = stopping;
  lock.unlock();
  if (!reason.empty() && !has_told) tell(reason);
  if (stops) return;
  if (asks) {
    store->set("sign", "");
    store->set("news", "");
    const Signs found = collect_signs();
    lock.lock();
    signs = found;
    has_signs = true;
    changed.notify_all();
    return;
  }
  if ((has_heard && has_given_sign) || !store->check("news")) return;
  hear();
  give_sign();
}

void HostsWatch::State::tell(const std::string& reason) {
  if (!store->check("failure")) store->set("failure", reason);
  store->set("news", "");
  has_told = has_heard = true;
}

void HostsWatch::State::hear() {
  if (has_heard || !store->check("failure")) return;
  has_heard = true;
  const std::string reason = store->get("failure");
  const std::lock_guard<std::mutex> lock(mutex);  // so that it does not end meanwhile
  if (host.on_failure) host.on_failure(reason);
}

void HostsWatch::State::give_sign() {
  if (has_given_sign || !store->check("sign")) return;
  has_given_sign = true;
  std::unique_lock<std::mutex> lock(mutex);
  const std::string mine = progress.encode();
  lock.unlock();
  store->set(concat("sign/", rank), mine);
}

HostsWatch::Signs HostsWatch::State::collect_signs() {
  give_sign();
  std::unique_lock<std::mutex> lock(mutex);
  const uint64_t call = progress.begun;
  lock.unlock();
  Signs found;
  const double deadline_s = monotonic_s() + kSigns_s;
  for (int r = 0; r < size; ++r) {
    if (r == rank) continue;
    const std::string key = concat("sign/", r);
    bool has_come = store->check(key);
    while (!has_come && monotonic_s() < deadline_s) {
      ::usleep(static_cast<useconds_t>(kRead_s * 1e6));
      has_come = store->check(key);
    }
    if (!has_come) {
      found.silent.push_back(r);
    } else if (Progress::decode(store->get(key)).begun < call) {
      found.behind.push_back(r);
    }
  }
  found.store_answers = true;
  hear();  // one that failed may have told so meanwhile
  return found;
}

}  // namespace pydist
