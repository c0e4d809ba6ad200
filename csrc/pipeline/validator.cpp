// Owns the checks of a schedule.
#include "pipeline/validator.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <optional>
#include <string>

#include "base/check.h"
#include "pipeline/grid.h"
#include "pipeline/readiness.h"
#include "pipeline/waiting_cycle.h"

namespace pydist {

namespace {

[[noreturn]] void refuse(const Schedule& schedule, const std::string& what,
                         const std::vector<Place>& marked) {
  throw ScheduleError(
      concat("schedule '", schedule.name, "': ", what, "\n\n", grid_of_lists(schedule, marked)));
}

// Where each kind of one stage and microbatch stands.
using Places = std::array<std::optional<Place>, 4>;

const std::optional<Place>& at(const Places& places, ActionKind kind) {
  return places[static_cast<size_t>(kind)];
}

class Checker {
 public:
  explicit Checker(const Schedule& schedule)
      : schedule_(schedule),
        places_(static_cast<size_t>(schedule.num_stages()) *
                static_cast<size_t>(schedule.num_microbatches)) {}

  Validity check() {
    Validity validity;
    for_each_entry([&](Place place, const Entry& entry) {
      for_each_action(entry, [&](const Action& action) {
        check_place(place, action);
        if (action.kind != ActionKind::kForward) validity.has_backward = true;
      });
    });
    for (int stage = 0; stage < schedule_.num_stages(); ++stage) {
      for (int microbatch = 0; microbatch < schedule_.num_microbatches; ++microbatch) {
        check_completeness(stage, microbatch, validity.has_backward);
      }
    }
    for_each_entry([&](Place place, const Entry& entry) { check_order(place, entry); });
    check_circles();
    validity.accumulates_in_order = accumulates_in_order();
    return validity;
  }

 private:
  template <class Visit>
  void for_each_entry(Visit visit) const {
    for (int rank = 0; rank < schedule_.num_ranks(); ++rank) {
      for (int index = 0; index < static_cast<int>(schedule_.actions[rank].size()); ++index) {
        visit(Place{rank, index}, schedule_.actions[rank][index]);
      }
    }
  }

  Places& places_of(int stage, int microbatch) {
    return places_[static_cast<size_t>(stage) * static_cast<size_t>(schedule_.num_microbatches) +
                   static_cast<size_t>(microbatch)];
  }

  void check_place(Place place, const Action& action) {
    if (action.stage < 0 || action.stage >= schedule_.num_stages() || action.microbatch < 0 ||
        action.microbatch >= schedule_.num_microbatches) {
      refuse(
          schedule_,
          concat(action.text(), " on rank ", place.rank, " is of no stage or microbatch: stages ",
                 "are 0 to ", schedule_.num_stages() - 1, ", microbatches 0 to ",
                 schedule_.num_microbatches - 1),
          {place});
    }
    const int owner = schedule_.rank_of_stage[action.stage];
    if (owner != place.rank) {
      refuse(schedule_,
             concat(action.text(), " is on rank ", place.rank, ", but stage ", action.stage,
                    " is on rank ", owner, ": all actions of a stage run on one rank"),
             {place});
    }
    Places& places = places_of(action.stage, action.microbatch);
    std::optional<Place>& own = places[static_cast<size_t>(action.kind)];
    if (own) {
      refuse(schedule_, concat(action.text(), " is there twice on rank ", place.rank),
             {*own, place});
    }
    own = place;
  }

  void check_completeness(int stage, int microbatch, bool has_backward) {
    const Places& places = places_of(stage, microbatch);
    const auto text = [&](ActionKind kind) { return Action{stage, kind, microbatch}.text(); };
    const auto require = [&](ActionKind kind, const std::string& why) {
      if (at(places, kind)) return;
      std::vector<Place> marked;
      for (const auto& place : places) {
        if (place) marked.push_back(*place);
      }
      refuse(schedule_,
             concat(text(kind), " is missing on rank ", schedule_.rank_of_stage[stage], why),
             marked);
    };
    require(ActionKind::kForward, "");
    if (!has_backward) return;
    if (at(places, ActionKind::kBackward)) {
      for (const ActionKind part : {ActionKind::kInput, ActionKind::kWeight}) {
        if (!at(places, part)) continue;
        refuse(schedule_,
               concat(text(ActionKind::kBackward), " and ", text(part),
                      " are both there: B is I and W in one"),
               {*at(places, ActionKind::kBackward), *at(places, part)});
      }
    } else if (!at(places, ActionKind::kInput) && !at(places, ActionKind::kWeight)) {
      require(ActionKind::kBackward, concat(", and so are ", text(ActionKind::kInput), " and ",
                                            text(ActionKind::kWeight), " in its place"));
    } else {
      require(ActionKind::kInput, concat(", which ", text(ActionKind::kWeight), " needs"));
      require(ActionKind::kWeight,
              concat(": ", text(ActionKind::kInput), " leaves the parameters' gradients to it"));
    }
  }

  std::optional<Place> giver_of(const StageValue& value) {
    const Places& places = places_of(value.stage, value.microbatch);
    if (value.kind == StageValueKind::kOutput) return at(places, ActionKind::kForward);
    const auto& whole = at(places, ActionKind::kBackward);
    return whole ? whole : at(places, ActionKind::kInput);
  }

  // On one rank, what an action needs stands before it, and not in the same pair.
  void check_order(Place place, const Entry& entry) {
    for_each_action(entry, [&](const Action& action) {
      for (const StageValue& value : needs_of(action, schedule_.num_stages())) {
        const Place giver = *giver_of(value);
        if (giver.rank != place.rank || giver.index < place.index) continue;
        const std::string needed = schedule_.actions[giver.rank][giver.index].text();
        refuse(schedule_,
               giver == place ? concat(needed, " on rank ", place.rank, ": ", action.text(),
                                       " needs the other action of its pair; a pair runs at once")
                              : concat(action.text(), " comes before ", needed, " on rank ",
                                       place.rank, ", which it needs"),
               {place, giver});
      }
    });
  }

  void check_circles() {
    const std::vector<int> visited = visit_in_order(schedule_, [](Place, const Entry&) {});
    bool all = true;
    for (int rank = 0; rank < schedule_.num_ranks(); ++rank) {
      all = all && visited[rank] == static_cast<int>(schedule_.actions[rank].size());
    }
    if (all) return;
    const auto giver = [&](const StageValue& value) { return *giver_of(value); };
    const std::vector<Place> cycle = smallest_waiting_cycle(schedule_, visited, giver);
    refuse(schedule_, describe_waiting_cycle(schedule_, cycle), cycle);
  }

  std::vector<bool> accumulates_in_order() const {
    std::vector<bool> in_order(static_cast<size_t>(schedule_.num_stages()), true);
    std::vector<int> last_weight(in_order.size(), -1);
    std::vector<int> last_input(in_order.size(), -1);
    const auto follow = [&](const Action& action, std::vector<int>& last) {
      if (action.microbatch < last[action.stage]) in_order[action.stage] = false;
      last[action.stage] = action.microbatch;
    };
    for_each_entry([&](Place, const Entry& entry) {
      for_each_action(entry, [&](const Action& action) {
        if (accumulates(action)) follow(action, last_weight);
        const bool is_input =
            action.kind == ActionKind::kBackward || action.kind == ActionKind::kInput;
        if (is_input) follow(action, last_input);
      });
    });
    return in_order;
  }

  const Schedule& schedule_;
  std::vector<Places> places_;
};

// Above this many, what is missing is not looked for one by one.
constexpr size_t kMaxForwards = size_t{1} << 24;

void check_shape(const Schedule& schedule) {
  PYDIST_CHECK(schedule.num_ranks() > 0, ScheduleError, "schedule '", schedule.name,
               "' has no ranks");
  PYDIST_CHECK(schedule.num_microbatches > 0 && schedule.num_stages() > 0, ScheduleError,
               "schedule '", schedule.name, "' has no actions");
  size_t num_entries = 0;
  for (const auto& entries : schedule.actions) num_entries += entries.size();
  const size_t num_forwards =
      static_cast<size_t>(schedule.num_stages()) * static_cast<size_t>(schedule.num_microbatches);
  PYDIST_CHECK(num_forwards <= std::max(kMaxForwards, 2 * num_entries), ScheduleError, "schedule '",
               schedule.name, "' has ", num_entries, " entries, too few for ",
               schedule.num_stages(), " stages and ", schedule.num_microbatches, " microbatches");
  for (int stage = 0; stage < schedule.num_stages(); ++stage) {
    const int rank = schedule.rank_of_stage[stage];
    PYDIST_CHECK(rank >= 0 && rank < schedule.num_ranks(), ScheduleError, "schedule '",
                 schedule.name, "': stage ", stage, " is on rank ", rank, " of ",
                 schedule.num_ranks());
  }
  for (int rank = 0; rank < schedule.num_ranks(); ++rank) {
    PYDIST_CHECK(schedule.num_stages_on(rank) > 0, ScheduleError, "schedule '", schedule.name,
                 "': rank ", rank, " has no stage; leave it out of the group");
  }
}

}  // namespace

Validity validate(const Schedule& schedule) {
  check_shape(schedule);
  return Checker(schedule).check();
}

}  // namespace pydist
