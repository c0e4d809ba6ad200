// The key-value store that ranks meet through: the little of c10d's Store that set-up needs.
#pragma once

#include <cstdint>
#include <string>

namespace pydist {

// Keys are already private to one group. All calls may block up to the store's own timeout and
// raise its errors.
class Store {
 public:
  virtual ~Store() = default;
  virtual void set(const std::string& key, const std::string& value) = 0;
  // Waits until the key exists, then returns its value.
  virtual std::string get(const std::string& key) = 0;
  // Adds atomically to a counter that starts at 0 and returns the new value.
  virtual int64_t add(const std::string& key, int64_t amount) = 0;
  // True if the key exists now.
  virtual bool check(const std::string& key) = 0;
};

}  // namespace pydist
