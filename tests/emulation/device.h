// A device whose work is done by one thread of this process, late and in randomised legal order.
//
// Each stream is a queue. The thread takes, again and again, the head of a random queue that can
// go on, sometimes after a short delay. What NCCL does is a step that is tried until it is done, so
// that waiting for a peer holds up nothing else.
//
// A stream that torch's operations run on is *eager*: those operations are the CPU's and happen at
// once, so what is enqueued on such a stream is done when the call returns. Calls therefore wait
// there, for a limited time, where a real device would go on by itself.
//
// Whether accesses to memory are ordered does not depend on what happened to run first: every piece
// of work has a vector clock (clock.h) and declares its memory (shadow.h).
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "base/device_runtime.h"
#include "clock.h"
#include "graph.h"
#include "shadow.h"

namespace pydist::emulation {

using TimePoint = std::chrono::steady_clock::time_point;

// What an event's last record marks.
struct Moment {
  bool is_done = false;
  Clock clock;
  std::shared_ptr<Graph> graph;  // that captured the record, where one did
  size_t mark = 0;               // in that graph
  size_t lane = 0;
  int num_hidden = 0;  // looks at it that were told that it is not done
};
using MomentPointer = std::shared_ptr<Moment>;

struct EventState {
  MomentPointer moment;  // null before the first record
  bool is_destroyed = false;
};

struct Task {
  enum class Kind { kStep, kRecord, kWait };
  Kind kind;
  std::string what;
  Step step;
  MomentPointer moment;
  TimePoint not_before = {};
  std::chrono::microseconds pause{10};  // before a step that was not done is tried again
};

struct StreamState {
  std::string name;
  size_t participant;
  bool is_eager;
  bool is_destroyed = false;
  Clock clock;
  std::deque<Task> tasks;
  uint64_t num_pushed = 0;
  uint64_t num_done = 0;
  std::shared_ptr<Graph> capture;
  size_t lane = 0;  // in the capture
};

class Device {
 public:
  static Device& instance();

  StreamState* make_stream(const std::string& kind, bool is_eager);
  void destroy_stream(StreamState* stream);
  // Of a handle; a fault where it is none. Null is the default stream.
  StreamState* stream(Stream handle, const char* user);
  StreamState* current_stream();
  void set_current_stream(StreamState* stream);  // of this thread

  EventState* make_event();
  void destroy_event(EventState* event);
  EventState* event(Event handle, const char* user);
  void record(EventState& event, StreamState& stream);
  void wait(StreamState& stream, EventState& event);
  bool is_complete(EventState& event);

  void enqueue(StreamState& stream, const Call& call);

  void begin_capture(StreamState& stream);
  std::shared_ptr<Graph> end_capture(StreamState& stream);
  void replay(const std::shared_ptr<Graph>& graph, StreamState& stream);

  // This thread's knowledge is its own from now on: what it learns, the others need not know.
  void relax_capture_checks();
  // Raises where this thread may not do that while any stream is captured.
  void check_capture_allows(const char* what);
  // What `deed` stands for is known to be done.
  void host_learns(const Clock& clock);
  // Of memory that is in torch's hands: on its current stream, which `stream` was then.
  void torch_touches(Access access, const void* data, size_t nbytes);
  void torch_frees(const void* data, size_t nbytes, StreamState* stream);
  void host_touches(Access access, const void* data, size_t nbytes);
  void allocated(const void* data, size_t nbytes);
  void host_frees(const std::string& what, const void* data, size_t nbytes);
  bool is_written_by_a_stream(const void* data);

  // Everything is done when it returns; a fault after the time limit.
  void synchronize();
  // Nothing runs but what a call waits for.
  void hold(bool holds);
  // Wakes the thread: something that a step waits for may have happened.
  void wake();
  void reset(uint64_t seed);

 private:
  Device();

  using Lock = std::unique_lock<std::mutex>;
  void run();
  StreamState* choose(TimePoint now, TimePoint* next);
  void perform(Lock& lock, StreamState& stream);
  void finish_head(StreamState& stream);
  void push(StreamState& stream, Task task);
  void wait_on_host(Lock& lock, const std::function<bool()>& done, const std::string& what);
  void wait_if_eager(Lock& lock, StreamState& stream, const std::string& what);
  void check_usable(const StreamState& stream, const std::string& what);
  DeedPointer make_deed(StreamState& stream, const std::string& what);
  Clock host_knowledge() const;
  void enqueue_now(StreamState& stream, const Call& call, bool visits_late);
  void capture_wait(StreamState& stream, const Moment& moment);
  bool is_drained() const;
  std::string heads() const;

  std::mutex mutex_;
  std::condition_variable work_;  // for the device's thread
  std::condition_variable done_;  // for hosts that wait
  std::set<StreamState*> streams_;
  std::set<EventState*> events_;
  std::vector<StreamState*> order_;  // by age: what is chosen must not depend on addresses
  StreamState* default_stream_;
  Shadow shadow_;
  Clock host_clock_;
  size_t num_participants_ = 1;
  int num_captures_ = 0;
  int num_waiting_ = 0;  // hosts
  bool holds_ = false;
  std::mt19937_64 random_;
};

}  // namespace pydist::emulation
