// A device for the C++ tests: its streams run when they are told to, or waited for; its memory is
// the heap's.
#pragma once

#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <vector>

#include "base/device_runtime.h"
#include "check.h"

namespace pydist {

class LateDevice : public DeviceRuntime {
 public:
  const char* name() const override { return "late"; }
  int current_device() override { return 0; }
  void set_current_device(int) override {}
  void restore_device(int) noexcept override {}
  int num_processors() override { return 2; }

  Stream current_stream() override { return make(1); }
  Stream make_stream() override { return make(++num_streams_); }
  void destroy_stream(Stream) noexcept override {}
  bool is_capturing(Stream stream) override { return capturing == stream; }
  void relax_capture_checks() override {}

  Event make_event() override {
    ++num_live;
    return new bool(true);
  }
  void destroy_event(Event event) noexcept override {
    --num_live;
    delete static_cast<bool*>(event);
  }
  void record(Event event, Stream stream) override {
    auto* complete = static_cast<bool*>(event);
    *complete = false;
    enqueue(stream, [complete] { *complete = true; });
  }
  void wait(Stream, Event) override { CHECK(false); }  // no test needs it
  bool is_complete(Event event) override {
    num_asked_ = event == asked_ ? num_asked_ + 1 : 1;
    asked_ = event;
    if (num_asked_ > 2) run_all();  // somebody waits
    return *static_cast<bool*>(event);
  }

  void* allocate(size_t nbytes) override { return allocate_pinned(nbytes); }
  void deallocate(void* memory) noexcept override { free_pinned(memory); }
  void* allocate_pinned(size_t nbytes) override {
    ++num_live;
    ++num_allocations;
    return std::malloc(nbytes);
  }
  void free_pinned(void* memory) noexcept override {
    --num_live;
    std::free(memory);
  }
  void copy(void* to, const void* from, size_t nbytes, Stream stream) override {
    enqueue(stream, [=] { std::memcpy(to, from, nbytes); });
  }
  void fill_zero(void* memory, size_t nbytes, Stream stream) override {
    enqueue(stream, [=] { std::memset(memory, 0, nbytes); });
  }
  void launch(const Kernel& kernel, const void* arguments, int num_blocks, Stream stream) override {
    const auto* bytes = static_cast<const char*>(arguments);
    const std::vector<char> copied(bytes, bytes + kernel.arguments_nbytes);
    enqueue(stream, [=, &kernel] { kernel.run_on_host(copied.data(), num_blocks); });
    ++num_launches;
  }

  void run(Stream stream) {
    while (!work_[stream].empty()) {
      work_[stream].front()();
      work_[stream].pop_front();
    }
  }
  void run_all() {
    for (auto& queue : work_) run(queue.first);
  }
  // What was enqueued on the stream since it began to capture: a graph, to be run any time.
  std::vector<std::function<void()>> end_capture() {
    capturing = nullptr;
    return std::move(captured_);
  }

  Stream capturing = nullptr;
  int num_live = 0;  // events and memory
  int num_allocations = 0;
  int num_launches = 0;

 private:
  static Stream make(int number) { return reinterpret_cast<Stream>(static_cast<intptr_t>(number)); }
  void enqueue(Stream stream, std::function<void()> work) {
    if (stream == capturing) {
      captured_.push_back(std::move(work));
    } else {
      work_[stream].push_back(std::move(work));
    }
  }

  int num_streams_ = 1;
  Event asked_ = nullptr;
  int num_asked_ = 0;
  std::map<Stream, std::deque<std::function<void()>>> work_;
  std::vector<std::function<void()>> captured_;
};

}  // namespace pydist
