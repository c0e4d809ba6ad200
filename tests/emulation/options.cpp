#include "options.h"

#include <map>

namespace pydist::emulation {

std::atomic<double>* Options::find(const std::string& name) {
  const std::map<std::string, std::atomic<double>*> by_name = {
      {"max_delay_s", &max_delay_s},
      {"stuck_after_s", &stuck_after_s},
      {"in_progress_polls", &in_progress_polls},
      {"nccl_delay_s", &nccl_delay_s},
      {"nccl_stuck_after", &nccl_stuck_after},
      {"async_error_after", &async_error_after},
      {"nccl_version", &nccl_version},
      {"init_never_finishes", &init_never_finishes},
      {"hides_completion", &hides_completion},
  };
  const auto found = by_name.find(name);
  return found == by_name.end() ? nullptr : found->second;
}

void Options::reset() {
  max_delay_s = 0.0005;
  stuck_after_s = 40;
  in_progress_polls = 0;
  nccl_delay_s = 0;
  nccl_stuck_after = -1;
  async_error_after = -1;
  nccl_version = 0;
  init_never_finishes = 0;
  hides_completion = 0;
}

Options& options() {
  static auto* options = new Options();
  return *options;
}

}  // namespace pydist::emulation
