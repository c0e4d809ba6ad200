#include "device.h"

#include <thread>

#include "faults.h"
#include "options.h"

namespace pydist::emulation {

namespace {

using std::chrono::microseconds;
using Clock_ = std::chrono::steady_clock;

struct HostThread {
  size_t participant = 0;  // 0: shares the knowledge of all threads
  Clock clock;             // what it knows beyond that
  StreamState* current = nullptr;
};
thread_local HostThread host_thread;

constexpr microseconds kLongestPause{300};
constexpr int kManyLooks = 2000;  // of the host at one event: it waits

}  // namespace

// Never destroyed: the thread runs until the process ends.
Device& Device::instance() {
  static auto* device = new Device();
  return *device;
}

Device::Device() {
  default_stream_ = make_stream("default", true);
  std::thread([this] { run(); }).detach();
}

StreamState* Device::make_stream(const std::string& kind, bool is_eager) {
  const Lock lock(mutex_);
  auto* stream = new StreamState();
  stream->participant = num_participants_++;
  stream->name = kind + " stream " + std::to_string(stream->participant);
  stream->is_eager = is_eager;
  streams_.insert(stream);
  order_.push_back(stream);
  return stream;
}

// As CUDA does: what is enqueued is still done.
void Device::destroy_stream(StreamState* stream) {
  const Lock lock(mutex_);
  if (stream->capture != nullptr) record_fault(stream->name + " is destroyed while captured");
  stream->is_destroyed = true;
}

StreamState* Device::stream(Stream handle, const char* user) {
  if (handle == nullptr) return default_stream_;
  const Lock lock(mutex_);
  auto* stream = static_cast<StreamState*>(handle);
  if (streams_.count(stream) == 0) record_fault(concat(user, ": ", handle, " is no stream"));
  raise_fault();
  return stream;
}

StreamState* Device::current_stream() {
  return host_thread.current == nullptr ? default_stream_ : host_thread.current;
}

void Device::set_current_stream(StreamState* stream) { host_thread.current = stream; }

EventState* Device::make_event() {
  const Lock lock(mutex_);
  auto* event = new EventState();
  events_.insert(event);
  return event;
}

void Device::destroy_event(EventState* event) {
  const Lock lock(mutex_);
  event->is_destroyed = true;
}

EventState* Device::event(Event handle, const char* user) {
  const Lock lock(mutex_);
  auto* event = static_cast<EventState*>(handle);
  if (events_.count(event) == 0) {
    record_fault(concat(user, ": ", handle, " is no event"));
  } else if (event->is_destroyed) {
    record_fault(concat(user, ": the event ", handle, " has been destroyed"));
  }
  raise_fault();
  return event;
}

Clock Device::host_knowledge() const {
  Clock clock = host_clock_;
  clock.join(host_thread.clock);
  return clock;
}

void Device::host_learns(const Clock& clock) {
  const Lock lock(mutex_);
  (host_thread.participant == 0 ? host_clock_ : host_thread.clock).join(clock);
}

void Device::relax_capture_checks() {
  const Lock lock(mutex_);
  if (host_thread.participant == 0) host_thread.participant = num_participants_++;
}

void Device::check_capture_allows(const char* what) {
  const Lock lock(mutex_);
  if (num_captures_ > 0 && host_thread.participant == 0) {
    record_fault(concat(what, " while a stream is captured, by a thread that has not called ",
                        "relax_capture_checks(): CUDA ends the capture"));
  }
  raise_fault();
}

void Device::check_usable(const StreamState& stream, const std::string& what) {
  if (stream.is_destroyed) record_fault(what + ": " + stream.name + " has been destroyed");
  raise_fault();
}

DeedPointer Device::make_deed(StreamState& stream, const std::string& what) {
  stream.clock.join(host_knowledge());
  const Epoch epoch = stream.clock.advance(stream.participant);
  return std::make_shared<const Deed>(Deed{what + " on " + stream.name, epoch, stream.clock});
}

void Device::push(StreamState& stream, Task task) {
  const double max_delay_s = options().max_delay_s;
  if (max_delay_s > 0 && random_() % 4 == 0) {
    const auto most = static_cast<uint64_t>(max_delay_s * 1e6);
    task.not_before = Clock_::now() + microseconds(random_() % (most + 1));
  }
  stream.tasks.push_back(std::move(task));
  ++stream.num_pushed;
  work_.notify_one();
}

void Device::enqueue_now(StreamState& stream, const Call& call, bool visits_late) {
  const DeedPointer deed = make_deed(stream, call.what);
  if (call.note) call.note(*deed);
  const auto visit = [this, deed, visit = call.visit] {
    visit([&](Access access, const void* data, size_t nbytes) {
      shadow_.access(deed, access, data, nbytes);
    });
  };
  if (!visits_late) {
    visit();
    raise_fault();
  }
  Step step = call.begin();
  if (visits_late) {
    step = [this, visit, is_visited = false, step = std::move(step)]() mutable {
      if (!is_visited) {
        const Lock lock(mutex_);
        visit();
        is_visited = true;
      }
      return step();
    };
  }
  push(stream, {Task::Kind::kStep, call.what, std::move(step), nullptr});
}

void Device::enqueue(StreamState& stream, const Call& call) {
  Lock lock(mutex_);
  check_usable(stream, call.what);
  if (stream.capture != nullptr) {
    stream.capture->nodes.push_back({Graph::Node::Kind::kCall, stream.lane, call});
    stream.capture->clocks[stream.lane].advance(stream.lane);
    return;
  }
  enqueue_now(stream, call, false);
  wait_if_eager(lock, stream, call.what);
}

void Device::record(EventState& event, StreamState& stream) {
  Lock lock(mutex_);
  check_usable(stream, "record()");
  event.moment = std::make_shared<Moment>();
  if (stream.capture != nullptr) {
    Graph& graph = *stream.capture;
    graph.clocks[stream.lane].advance(stream.lane);
    event.moment->graph = stream.capture;
    event.moment->clock = graph.clocks[stream.lane];
    event.moment->lane = stream.lane;
    event.moment->mark = graph.num_marks++;
    graph.nodes.push_back({Graph::Node::Kind::kRecord, stream.lane, {}, event.moment->mark});
    return;
  }
  event.moment->clock = make_deed(stream, "record()")->clock;
  push(stream, {Task::Kind::kRecord, "record()", nullptr, event.moment});
  wait_if_eager(lock, stream, "record()");
}

void Device::wait(StreamState& stream, EventState& event) {
  Lock lock(mutex_);
  check_usable(stream, "wait()");
  if (event.moment == nullptr) return;
  if (event.moment->graph != nullptr || stream.capture != nullptr) {
    capture_wait(stream, *event.moment);
    return;
  }
  make_deed(stream, "wait()");
  stream.clock.join(event.moment->clock);
  push(stream, {Task::Kind::kWait, "wait()", nullptr, event.moment});
  wait_if_eager(lock, stream, "wait() for an event");
}

bool Device::is_complete(EventState& event) {
  const Lock lock(mutex_);
  const MomentPointer moment = event.moment;
  if (moment == nullptr) return true;
  if (moment->graph != nullptr) {
    record_fault("is_complete() of an event whose record was captured in a graph");
  }
  raise_fault();
  if (options().hides_completion > 0) {
    if (++moment->num_hidden == kManyLooks) record_fault("the host waits for an event");
    return false;
  }
  if (!moment->is_done) return false;
  (host_thread.participant == 0 ? host_clock_ : host_thread.clock).join(moment->clock);
  return true;
}

void Device::torch_touches(Access access, const void* data, size_t nbytes) {
  const Lock lock(mutex_);
  StreamState& stream = *current_stream();
  if (stream.capture != nullptr) return;
  shadow_.access(make_deed(stream, "an operation of torch's"), access, data, nbytes);
  raise_fault();
}

// The caching allocator hands the block out again to what is enqueued on its stream from now on.
void Device::torch_frees(const void* data, size_t nbytes, StreamState* stream) {
  Lock lock(mutex_);
  const bool had_fault = has_fault();
  Clock clock = stream->clock;
  clock.join(host_knowledge());
  shadow_.free({"the host (a tensor's end)", {}, clock}, data, nbytes);
  if (had_fault || !has_fault()) return;
  // The fault is known; work that is still under way must not corrupt the heap as well.
  ++num_waiting_;
  work_.notify_one();
  done_.wait_for(lock, std::chrono::seconds(2), [this] { return is_drained(); });
  --num_waiting_;
}

bool Device::is_drained() const {
  for (const StreamState* stream : order_) {
    if (!stream->tasks.empty()) return false;
  }
  return true;
}

void Device::host_touches(Access access, const void* data, size_t nbytes) {
  const Lock lock(mutex_);
  const Epoch epoch = host_clock_.advance(0);
  shadow_.access(std::make_shared<const Deed>(Deed{"the host", epoch, host_knowledge()}), access,
                 data, nbytes);
  raise_fault();
}

void Device::allocated(const void* data, size_t nbytes) {
  const Lock lock(mutex_);
  shadow_.allocate(data, nbytes);
}

void Device::host_frees(const std::string& what, const void* data, size_t nbytes) {
  const Lock lock(mutex_);
  shadow_.free({what, {}, host_knowledge()}, data, nbytes);
}

bool Device::is_written_by_a_stream(const void* data) {
  const Lock lock(mutex_);
  const DeedPointer write = shadow_.last_write(data);
  return write != nullptr && write->epoch.participant != 0;
}

void Device::wait_if_eager(Lock& lock, StreamState& stream, const std::string& what) {
  if (!stream.is_eager) return;
  const uint64_t number = stream.num_pushed;
  wait_on_host(lock, [&] { return stream.num_done >= number; }, what + " on " + stream.name);
  raise_fault();
}

void Device::wait_on_host(Lock& lock, const std::function<bool()>& done, const std::string& what) {
  ++num_waiting_;
  work_.notify_one();
  const auto limit = Clock_::now() + std::chrono::duration<double>(options().stuck_after_s);
  // In slices, since a fault does not wake.
  while (!done_.wait_for(lock, std::chrono::milliseconds(20), done) && !has_fault()) {
    if (Clock_::now() < limit) continue;
    record_fault(concat("the host waits in vain for ", what, "; the streams are at\n", heads()));
  }
  --num_waiting_;
}

std::string Device::heads() const {
  std::string text;
  for (const StreamState* stream : order_) {
    if (stream->tasks.empty()) continue;
    text += concat("  ", stream->name, ": ", stream->tasks.front().what, ", and ",
                   stream->tasks.size() - 1, " more\n");
  }
  return text;
}

void Device::synchronize() {
  Lock lock(mutex_);
  wait_on_host(lock, [this] { return is_drained(); }, "everything");
  for (const StreamState* stream : order_) host_clock_.join(stream->clock);
}

void Device::hold(bool holds) {
  const Lock lock(mutex_);
  holds_ = holds;
  work_.notify_one();
}

void Device::wake() {
  const Lock lock(mutex_);
  work_.notify_one();
}

void Device::reset(uint64_t seed) {
  hold(false);
  synchronize();
  const Lock lock(mutex_);
  shadow_.clear();
  random_.seed(seed);
  host_thread.current = nullptr;
}

// The device's thread.

StreamState* Device::choose(TimePoint now, TimePoint* next) {
  std::vector<StreamState*> ready;
  if (holds_ && num_waiting_ == 0) return nullptr;
  for (StreamState* stream : order_) {
    if (stream->tasks.empty()) continue;
    const Task& head = stream->tasks.front();
    if (head.kind == Task::Kind::kWait && !head.moment->is_done) continue;
    if (head.not_before > now) {
      *next = std::min(*next, head.not_before);
      continue;
    }
    ready.push_back(stream);
  }
  return ready.empty() ? nullptr : ready[random_() % ready.size()];
}

void Device::finish_head(StreamState& stream) {
  stream.tasks.pop_front();
  ++stream.num_done;
  done_.notify_all();
}

void Device::perform(Lock& lock, StreamState& stream) {
  Task& head = stream.tasks.front();  // stays where it is: others only push behind it
  if (head.kind != Task::Kind::kStep) {
    if (head.kind == Task::Kind::kRecord) head.moment->is_done = true;
    finish_head(stream);
    return;
  }
  lock.unlock();
  bool done = true;
  try {
    done = head.step();
  } catch (const std::exception& error) {
    record_fault(head.what + ": " + error.what());
  }
  lock.lock();
  if (done) {
    finish_head(stream);
    return;
  }
  head.not_before = Clock_::now() + head.pause;
  head.pause = std::min(head.pause * 2, kLongestPause);
}

void Device::run() {
  Lock lock(mutex_);
  while (true) {
    TimePoint next = TimePoint::max();
    StreamState* stream = choose(Clock_::now(), &next);
    if (stream != nullptr) {
      perform(lock, *stream);
    } else if (next == TimePoint::max()) {
      work_.wait(lock);
    } else {
      work_.wait_until(lock, next);
    }
  }
}

}  // namespace pydist::emulation
