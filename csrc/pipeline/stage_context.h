// What a stage's forward may ask while it runs: which step and microbatch this is, the seeds of its
// layers, and the tensors that skip into and out of it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "pipeline/seeded_generator.h"

namespace pydist {

// Tensors on their way from where they are stashed to where they are popped, by name.
class Skips {
 public:
  // Raises UsageError if something of this name is there. The tensor may be undefined: None.
  void put(std::string_view name, at::Tensor tensor);
  // Nothing if there is none of this name. Raises UsageError if the tensor was changed in place
  // since: whether whoever pops it sees the change would depend on how layers are split.
  std::optional<at::Tensor> take(std::string_view name);
  void clear() { entries_.clear(); }

 private:
  struct Entry {
    std::string name;
    at::Tensor tensor;
    int64_t version;
  };
  std::vector<Entry> entries_;
};

struct StageContext {
  int stage = 0;
  int64_t step = 0;
  int microbatch = 0;
  bool training = false;  // a backward follows
  // None: layers draw from the user's stream.
  std::optional<uint64_t> base_seed = std::nullopt;
  int data_parallel_rank = 0;
  // Whose default generator is seeded beside the CPU's. A graph that is captured draws from the
  // user's stream instead, since it could not be seeded anew at each replay.
  std::optional<c10::Device> device = std::nullopt;
  bool is_captured = false;
  // Before the forward: what has arrived for it. After: what it has stashed and not popped.
  Skips skips = {};

  std::optional<c10::Device> seeded_device() const { return is_captured ? std::nullopt : device; }
  // Seeds the default generators for a layer. Only within a StageScope, which restores it.
  void seed_layer(int64_t layer) const;
};

// Of the forward that this thread is running; null outside of any.
StageContext* current_stage_context();

// Around one forward of a stage: its layers see the context, and the user's random stream is as
// before afterwards. The context must outlive it.
class StageScope {
 public:
  explicit StageScope(StageContext& context);
  ~StageScope();
  StageScope(const StageScope&) = delete;
  StageScope& operator=(const StageScope&) = delete;

 private:
  StageContext* outer_;
  std::optional<GeneratorScope> generator_;
};

}  // namespace pydist
