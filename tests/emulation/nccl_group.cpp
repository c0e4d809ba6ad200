#include "nccl_group.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "faults.h"
#include "options.h"
#include "planted.h"

namespace pydist::emulation {

namespace {

using SteadyClock = std::chrono::steady_clock;
using CommPointer = std::shared_ptr<CommState>;

struct Submitted {
  CommPointer comm;
  NcclCall call;
  StreamState* stream;
};

thread_local int group_depth = 0;
thread_local std::vector<Submitted> grouped;

std::mutex mutex;  // of the two below
std::map<const void*, CommPointer>& comms() {
  static auto* comms = new std::map<const void*, CommPointer>();
  return *comms;
}
Submitted& kept_back() {  // kWrongOrder
  static auto* kept = new Submitted();
  return *kept;
}
std::atomic<int64_t> num_calls{0};  // of this process, since the last reset

bool is_message(CallKind kind) { return kind == CallKind::kSend || kind == CallKind::kRecv; }

// All calls of one communicator in a group: collectives one after another, messages all at once,
// but those of one pair of ranks in their order.
class GroupStep {
 public:
  GroupStep(CommPointer comm, const std::vector<NcclCall>& calls) : comm_(std::move(comm)) {
    std::map<std::pair<CallKind, int>, size_t> lanes;
    for (const NcclCall& call : calls) {
      const bool messages = is_message(call.kind);
      const auto key =
          std::make_pair(messages ? call.kind : CallKind::kAllReduce, messages ? call.root : 0);
      const auto lane = lanes.emplace(key, lanes_.size()).first->second;
      if (lane == lanes_.size()) lanes_.emplace_back();
      lanes_[lane].push_back(make_step(comm_, call));
    }
    const int64_t number = num_calls++;
    const auto at_or_after = [&](double limit) { return limit >= 0 && number >= limit; };
    is_stuck_ = at_or_after(options().nccl_stuck_after);
    if (at_or_after(options().async_error_after)) {
      comm_->async_error = nccl::kRemoteError;
      is_stuck_ = true;
    }
    ++comm_->num_pending;
  }

  bool operator()() {
    const std::lock_guard<std::mutex> lock(comm_->stepping);
    if (!comm_->is_aborted && !advance()) return false;
    --comm_->num_pending;
    return true;
  }

 private:
  bool advance() {
    if (is_stuck_) return false;
    const auto now = SteadyClock::now();
    if (start_ == SteadyClock::time_point()) {
      start_ = now + std::chrono::microseconds(static_cast<int64_t>(options().nccl_delay_s * 1e6));
    }
    if (now < start_) return false;
    bool all = true;
    for (std::vector<Step>& lane : lanes_) {
      while (!lane.empty() && lane.front()()) lane.erase(lane.begin());
      all = all && lane.empty();
    }
    return all;
  }

  CommPointer comm_;
  std::vector<std::vector<Step>> lanes_;
  bool is_stuck_ = false;
  SteadyClock::time_point start_ = {};
};

void visit_call(const CommState& comm, const NcclCall& call, const VisitAccess& visit) {
  const size_t nbytes = call.count * nbytes_of(call.dtype);
  const size_t size = comm.size;
  const bool brings =
      call.kind != CallKind::kRecv && (call.kind != CallKind::kBroadcast || call.root == comm.rank);
  if (brings) {
    visit(Access::kRead, call.from, call.kind == CallKind::kReduceScatter ? size * nbytes : nbytes);
  }
  if (call.kind != CallKind::kSend) {
    visit(Access::kWrite, call.to, call.kind == CallKind::kAllGather ? size * nbytes : nbytes);
  }
  if (call.scale.device_scalar != nullptr) {
    visit(Access::kRead, call.scale.device_scalar, nbytes_of(call.dtype));
  }
}

Call call_of(const CommPointer& comm, const std::vector<NcclCall>& calls) {
  Call call;
  call.what = calls.front().what;
  if (calls.size() > 1) call.what = concat("a group of ", calls.size(), " from ", call.what, " on");
  call.visit = [comm, calls](const VisitAccess& visit) {
    // Its calls must be ordered. Not at its own address, where a tensor may have been before.
    visit(Access::kWrite, reinterpret_cast<const void*>(uintptr_t{1} + comm->number), 1);
    for (const NcclCall& each : calls) visit_call(*comm, each, visit);
  };
  call.begin = [comm, calls]() -> Step {
    if (comm->is_aborted) {
      record_fault(concat(calls.front().what, " begins, but ", comm->describe(), " has ended"));
    }
    return GroupStep(comm, calls);
  };
  call.note = [comm](const Deed& deed) { comm->clock.join(deed.clock); };
  return call;
}

// What a bug does with the memory of a call that has just been enqueued.
void strike_memory(const NcclCall& call) {
  const void* memory = call.from == nullptr ? call.to : call.from;
  const size_t nbytes = call.count * nbytes_of(call.dtype);
  if (strikes(Bug::kFreedEarly)) Device::instance().host_frees("a planted bug", memory, nbytes);
  if (strikes(Bug::kReusedEarly)) Device::instance().torch_touches(Access::kWrite, memory, nbytes);
}

// Two ranks connect at their first message, before anything is enqueued: which takes both, the one
// inside of its send and the other inside of its receive. Returns whether all have come.
std::function<bool()> connect(const CommPointer& comm, const std::vector<NcclCall>& calls) {
  std::shared_ptr<Segment> segment;
  {
    const std::lock_guard<std::mutex> lock(comm->stepping);
    segment = comm->segment;
  }
  std::vector<std::atomic<int>*> pairs;
  for (const NcclCall& call : calls) {
    if (!is_message(call.kind) || segment == nullptr) continue;
    const bool sends = call.kind == CallKind::kSend;
    auto& pair =
        sends ? segment->came[comm->rank][call.root] : segment->came[call.root][comm->rank];
    pair.fetch_or(sends ? kSenderCame : kReceiverCame);
    pairs.push_back(&pair);
  }
  return [segment, pairs] {
    return std::all_of(pairs.begin(), pairs.end(), [](const std::atomic<int>* pair) {
      return *pair == (kSenderCame | kReceiverCame);
    });
  };
}

nccl::Result launch(const CommPointer& comm, const std::vector<NcclCall>& calls,
                    StreamState* stream) {
  if (strikes(Bug::kUsedAfterAbort)) {
    abort(comm);
    comm_of(comm.get(), calls.front().what.c_str());
  }
  if (comm->async_error != 0) return static_cast<nccl::Result>(comm->async_error.load());
  if (strikes(Bug::kWrongStream)) stream = Device::instance().current_stream();
  const Call call = call_of(comm, calls);
  const auto is_connected = connect(comm, calls);
  const auto enqueue = [call, calls, stream, is_connected] {
    if (!is_connected()) return false;
    Device::instance().enqueue(*stream, call);
    strike_memory(calls.front());
    return true;
  };
  const bool polls = !comm->is_blocking && options().in_progress_polls > 0;
  if (!polls && enqueue()) return nccl::kSuccess;
  return pend(comm, call.what, enqueue, stream);
}

// One call for each communicator.
nccl::Result launch_all(std::vector<Submitted> submitted) {
  nccl::Result result = nccl::kSuccess;
  while (!submitted.empty()) {
    const CommPointer comm = submitted.front().comm;
    StreamState* const stream = submitted.front().stream;
    std::vector<NcclCall> calls;
    std::vector<Submitted> others;
    for (Submitted& each : submitted) {
      if (each.comm != comm) {
        others.push_back(std::move(each));
        continue;
      }
      if (each.stream != stream) {
        record_fault(concat("a group has calls of ", comm->describe(), " on two streams"));
      }
      calls.push_back(std::move(each.call));
    }
    raise_fault();
    const nccl::Result one = launch(comm, calls, stream);
    if (result == nccl::kSuccess) result = one;
    submitted = std::move(others);
  }
  return result;
}

}  // namespace

void check_stream_ready(Stream handle, const char* user) {
  if (group_depth > 0) {
    record_fault(concat(user, " while this thread has a group of NCCL's open, whose ",
                        grouped.size(), " calls are not enqueued yet"));
  }
  StreamState* const stream = Device::instance().stream(handle, user);
  const std::lock_guard<std::mutex> lock(mutex);
  for (const auto& [key, comm] : comms()) {
    const std::lock_guard<std::mutex> comm_lock(comm->mutex);
    if (comm->pending && comm->pending_on == stream) {
      record_fault(concat(user, " on ", stream->name, ", where ", comm->pending_what,
                          " is still in progress (ncclInProgress) and not enqueued yet"));
    }
  }
  raise_fault();
}

CommPointer comm_of(const void* handle, const char* user) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = comms().find(handle);
  if (found == comms().end()) {
    record_fault(concat(user, ": ", handle, " is no communicator"));
    raise_fault();
  }
  const CommPointer comm = found->second;
  const std::lock_guard<std::mutex> comm_lock(comm->mutex);
  if (comm->state == State::kDestroyed || comm->state == State::kAborted) {
    record_fault(concat(user, ": ", comm->describe(), " has been ",
                        comm->state == State::kAborted ? "aborted" : "destroyed"));
  }
  raise_fault();
  return comm;
}

CommPointer add_comm() {
  auto comm = std::make_shared<CommState>();
  const std::lock_guard<std::mutex> lock(mutex);
  comm->number = static_cast<int>(comms().size());
  comms()[comm.get()] = comm;
  return comm;
}

nccl::Result submit(const CommPointer& comm, NcclCall call, Stream handle) {
  StreamState* const stream = Device::instance().stream(handle, call.what.c_str());
  {
    const std::lock_guard<std::mutex> lock(comm->mutex);
    call.what = concat("call ", comm->num_calls++, " of ", comm->describe(), ": ", call.what);
    if (comm->pending || comm->state != State::kReady) {
      record_fault(concat(call.what, " while ", comm->pending_what,
                          " is in progress (ncclInProgress), or the communicator is finalized"));
    }
  }
  raise_fault();
  if (!is_message(call.kind) && group_depth == 0) {
    if (strikes(Bug::kWrongOrder)) {
      kept_back() = {comm, std::move(call), stream};
      return nccl::kSuccess;
    }
    if (kept_back().comm != nullptr) {
      const nccl::Result result = launch_all({{comm, std::move(call), stream}});
      if (result != nccl::kSuccess) return result;
      return launch_all({std::exchange(kept_back(), {})});
    }
  }
  grouped.push_back({comm, std::move(call), stream});
  return group_depth > 0 ? nccl::kSuccess : launch_all(std::exchange(grouped, {}));
}

void start_group() { ++group_depth; }

nccl::Result end_group() {
  if (strikes(Bug::kNoGroupEnd)) return nccl::kSuccess;
  if (group_depth == 0) {
    record_fault("ncclGroupEnd() without ncclGroupStart()");
    raise_fault();
  }
  if (--group_depth > 0) return nccl::kSuccess;
  return launch_all(std::exchange(grouped, {}));
}

nccl::Result pend(const CommPointer& comm, const std::string& what, std::function<bool()> done,
                  StreamState* on) {
  {
    const std::lock_guard<std::mutex> lock(comm->mutex);
    comm->pending = std::move(done);
    comm->pending_what = what;
    comm->pending_on = on;
    comm->polls_left = static_cast<int>(options().in_progress_polls);
  }
  if (!comm->is_blocking) return strikes(Bug::kNotPolled) ? nccl::kSuccess : nccl::kInProgress;
  const auto limit =
      SteadyClock::now() + std::chrono::duration<double>(options().stuck_after_s.load());
  nccl::Result result = poll(comm);
  while (result == nccl::kInProgress) {
    if (SteadyClock::now() > limit) record_fault(what + ": the other ranks do not come");
    raise_fault();
    std::this_thread::sleep_for(std::chrono::microseconds(200));
    result = poll(comm);
  }
  return result;
}

nccl::Result poll(const CommPointer& comm) {
  std::function<bool()> pending;
  {
    const std::lock_guard<std::mutex> lock(comm->mutex);
    if (comm->async_error != 0) return static_cast<nccl::Result>(comm->async_error.load());
    if (comm->is_polled) return nccl::kInProgress;
    if (!comm->pending) return nccl::kSuccess;
    if (comm->polls_left-- > 0) return nccl::kInProgress;
    comm->is_polled = true;
    pending = std::exchange(comm->pending, nullptr);
  }
  bool done = true;
  try {
    done = pending();
  } catch (...) {
    const std::lock_guard<std::mutex> lock(comm->mutex);
    comm->is_polled = false;
    throw;
  }
  const std::lock_guard<std::mutex> lock(comm->mutex);
  comm->is_polled = false;
  if (!done && !comm->is_aborted) comm->pending = std::move(pending);
  return done ? nccl::kSuccess : nccl::kInProgress;
}

void drain(const CommPointer& comm) {
  const auto limit =
      SteadyClock::now() + std::chrono::duration<double>(options().stuck_after_s.load());
  while (comm->num_pending > 0 && !has_fault()) {
    if (SteadyClock::now() > limit) {
      record_fault(comm->describe() + " is destroyed while its calls are not done");
    }
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
}

void check_no_window(void* memory) {
  const std::lock_guard<std::mutex> lock(mutex);
  for (const auto& [key, comm] : comms()) {
    if (comm->is_aborted || comm->windows.count(memory) == 0) continue;
    record_fault("ncclMemFree(): the memory is still a window of " + comm->describe());
  }
}

void abort(const CommPointer& comm) {
  {
    const std::lock_guard<std::mutex> lock(comm->mutex);
    comm->state = State::kAborted;
    comm->pending = nullptr;
    comm->is_aborted = true;
  }
  forget_segment(comm->name);
  {
    const std::lock_guard<std::mutex> lock(comm->stepping);
    comm->segment.reset();
  }
  Device::instance().host_learns(comm->clock);
  Device::instance().wake();
}

void reset_nccl() {
  if (group_depth > 0) record_fault("a group of NCCL's was left open");
  group_depth = 0;
  grouped.clear();
  kept_back() = {};
  num_calls = 0;
}

}  // namespace pydist::emulation
