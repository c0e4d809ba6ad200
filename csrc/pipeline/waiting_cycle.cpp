// Owns the search for the smallest circle: from every entry that never ran, breadth first through
// what it waits for until it meets itself.
#include "pipeline/waiting_cycle.h"

#include <algorithm>
#include <limits>

#include "base/error.h"

namespace pydist {

namespace {

// With more entries than this that never ran, only the first of each rank are started from: there
// is always a circle through them, though perhaps a smaller one elsewhere.
constexpr size_t kMaxStarts = 20000;

class CycleSearch {
 public:
  CycleSearch(const Schedule& schedule, const std::vector<int>& visited,
              const std::function<Place(const StageValue&)>& giver)
      : schedule_(schedule), visited_(visited), giver_(giver) {
    for (const auto& entries : schedule.actions) {
      first_node_.push_back(static_cast<int>(places_.size()));
      const int rank = static_cast<int>(first_node_.size()) - 1;
      for (int i = visited[rank]; i < static_cast<int>(entries.size()); ++i) {
        places_.push_back({rank, i});
      }
    }
    came_from_.resize(places_.size(), -1);
    seen_by_.resize(places_.size(), -1);
    swept_.resize(schedule.actions.size(), 0);
  }

  std::vector<Place> run() {
    const bool all = places_.size() <= kMaxStarts;
    for (int start = 0; start < static_cast<int>(places_.size()); ++start) {
      if (all || places_[start].index == visited_[places_[start].rank]) search_from(start);
    }
    std::vector<Place> cycle;
    for (const int node : best_) cycle.push_back(places_[node]);
    return cycle;
  }

 private:
  int node_at(Place place) const {
    return first_node_[place.rank] + place.index - visited_[place.rank];
  }

  void search_from(int start) {
    queue_.assign(1, start);
    std::fill(swept_.begin(), swept_.end(), 0);
    size_t depth_end = 1;  // where in the queue the next depth begins
    size_t depth = 0;
    for (size_t next = 0; next < queue_.size(); ++next) {
      if (next == depth_end) {
        ++depth;
        depth_end = queue_.size();
      }
      if (!best_.empty() && depth + 1 >= best_.size()) return;
      if (expand(queue_[next], start)) return;
    }
  }

  // Adds what the node waits for; true where that is the start.
  bool expand(int node, int start) {
    const Place place = places_[node];
    const auto add = [&](int other) {
      if (other == start) return true;
      if (seen_by_[other] != start) {
        seen_by_[other] = start;
        came_from_[other] = node;
        queue_.push_back(other);
      }
      return false;
    };
    bool closed = false;
    for_each_action(schedule_.actions[place.rank][place.index], [&](const Action& action) {
      for (const StageValue& value : needs_of(action, schedule_.num_stages())) {
        const Place giver = giver_(value);
        if (giver.index >= visited_[giver.rank]) closed = add(node_at(giver)) || closed;
      }
    });
    // What stands before it in the list; each entry of a rank is looked at once.
    int& swept = swept_[place.rank];
    for (const int end = place.index - visited_[place.rank]; swept < end; ++swept) {
      closed = add(first_node_[place.rank] + swept) || closed;
    }
    if (closed) keep(node, start);
    return closed;
  }

  void keep(int node, int start) {
    best_.clear();
    for (; node != start; node = came_from_[node]) best_.push_back(node);
    best_.push_back(start);
    std::reverse(best_.begin(), best_.end());
  }

  const Schedule& schedule_;
  const std::vector<int>& visited_;
  const std::function<Place(const StageValue&)>& giver_;
  std::vector<int> first_node_;  // by rank
  std::vector<Place> places_;    // by node
  std::vector<int> came_from_;
  std::vector<int> seen_by_;  // the last start from which the node was reached
  std::vector<int> swept_;    // by rank: so many entries have been looked at as predecessors
  std::vector<int> queue_;
  std::vector<int> best_;
};

}  // namespace

std::vector<Place> smallest_waiting_cycle(const Schedule& schedule, const std::vector<int>& visited,
                                          const std::function<Place(const StageValue&)>& giver) {
  return CycleSearch(schedule, visited, giver).run();
}

std::string describe_waiting_cycle(const Schedule& schedule, const std::vector<Place>& cycle) {
  std::string text = "its actions wait for each other in a circle, so it never ends:";
  for (size_t i = 0; i < cycle.size(); ++i) {
    const Place here = cycle[i];
    const Place next = cycle[(i + 1) % cycle.size()];
    const std::string other = schedule.actions[next.rank][next.index].text();
    const bool same_list = here.rank == next.rank;
    text += concat("\n  ", schedule.actions[here.rank][here.index].text(), " on rank ", here.rank,
                   same_list ? concat(" comes after ", other)
                             : concat(" needs ", other, " on rank ", next.rank),
                   i + 1 < cycle.size() ? "," : ".");
  }
  return text;
}

}  // namespace pydist
