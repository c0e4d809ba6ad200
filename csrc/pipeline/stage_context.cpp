#include "pipeline/stage_context.h"

#include <algorithm>
#include <utility>

#include "base/error.h"

namespace pydist {

namespace {

thread_local StageContext* current = nullptr;

// Inference tensors count no versions.
int64_t version_of(const at::Tensor& tensor) {
  return tensor.defined() && !tensor.is_inference() ? tensor._version() : 0;
}

}  // namespace

void Skips::put(std::string_view name, at::Tensor tensor) {
  for (const Entry& entry : entries_) {
    if (entry.name == name) {
      throw UsageError(
          concat("skip '", name, "' is stashed a second time before it was popped; stash it once"));
    }
  }
  const int64_t version = version_of(tensor);
  entries_.push_back({std::string(name), std::move(tensor), version});
}

std::optional<at::Tensor> Skips::take(std::string_view name) {
  const auto entry = std::find_if(entries_.begin(), entries_.end(),
                                  [&](const Entry& each) { return each.name == name; });
  if (entry == entries_.end()) return std::nullopt;
  const Entry taken = std::move(*entry);
  entries_.erase(entry);
  if (version_of(taken.tensor) != taken.version) {
    throw UsageError(concat("the tensor stashed as skip '", name,
                            "' was changed in place before it was popped (its version is ",
                            version_of(taken.tensor), ", and was ", taken.version,
                            "); stash tensor.clone(), or change it out of place"));
  }
  return taken.tensor;
}

void StageContext::seed_layer(int64_t layer) const {
  if (!base_seed.has_value()) return;
  const SeedKey key{*base_seed, data_parallel_rank, step, microbatch, layer};
  seed_default_generators(key.mixed(), seeded_device());
}

StageContext* current_stage_context() { return current; }

StageScope::StageScope(StageContext& context) : outer_(std::exchange(current, &context)) {
  if (context.base_seed.has_value()) generator_.emplace(context.seeded_device());
}

StageScope::~StageScope() { current = outer_; }

}  // namespace pydist
