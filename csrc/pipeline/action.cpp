// How actions are written and read: "0F3", and "0F3&5B1" for an overlapped pair.
#include "pipeline/action.h"

#include <charconv>

#include "base/check.h"
#include "pipeline/schedule.h"

namespace pydist {

namespace {

constexpr std::string_view kLetters = "FBIW";  // in the order of ActionKind

[[noreturn]] void refuse(std::string_view text) {
  throw ScheduleError(concat(
      "'", text, "' is no action: expected a stage, one of F, B, I or W, and a microbatch, ",
      "as in '0F3' (stage 0, forward, microbatch 3), or an overlapped pair as in '0F3&5B1'"));
}

// Takes a number without sign off the front of `rest`.
int take_number(std::string_view* rest, std::string_view whole) {
  int value = 0;
  const char* begin = rest->data();
  const auto [end, error] = std::from_chars(begin, begin + rest->size(), value);
  if (error != std::errc() || *begin == '-') refuse(whole);
  rest->remove_prefix(static_cast<size_t>(end - begin));
  return value;
}

Action parse_action(std::string_view text, std::string_view whole) {
  Action action;
  action.stage = take_number(&text, whole);
  const size_t kind = text.empty() ? std::string_view::npos : kLetters.find(text.front());
  if (kind == std::string_view::npos) refuse(whole);
  action.kind = static_cast<ActionKind>(kind);
  text.remove_prefix(1);
  action.microbatch = take_number(&text, whole);
  if (!text.empty()) refuse(whole);
  return action;
}

}  // namespace

char letter(ActionKind kind) { return kLetters[static_cast<size_t>(kind)]; }

std::string Action::text() const { return concat(stage, letter(kind), microbatch); }

std::string Entry::text() const {
  return second ? concat(first.text(), "&", second->text()) : first.text();
}

Entry Entry::parse(std::string_view text) {
  const size_t ampersand = text.find('&');
  Entry entry{parse_action(text.substr(0, ampersand), text)};
  if (ampersand != std::string_view::npos) {
    entry.second = parse_action(text.substr(ampersand + 1), text);
  }
  return entry;
}

}  // namespace pydist
