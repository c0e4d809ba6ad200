// Which parameters ranks use: what the last round tells of it, and what is an error.
#include <algorithm>
#include <utility>

#include "base/check.h"
#include "bucket/reducer.h"

namespace pydist {

namespace {

constexpr size_t kNamed = 10;  // parameters that a message names

}  // namespace

std::vector<int> Reducer::published() const {
  std::vector<int> units;
  for (size_t u = 0; u < states_.size(); ++u) {
    if (states_[u].published) units.push_back(static_cast<int>(u));
  }
  return units;
}

Bitmap Reducer::trainable() const {
  Bitmap bitmap(static_cast<int>(parameters_.size()));
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (parameters_[i].variable.requires_grad()) bitmap.set(static_cast<int>(i));
  }
  return bitmap;
}

// A rank that only shadows the round has not run what may freeze parameters.
void Reducer::check_trainable(const std::vector<RoundRecord>& records) const {
  size_t first = 0;
  while (first < records.size() && records[first].shadows()) ++first;
  for (size_t r = first + 1; r < records.size(); ++r) {
    const Bitmap& found = records[r].trainable;
    const Bitmap& expected = records[first].trainable;
    if (found == expected || records[r].shadows()) continue;
    for (size_t i = 0; i < parameters_.size(); ++i) {
      const bool here = found.test(static_cast<int>(i));
      PYDIST_CHECK(here == expected.test(static_cast<int>(i)), MismatchError, "parameter ",
                   parameters_[i].name, " of ", options_.name,
                   " has requires_grad=", here ? "True" : "False", " on ",
                   round_->describe(static_cast<int>(r)), ", but the opposite on ",
                   round_->describe(static_cast<int>(first)),
                   "; freeze and unfreeze the same parameters on every rank");
    }
  }
}

// Where ranks need not wait for each other, one that got no second gradient is a step ahead
// already.
void Reducer::check_again(const std::vector<RoundRecord>& records) const {
  const auto mine = static_cast<size_t>(round_->rank());
  for (size_t r = 0; r < records.size(); ++r) {
    if (shadows_ || records[r].shadows() || records[r].again == record_.again) continue;
    size_t i = 0;
    while (records[r].again.test(static_cast<int>(i)) == record_.again.test(static_cast<int>(i))) {
      ++i;
    }
    const bool here = record_.again.test(static_cast<int>(i));
    throw MismatchError(concat(
        "parameter ", parameters_[i].name, " of ", options_.name,
        " got two gradients in one backward on ",
        round_->describe(static_cast<int>(here ? mine : r)), ", but one on ",
        round_->describe(static_cast<int>(here ? r : mine)),
        "; on a device ranks have to agree in this: use reentrant checkpoints alike on every rank, "
        "or torch.utils.checkpoint with use_reentrant=False"));
  }
}

std::vector<int> Reducer::unused_in_last_round() const {
  std::vector<int> unused;
  if (counters_.num_rounds == 0) return unused;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const int index = static_cast<int>(i);
    if (is_expected(parameters_[i]) && !used_by_any_.test(index)) unused.push_back(index);
  }
  return unused;
}

std::vector<std::pair<int, std::vector<int>>> Reducer::unused_by_rank() const {
  std::vector<std::pair<int, std::vector<int>>> unused;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const int index = static_cast<int>(i);
    if (!is_expected(parameters_[i])) continue;
    std::vector<int> ranks;
    for (size_t r = 0; r < last_used_.size(); ++r) {
      if (!last_used_[r].test(index)) ranks.push_back(static_cast<int>(r));
    }
    if (!ranks.empty()) unused.emplace_back(index, std::move(ranks));
  }
  return unused;
}

void Reducer::raise_if_unused() const {
  const auto unused = unused_by_rank();
  if (unused.empty()) return;
  std::string text;
  for (size_t i = 0; i < std::min(unused.size(), kNamed); ++i) {
    const auto& [index, ranks] = unused[i];
    text += concat(i == 0 ? "" : ", ", "parameter ", parameters_[index].name, " (");
    if (ranks.size() == last_used_.size()) {
      text += "every rank)";
      continue;
    }
    for (size_t r = 0; r < ranks.size(); ++r) {
      text += concat(r == 0 ? "" : ", ", round_->describe(ranks[r]));
    }
    text += ")";
  }
  if (unused.size() > kNamed) text += concat(", and ", unused.size() - kNamed, " more");
  throw MismatchError(
      concat(options_.name,
             " was made with unused_parameters=\"error\", and this backward gave no "
             "gradient to ",
             text,
             "; the gradients are the mean nevertheless, with zeros from ranks that "
             "did not use a parameter. Use every parameter in every step, freeze it "
             "(requires_grad_(False)), or leave unused_parameters at \"warn\" or \"ignore\""));
}

std::vector<int> Reducer::changed_since_first_round() const {
  std::vector<int> changed;
  for (size_t i = 0; i < parameters_.size() && counters_.num_rounds > 0; ++i) {
    if (used_first_.test(static_cast<int>(i)) != used_by_any_.test(static_cast<int>(i))) {
      changed.push_back(static_cast<int>(i));
    }
  }
  return changed;
}

}  // namespace pydist
