#include "transport/c10d_store.h"

#include <string>
#include <utility>
#include <vector>

namespace pydist {

namespace {

class C10dStore final : public Store {
 public:
  explicit C10dStore(c10::intrusive_ptr<c10d::Store> store) : store_(std::move(store)) {}

  void set(const std::string& key, const std::string& value) override {
    store_->set(key, std::vector<uint8_t>(value.begin(), value.end()));
  }

  std::string get(const std::string& key) override {
    const std::vector<uint8_t> value = store_->get(key);
    return std::string(value.begin(), value.end());
  }

  int64_t add(const std::string& key, int64_t amount) override { return store_->add(key, amount); }

  bool check(const std::string& key) override { return store_->check({key}); }

 private:
  c10::intrusive_ptr<c10d::Store> store_;
};

}  // namespace

std::unique_ptr<Store> wrap_c10d_store(c10::intrusive_ptr<c10d::Store> store) {
  return std::make_unique<C10dStore>(std::move(store));
}

c10::intrusive_ptr<c10d::Store> own_connection(const c10::intrusive_ptr<c10d::Store>& store) {
  try {
    return store->clone();
  } catch (const std::exception&) {  // a store that cannot
    return store;
  }
}

}  // namespace pydist
