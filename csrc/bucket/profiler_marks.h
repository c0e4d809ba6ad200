// Shows rounds to torch's profiler under the names that its users look for, those of the process
// group's backend: "gloo:all_reduce" from the moment a unit is handed over until it holds the mean,
// "gloo:broadcast" while every rank's record reaches the others. Costs next to nothing where no
// profiler runs.
#pragma once

#include <ATen/record_function.h>

#include <memory>
#include <string>
#include <vector>

namespace pydist {

class ProfilerMarks {
 public:
  // `units`: false where units travel by the process group itself, which marks what it does.
  ProfilerMarks(const std::string& backend, bool units)
      : all_reduce_(backend + ":all_reduce"), broadcast_(backend + ":broadcast"), units_(units) {}

  void unit_published() {
    if (!units_) return;
    auto mark = std::make_unique<at::RecordFunction>(at::RecordScope::USER_SCOPE);
    if (!mark->isActive()) return;
    mark->_setAsync();  // it ends in finished()
    mark->before(all_reduce_);
    reducing_.push_back(std::move(mark));
  }
  void finished() { reducing_.clear(); }

  // What `agree` does, ranks telling each other what they used, and whether that is all.
  template <typename Agree>
  auto around_agreement(const Agree& agree) {
    at::RecordFunction search(at::RecordScope::USER_SCOPE);
    if (search.isActive()) search.before("pydist::search_unused_parameters");
    at::RecordFunction exchange(at::RecordScope::USER_SCOPE);
    if (exchange.isActive()) exchange.before(broadcast_);
    return agree();
  }

 private:
  std::string all_reduce_;
  std::string broadcast_;
  bool units_;
  std::vector<std::unique_ptr<at::RecordFunction>> reducing_;
};

}  // namespace pydist
