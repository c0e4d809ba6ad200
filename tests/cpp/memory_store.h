// A Store within one process, for ranks that are threads.
#pragma once

#include <condition_variable>
#include <map>
#include <mutex>
#include <string>

#include "transport/store.h"

namespace pydist {

class MemoryStore : public Store {
 public:
  void set(const std::string& key, const std::string& value) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    values_[key] = value;
    changed_.notify_all();
  }
  std::string get(const std::string& key) override {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return values_.count(key) != 0; });
    return values_[key];
  }
  int64_t add(const std::string& key, int64_t amount) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    return counters_[key] += amount;
  }
  bool check(const std::string& key) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    return values_.count(key) != 0;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::string> values_;
  std::map<std::string, int64_t> counters_;
};

}  // namespace pydist
